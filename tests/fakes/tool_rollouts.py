"""Rollouts of agents with tools, of which is known which answer asked for which tool run.

A `Host` is what an agent's program does to names, ids, arguments and results. Agents of one rollout work at the same
time, each in its own conversation, and take what they do from small pools, so that equal calls and results are common.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.model.turn import Choice, Message, Part, Turn
from penstock.gateway.reading.diagnosis.tool_calls import ModelCall
from penstock.gateway.reading.diagnosis.tool_join import ToolCallRef, ToolRun

Json = dict[str, Any]
MS = 1_000_000
SERVERS = {"files": ("read", "write"), "web-search": ("search", "fetch.page"), "db": ("query", "read")}
NAMES: tuple[Callable[[str, str], str], ...] = (
    lambda server, tool: f"mcp__{server}__{tool}",
    lambda server, tool: f"{server}-{tool}",
    lambda server, tool: f"{server}_{tool}",
    lambda server, tool: f"{server}.{tool}",
    lambda server, tool: f"mcp__{server}__{tool}".replace(".", "_").replace("-", "_"),
    lambda server, tool: f"{tool}_mcp_{server}",
)
SHOWN: dict[str, Callable[[Json], str]] = {
    "as it is": lambda result: said(result),
    "lines": lambda result: "\n".join(block["text"] for block in result["content"]) + "\n",
    "tags": lambda result: f"<tool_result name='x'>\n{said(result)}\n</tool_result>",
    "label": lambda result: f"Tool output: {said(result)}",
    "envelope": lambda result: json.dumps({"output": said(result)}),
    "content": lambda result: json.dumps(result["content"], indent=1),
    "whole": lambda result: json.dumps(result),
    "structured": lambda result: json.dumps(result.get("structuredContent", said(result)), indent=2),
    "cut": lambda result: (
        text if len(text := said(result)) < 200 else f"{text[:120]}\n... [truncated {len(text)} characters]"
    ),
    "middle": lambda result: text if len(text := said(result)) < 200 else f"{text[:90]} ... omitted ... {text[-60:]}",
}
"""What a model is shown of a result; each of them can be known again."""


def said(result: Json) -> str:
    return "".join(block["text"] for block in result["content"])


def message(role: str, *parts: Part) -> Message:
    return Message(role=role, parts=list(parts))


def text(words: str) -> Part:
    return Part(type="text", text=words)


def asked(id: str | None, name: str, arguments: Json | str) -> Part:
    given = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return Part(type="tool_call", id=id, name=name, arguments=given)


def shown(id: str | None, words: str, name: str | None = None) -> Part:
    return Part(type="tool_call_response", id=id, text=words, name=name)


@dataclass
class Host:
    """An agent's program."""

    rng: random.Random
    name: Callable[[str, str], str]
    shown: str
    ids: str
    """`unique`, `counted` from 0 in every conversation, or `none`."""
    arguments: str
    """`same`, `reordered`, `without nulls` or `defaults` added."""

    @classmethod
    def any(cls, rng: random.Random) -> Host:
        ids = rng.choices(["unique", "counted", "none"], [6, 2, 1])[0]
        arguments = rng.choice(["same", "reordered", "without nulls", "defaults"])
        return cls(rng, rng.choice(NAMES), rng.choice(list(SHOWN)), ids, arguments)

    def given(self, arguments: Json) -> Json:
        match self.arguments:
            case "reordered":
                return dict(reversed(arguments.items()))
            case "without nulls":
                return {key: value for key, value in arguments.items() if value is not None}
            case "defaults":
                return arguments | {"limit": 10}
            case _:
                return dict(arguments)


@dataclass
class Agent:
    """One conversation."""

    messages: list[Message]
    now: int
    turns: int
    name: str | None
    counted: int = 0


@dataclass
class Truth:
    """What a run was for."""

    asked: ToolCallRef | None
    """None: the host began it."""
    began: int = 0
    """When the model call that asked began."""
    carried: int | None = None
    """When its result was carried; None when it was not."""
    knowable: bool = True
    """False where both sides cannot be compared by any rule."""


@dataclass
class Rollout:
    """A rollout as it is made."""

    rng: random.Random
    host: Host
    calls: list[ModelCall] = field(default_factory=list[ModelCall])
    runs: list[ToolRun] = field(default_factory=list[ToolRun])
    truth: dict[str, Truth] = field(default_factory=dict[str, Truth])
    inside: int = 0
    """Tools that ran inside of agents and whose result was carried."""
    _waiting: list[tuple[Agent, int, list[tuple[int, Part, str]]]] = field(default_factory=list[Any])

    def play(self, agents: list[Agent]) -> None:
        queue = [(agent.now, at, agent) for at, agent in enumerate(agents)]
        heapq.heapify(queue)
        while queue:
            _, at, agent = heapq.heappop(queue)
            self.turn(agent)
            if agent.turns > 0:
                heapq.heappush(queue, (agent.now, at, agent))
        for _ in range(self.rng.randrange(4)):
            server = self.rng.choice(list(SERVERS))
            tool = self.rng.choice(SERVERS[server])
            start = self.rng.randrange(agents[0].now)
            self.run(server, tool, self.chosen(), self.result(), start, Truth(None))

    def turn(self, agent: Agent) -> None:
        """A model call, and the tools that its answer asks for."""
        rng, agent.turns = self.rng, agent.turns - 1
        if len(agent.messages) > 12 and rng.random() < 0.1:
            # Compacted: what is left is a summary and the newest calls with their results.
            last = max(at for at, it in enumerate(agent.messages) if it.role == "assistant")
            agent.messages = [*agent.messages[:2], message("user", text("Summary so far.")), *agent.messages[last:]]
        start = agent.now
        retry = self.failed(agent, start) if rng.random() < 0.05 else None
        start = agent.now
        many = rng.choice([1, 1, 1, 3])
        wanted = [self.answer(agent) for _ in range(many)]
        sequence, end = len(self.calls) + 1, start + rng.randrange(200, 900) * MS
        choices = [Choice(index=at, message=message("assistant", *parts)) for at, (parts, _) in enumerate(wanted)]
        turn = Turn(dialect="chat", messages=list(agent.messages), choices=choices, stream=rng.random() < 0.5)
        self.calls.append(ModelCall(sequence, start, end, turn, agent.name, retry))
        choice = rng.randrange(many)
        parts, tools = wanted[choice]
        agent.now = end + rng.randrange(1, 50) * MS
        if not tools:
            agent.messages = [*agent.messages, message("assistant", *parts), message("user", text("Go on."))]
            return
        calls = [part for part in parts if part.type == "tool_call"]
        results = [
            self.work(agent, ToolCallRef(sequence, part.id, choice, at), tool, start, end)
            for at, (part, tool) in enumerate(zip(calls, tools, strict=True))
        ]
        agent.now += rng.randrange(1, 30) * MS
        answers = [shown(part.id, words, part.name) for part, words in zip(calls, results, strict=True)]
        said = message("assistant", *parts)
        agent.messages = [*agent.messages, said, *(message("tool", answer) for answer in answers)]
        if agent.turns > 0:
            self.carry(sequence, agent.now)

    def failed(self, agent: Agent, start: int) -> int | None:
        """A model call whose client sends it again; whether it says so or not."""
        parts, _ = self.answer(agent)
        agent.counted -= sum(part.type == "tool_call" for part in parts)
        whole, marked = self.rng.random() < 0.3, self.rng.random() < 0.5
        turn = Turn(
            dialect="chat",
            messages=list(agent.messages),
            choices=[Choice(message=message("assistant", *parts))],
        )
        sequence = len(self.calls) + 1
        self.calls.append(ModelCall(sequence, start, start + 90 * MS, turn, agent.name, None, whole))
        agent.now = start + 100 * MS
        return sequence if marked else None

    def answer(self, agent: Agent) -> tuple[list[Part], list[tuple[str, str, Json]]]:
        rng = self.rng
        tools: list[tuple[str, str, Json]] = []
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            server = rng.choice([*SERVERS, ""])
            tools.append((server, rng.choice(SERVERS[server]) if server else "think", self.chosen()))
        if len(tools) > 1 and rng.random() < 0.3:
            tools[1] = tools[0]
        parts = [text("I will look.")]
        for server, tool, arguments in tools:
            name = self.host.name(server, tool) if server else tool
            parts.append(asked(self.id(agent), name, json.dumps(arguments, indent=rng.choice([None, 1]))))
        return parts, tools

    def id(self, agent: Agent) -> str | None:
        if self.host.ids == "none":
            return None
        agent.counted += 1
        return f"call_{agent.counted - 1}" if self.host.ids == "counted" else f"call_{self.rng.getrandbits(64):x}"

    def chosen(self) -> Json:
        rng = self.rng
        if rng.random() < 0.1:
            return {}
        return {"q": rng.choice("abcdef"), "page": rng.choice([None, 1, 2.0]), "deep": {"x": [1, None]}}

    def result(self) -> Json:
        rng = self.rng
        kind = rng.random()
        if kind < 0.2:
            return {"content": [{"type": "text", "text": rng.choice(["ok", "done", "3"])}]}
        rows = [{"row": rng.randrange(10**6), "name": 'näme\n"quoted"'} for _ in range(rng.choice([1, 3, 20]))]
        if kind < 0.4:
            return {"content": [{"type": "text", "text": json.dumps(rows)}], "structuredContent": {"rows": rows}}
        lines = [f"{row['row']}: a line of a page\twith a tab" for row in rows]
        return {"content": [{"type": "text", "text": line} for line in lines], "isError": kind > 0.95}

    def work(self, agent: Agent, who: ToolCallRef, tool: tuple[str, str, Json], began: int, end: int) -> str:
        """Runs a tool; what the model is shown."""
        rng, result = self.rng, self.result()
        # Parallel calls begin together.
        start = end + rng.randrange(1, 40) * MS
        if not tool[0]:
            self.inside += 1
            return said(result)
        truth = Truth(who, began)
        short = len(said(result)) < 30
        truth.knowable = not (short and (self.host.arguments == "defaults" or self.host.shown in ("content", "whole")))
        given = self.host.given(tool[2])
        if rng.random() < 0.05:
            tried = Truth(who, began, knowable=False)
            self.run(tool[0], tool[1], given, None, start, tried)
            start += 500 * MS
        done = self.run(tool[0], tool[1], given, result, start, truth)
        agent.now = max(agent.now, done)
        words = SHOWN[self.host.shown](result)
        if rng.random() < 0.03:
            truth.knowable = False
            words = "The tool was run, and went well enough."
        return words

    def run(self, server: str, tool: str, arguments: Json, result: Json | None, start: int, truth: Truth) -> int:
        key, end = f"t{len(self.runs)}", start + self.rng.randrange(1, 400) * MS
        status = "ok" if result is not None else "cancelled"
        self.runs.append(ToolRun(key, server, tool, arguments, result, start, end, status))
        self.truth[key] = truth
        return end

    def carry(self, sequence: int, now: int) -> None:
        for truth in self.truth.values():
            if truth.asked is not None and truth.asked.sequence == sequence:
                truth.carried = now

    def joinable(self) -> set[str]:
        """The runs that must be linked for certain: their result was carried, and no equal run with an equal result
        lay within the time of the call that asked, or this one within that of the other."""
        found: set[str] = set()
        for run in self.runs:
            truth = self.truth[run.key]
            if truth.carried is None or not truth.knowable:
                continue
            if not any(other is not run and self.alike(run, other) for other in self.runs):
                found.add(run.key)
        return found

    def alike(self, run: ToolRun, other: ToolRun) -> bool:
        same = (run.server, run.tool) == (other.server, other.tool) or self.host.name is NAMES[-1]
        if not same or run.tool != other.tool or not self.equal(run, other):
            return False
        return self.within(run, other) or self.within(other, run)

    def equal(self, run: ToolRun, other: ToolRun) -> bool:
        """With the same arguments and the same look of the result."""
        if json.dumps(bare(run.arguments), sort_keys=True) != json.dumps(bare(other.arguments), sort_keys=True):
            return False
        looks = [SHOWN[self.host.shown](it.result) for it in (run, other) if it.result]
        return len(looks) == 2 and looks[0] == looks[1]

    def within(self, run: ToolRun, other: ToolRun) -> bool:
        truth = self.truth[other.key]
        if truth.asked is None:
            return False
        return truth.began <= run.start_ns and (truth.carried is None or (run.end_ns or 0) <= truth.carried)


def bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: bare(it) for key, it in value.items() if it is not None}  # pyright: ignore
    return int(value) if isinstance(value, float) else value


def rollout(seed: int) -> Rollout:
    """A rollout of one to four agents."""
    rng = random.Random(seed)
    made = Rollout(rng, Host.any(rng))
    agents: list[Agent] = []
    for at in range(rng.choice([1, 1, 2, 4])):
        prompt = rng.choice(["Find it.", "Find it.", f"Find number {at}."])
        system = "You are an agent." if rng.random() < 0.7 else f"You are agent {at}."
        messages = [message("system", text(system)), message("user", text(prompt))]
        name = f"agent{at}" if rng.random() < 0.3 else None
        agents.append(Agent(messages, rng.randrange(1, 3000) * MS, rng.randrange(2, 14), name))
    made.play(agents)
    return made
