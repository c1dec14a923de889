"""Trajectories in Harbor's format ATIF 1.8, one for each attempt of an episode. Pure.

    for made in trajectories(episode, report): ...      # dicts that `python -m harbor.utils.trajectory_validator` takes

A request repeats its conversation, so a step is made where a message is seen first: each call adds what is new in it,
and its answer. Tool results go back to the step that called the tool. An attempt has one conversation that is its
trajectory, the longest of its main agent. Others are whole trajectories in `subagent_trajectories`: those of sub-agents
hang below the step that started them, with a reference in the tool's result; forks and side conversations say in
`extra.penstock.relation` what they are. A conversation that goes on with less than it had is one trajectory, with a
system step for the compaction as Harbor's own agents write it; what is sent again is `is_copied_context`.

Nothing is made up: times, counts, costs, ids of tokens and log-probabilities stand where the tape has them. What ATIF
has no place for stands in `extra`, and the report counts it.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from penstock.adapters.atif_spans import UNKNOWN, BrokenTrajectoryError, Wire, dumps, trajectory_of
from penstock.adapters.chat import openai_tool
from penstock.adapters.episode import Episode, EpisodeAttempt, EpisodeCall
from penstock.adapters.selection import collect_rewards
from penstock.gateway.model.span import Span, SpanStatus, Usage
from penstock.gateway.model.toml import pluralized
from penstock.gateway.model.tools import SubAgent
from penstock.gateway.model.turn import Choice, Message, Part, Turn
from penstock.gateway.reading.diagnosis.rows import TurnChoice, TurnNode, TurnTree, message_digests, superseded
from penstock.gateway.reading.diagnosis.sub_agents import sub_agents
from penstock.gateway.reading.diagnosis.tool_calls import ModelCall, lead_of, read_tool_requests, share_messages
from penstock.gateway.reading.diagnosis.tool_results import parse_arguments
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.loose_json import obj, objs
from penstock.gateway.wire.dialects.parts import fingerprint
from penstock.gateway.wire.dialects.tokens import read_logprobs, read_tokens

VERSION: Final = "ATIF-v1.8"
TELLING: Final = 80
"""Least characters of an answer that tell, as a part of a later message, that a conversation was compacted."""
Extra = Literal[
    "failed calls",
    "answers besides the first (n > 1)",
    "calls that are no conversation",
    "calls that were sent again",
    "parts that are no text (media, signatures)",
    "arguments that are no JSON object",
    "tool results without their call",
    "answers that were not recorded here",
    "forks and side conversations",
    "tokens without their log-probabilities",
]
"""Contents that ATIF has no place for, as the report counts them."""


@dataclass(slots=True)
class AtifReport:
    """The sums over the trajectories that were made."""

    trajectories: int = 0
    steps: int = 0
    answers: int = 0
    """Steps that a recorded call made."""
    spelt: int = 0
    """Those of them with token ids of prompt and answer."""
    sub_agents: int = 0
    compactions: int = 0
    extra: Counter[str] = field(default_factory=Counter[str])
    """How much stands in `extra`, by `Extra`."""
    empty: int = 0
    """Attempts without a conversation, which have no trajectory."""
    problems: list[str] = field(default_factory=list[str])
    """Imported trajectories that could not be read back, or have recorded calls beside them, each in a sentence."""

    def note(self, what: Extra, count: int = 1) -> None:
        """Count what has no place of its own in ATIF."""
        self.extra[what] += count

    def lines(self) -> list[str]:
        """The sums in words, for people."""
        made = f"{self.trajectories:,} {'trajectory' if self.trajectories == 1 else 'trajectories'}"
        counts = {"step": self.steps, "sub-agent": self.sub_agents, "compaction": self.compactions}
        counts |= {"answer": self.answers}
        made += "".join(f", {pluralized(count, noun)}" for noun, count in counts.items() if count)
        made += f", {self.spelt:,} of them with token ids" if self.answers else ""
        kept = ", ".join(f"{what} {count:,}" for what, count in self.extra.most_common() if count)
        left = f"{pluralized(self.empty, 'attempt')} without a conversation: no trajectory"
        return [made, *([f"in `extra`: {kept}"] if kept else []), *([left] if self.empty else []), *self.problems]


@dataclass(slots=True, eq=False)
class _Answered:
    """A call that is a turn of a conversation."""

    call: EpisodeCall
    turn: Turn
    story: list[tuple[bytes, Message]]
    """The messages of its request behind those of the system, with their fingerprints; empty ones are left out."""
    lead: list[Message]
    replies: dict[int, bytes]

    @classmethod
    def of(cls, call: EpisodeCall, turn: Turn) -> _Answered:
        lead = lead_of(turn.messages)
        story = [(said, it) for it in turn.messages[lead:] if (said := fingerprint(it))]
        replies = {one.index: fingerprint(one.message) for one in turn.choices}
        return cls(call, turn, story, turn.messages[:lead], replies)

    @property
    def sequence(self) -> int:
        return self.call.span.sequence

    def choices(self) -> list[TurnChoice]:
        """Its answers, as the turn tree compares them."""
        told = [said for said, _ in self.story]
        before = message_digests(told)
        return [TurnChoice(at, before, message_digests([*told, said])[-1]) for at, said in self.replies.items() if said]


Node = TurnNode[_Answered]


@dataclass(slots=True, eq=False)
class _Line:
    """A conversation that becomes a trajectory."""

    nodes: list[Node]
    joints: set[int] = field(default_factory=set[int])
    """Places among `nodes` before which the context was replaced."""
    agent: SubAgent | None = None
    steps: list[Wire] = field(default_factory=list[Wire])
    places: dict[int, Wire] = field(default_factory=dict[int, Wire])
    """The step that each call has made, by its sequence."""
    inner: list[_Line] = field(default_factory=list["_Line"])
    """Conversations that are embedded in this one."""
    relation: str | None = None

    @property
    def first(self) -> int:
        return self.nodes[0].call.sequence

    @property
    def last(self) -> int:
        return self.nodes[-1].call.sequence


def trajectories(episode: Episode, report: AtifReport) -> Iterator[tuple[str, Wire]]:
    """Yield the trajectory of each attempt that has a conversation, with the attempt's id. Imported ones are made again
    from their spans, which must have been loaded. Everything else is counted in the report.
    """
    for one in episode.attempts:
        made = _imported(one, report) or _Attempt(episode, one, report).trajectory()
        if made is None:
            report.empty += bool(one.calls)
        else:
            report.trajectories += 1
            yield one.attempt.id, made


def _imported(one: EpisodeAttempt, report: AtifReport) -> Wire | None:
    """The trajectory that was imported as this attempt, with rewards that were given since; None without one."""
    where = f"{one.attempt.rollout}/{one.attempt.id}"
    try:
        made = trajectory_of(one.spans)
    except BrokenTrajectoryError as error:
        report.problems.append(f"{where} is not as it was imported: {error}")
        return None
    if made is None:
        return None
    if one.calls:
        report.problems.append(f"{where} was imported, and is written without its {len(one.calls):,} recorded calls")
    judged = collect_rewards(one)
    ours = obj(obj(made.get("extra")).get("penstock"))
    if judged.reward is not None and judged.reward != ours.get("reward"):
        more = {"reward": judged.reward, **({"rewards": dict(judged.dimensions)} if judged.dimensions else {})}
        made["extra"] = {**obj(made.get("extra")), "penstock": {**ours, **more}}
    _count(made, report)
    return made


def _count(made: Wire, report: AtifReport) -> None:
    steps, inner = objs(made.get("steps")), objs(made.get("subagent_trajectories"))
    report.steps += len(steps)
    for step in steps:
        metrics = obj(step.get("metrics"))
        report.answers += bool(metrics) and not step.get("is_copied_context")
        report.spelt += "prompt_token_ids" in metrics and "completion_token_ids" in metrics
    for one in inner:
        report.sub_agents += 1
        _count(one, report)


def moment(ns: int) -> str:
    """A time of the tape, ns since the epoch, as ATIF writes it; to the microsecond."""
    seconds, rest = divmod(ns, 10**9)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest // 1000).isoformat().replace("+00:00", "Z")


class _Attempt:
    """Makes the trajectory of one attempt."""

    def __init__(self, episode: Episode, one: EpisodeAttempt, report: AtifReport) -> None:
        self._episode, self._one, self._report = episode, one, report
        self._beside: defaultdict[str, list[Wire]] = defaultdict(list)
        """Calls without a step, for `extra`."""

    def trajectory(self) -> Wire | None:
        answered = self._answered()
        if not answered:
            return None
        lines = self._lines(answered)
        for line in lines:
            _Steps(line, self._report).build()
        main = next((line for line in lines if line.agent is None), lines[0])
        self._nest(main, lines)
        return self._document(main, f"{self._one.attempt.rollout}/{self._one.attempt.id}", self._about())

    def _answered(self) -> list[_Answered]:
        """The calls that are turns of conversations; the others are put beside them."""
        good, made, late = list[tuple[EpisodeCall, Turn]](), list[_Answered](), set[int]()
        for call in self._one.calls:
            turn, span = call.turn, call.span
            if span.status != SpanStatus.OK or (turn is not None and turn.error):
                self._aside("failed_calls", "failed calls", call, turn)
            elif turn is None or not any(fingerprint(one.message) for one in turn.choices):
                self._aside("other_calls", "calls that are no conversation", call, turn)
            else:
                good.append((call, turn))
        late = superseded(call.span for call, _ in good)
        for call, turn in good:
            if call.span.sequence in late:
                self._aside("repeated_calls", "calls that were sent again", call, turn)
            else:
                made.append(_Answered.of(call, turn))
        return made

    def _aside(self, name: str, what: Extra, call: EpisodeCall, turn: Turn | None) -> None:
        span = call.span
        known: Wire = {"sequence": span.sequence, "timestamp": moment(span.start_ns), "status": str(span.status)}
        known |= {"dialect": span.dialect, "model": span.model, "http_status": span.http_status, "error": span.error}
        said = "" if turn is None else turn.error or "".join(_text(one.message) for one in turn.choices)
        known |= {"message": said, "metrics": _counts(span.usage), "agent": span.agent}
        self._beside[name].append({key: value for key, value in known.items() if value not in (None, "", {})})
        self._report.note(what)

    def _lines(self, answered: Sequence[_Answered]) -> list[_Line]:
        """The conversations, the main one first."""
        calls = list[ModelCall]()
        for one in answered:
            span = one.call.span
            call = ModelCall(
                span.sequence, span.start_ns, span.end_ns, one.turn, span.agent, span.retry_of, True,
                span.attributes or {},
            )  # fmt: skip
            calls.append(share_messages(call, calls[-1:]))
        agents = sub_agents(calls, read_tool_requests(calls))
        of = {sequence: agent for agent in agents for sequence in agent.calls}
        groups: dict[int, tuple[SubAgent | None, list[_Answered]]] = {}
        for one in answered:
            agent = of.get(one.sequence)
            groups.setdefault(id(agent), (agent, []))[1].append(one)
        found: list[_Line] = []
        for agent, own in groups.values():
            lines = _joined(_chains(own))
            longest = max(lines, key=lambda line: (len(line.nodes), -line.first))
            for line in lines:
                line.agent = agent
                if line is not longest:
                    line.relation = "side" if line.nodes[0].parent is None else "fork"
                    self._report.note("forks and side conversations")
            found += sorted(lines, key=lambda line: line is not longest)
        return sorted(found, key=lambda line: line.agent is not None)

    def _nest(self, main: _Line, lines: Sequence[_Line]) -> None:
        """Embed every other conversation where it was started, else in the main one, or beside its trunk."""
        for line in lines:
            if line is main:
                continue
            agent, asked = line.agent, None if line.agent is None else line.agent.asked_by
            above = next((it for it in lines if it is not line and asked in it.places), None)
            if agent is not None and line.relation is None:
                self._report.sub_agents += 1
            (main if above is None or _within(line, above) else above).inner.append(line)

    def _document(self, line: _Line, name: str, about: Wire) -> Wire:
        inner: list[Wire] = []
        for number, one in enumerate(line.inner, 1):
            inner.append(self._document(one, f"{name}/{number}", _relation(one)))
            agent = one.agent
            if agent is not None and one.relation is None and agent.asked_by in line.places:
                _refer(line.places[agent.asked_by], agent.call_id, inner[-1]["trajectory_id"])
        for number, step in enumerate(line.steps, 1):
            step["step_id"] = number
        self._report.steps += len(line.steps)
        spans = [node.call.call.span for node in line.nodes]
        made: Wire = {"schema_version": VERSION, "session_id": self._one.attempt.rollout, "trajectory_id": name}
        made |= {"agent": _agent(line, spans), "steps": [_ordered(step) for step in line.steps]}
        made |= {"final_metrics": _totals(line, [one["final_metrics"] for one in inner])}
        made |= {"extra": {"penstock": about}} if about else {}
        return made | ({"subagent_trajectories": inner} if inner else {})

    def _about(self) -> Wire:
        """The facts of rollout and attempt that ATIF has no fields for."""
        rollout, attempt, judged = self._episode.rollout, self._one.attempt, collect_rewards(self._one)
        found: Wire = {"rollout": rollout.id, "attempt": attempt.id, "status": str(attempt.status)}
        found |= {"mode": rollout.mode, "group": rollout.group, "input": rollout.input, "reward": judged.reward}
        found |= {"rewards": dict(judged.dimensions), **self._beside}
        return {key: value for key, value in found.items() if value not in (None, {})}


def _within(line: _Line, above: _Line) -> bool:
    """True if the other conversation is embedded in this one already."""
    return any(it is above or _within(it, above) for it in line.inner)


def _relation(line: _Line) -> Wire:
    found: Wire = {} if line.relation is None else {"relation": line.relation}
    if line.agent is not None:
        known = {"agent_id": line.agent.agent_id, "inferred": line.agent.inferred or None}
        found |= {key: value for key, value in known.items() if value is not None}
    parent = line.nodes[0].parent
    return found | ({} if parent is None else {"forked_from": parent.call.sequence})


def _chains(calls: Iterable[_Answered]) -> list[_Line]:
    """The branches of the calls' turn tree, each as long as it can be. An answer that nothing continues, beside another
    to the same request, is no branch."""
    tree: TurnTree[_Answered] = TurnTree()
    for call in calls:
        _ = tree.add(call, call.choices())
    chains = sorted(tree.chains(), key=lambda chain: (-len(chain), chain[0].choice))
    placed, found = set[int](), list[_Line]()
    for chain in chains:
        if len(chain) > 1 or chain[0].call.sequence not in placed:
            found.append(_Line(chain))
        placed |= {node.call.sequence for node in chain}
    return sorted(found, key=lambda line: line.first)


def _joined(lines: Sequence[_Line]) -> list[_Line]:
    """The conversations, where one that goes on with another's context, compacted, is a part of that one."""
    found: list[_Line] = []
    for line in lines:
        before = [it for it in found if it.last < line.first]
        whole = next((it for it in reversed(before) if _compacts(line, it)), None)
        if whole is None or line.nodes[0].parent is not None:
            found.append(line)
        else:
            whole.joints |= {len(whole.nodes)} | {at + len(whole.nodes) for at in line.joints}
            whole.nodes += line.nodes
    return found


def _compacts(line: _Line, before: _Line) -> bool:
    """True if the conversation repeats an answer of the earlier one, whole or within a message."""
    story = line.nodes[0].call.story
    answers = {node.call.replies[node.choice] for node in before.nodes}
    if any(said in answers for said, _ in story):
        return True
    last = before.nodes[-1]
    told = _text(_choice(last).message).strip()
    return len(told) >= TELLING and any(told in _text(message) for _, message in story)


class _Steps:
    """Makes the steps of one conversation."""

    def __init__(self, line: _Line, report: AtifReport) -> None:
        self._line, self._report = line, report
        self._seen = set[bytes]()
        """Fingerprints of messages and answers that have a step."""
        self._lead: list[bytes] = []
        self._calls: list[tuple[str | None, str | None, Wire, Wire]] = []
        """(id, name, step, call) of tool calls, the newest last."""
        self._tools: list[Wire] | None = None

    def build(self) -> None:
        for at, node in enumerate(self._line.nodes):
            call, told = node.call, 0
            self._say_lead(call.lead)
            if at == 0:
                # A fork has the steps of its trunk as a copy.
                copied = 0 if node.parent is None else len(node.parent.call.story) + 1
                for place, (said, message) in enumerate(call.story):
                    self._say(message, said, copied=place < copied)
            else:
                if at in self._line.joints:
                    self._replace(call)
                else:
                    told = len(self._line.nodes[at - 1].call.story) + 1
                for said, message in call.story[told:]:
                    known = at in self._line.joints and said in self._seen
                    if not (known and self._edited):
                        self._say(message, said, copied=known)
            self._answer(node)

    _edited = False
    """True while most of a replaced context is known: then it is not told again."""

    def _replace(self, call: _Answered) -> None:
        known = sum(said in self._seen for said, _ in call.story)
        self._edited = 2 * known > len(call.story)
        kind = "edit" if self._edited else "compaction"
        about: Wire = {"context_management": {"type": kind, "boundary": "replace"}, "penstock": {"kept": known}}
        self._line.steps.append({"source": "system", "message": "The context was replaced.", "extra": about})
        self._report.compactions += 1

    def _say_lead(self, lead: Sequence[Message]) -> None:
        """Tell the system's messages where they are not those of the call before."""
        prints = [fingerprint(message) for message in lead]
        if prints != self._lead:
            for message, said in zip(lead, prints, strict=True):
                if said not in self._lead:
                    self._say(message, said, copied=False)
            self._lead = prints

    def _say(self, message: Message, said: bytes, *, copied: bool) -> None:
        """Add what a message of a request says: its tool results to the steps that called, the rest as a step."""
        self._seen.add(said)
        results = [part for part in message.parts if part.type == "tool_call_response"]
        for result in results:
            self._result(result)
        rest = [part for part in message.parts if part.type != "tool_call_response"]
        if not rest:
            return
        if message.role == "assistant":
            step = self._agent_step(message)
            if not copied:
                self._report.note("answers that were not recorded here")
            step["is_copied_context"] = True
        else:
            known = message.role if message.role in ("system", "user") else None
            step = {"source": known or ("system" if message.role == "developer" else "user")}
            step |= {"message": _content(rest)}
            about = ({} if known else {"role": message.role}) | ({"name": message.name} if message.name else {})
            about |= self._parts(rest)
            step |= {"extra": {"penstock": about}} if about else {}
            step |= {"is_copied_context": True} if copied else {}
        self._line.steps.append(step)

    def _parts(self, parts: Iterable[Part]) -> Wire:
        """The parts that ATIF cannot hold, for `extra`."""
        odd = [part for part in parts if part.type in ("media", "unknown", "refusal") or part.data is not None]
        odd = [part for part in odd if part.type != "tool_call"]
        self._report.note("parts that are no text (media, signatures)", len(odd))
        return {"parts": [part.model_dump(exclude_none=True) for part in odd]} if odd else {}

    def _agent_step(self, message: Message) -> Wire:
        step: Wire = {"source": "agent", "message": _content(message.parts)}
        thought = [part.text for part in message.parts if part.type == "reasoning" and part.text]
        step |= {"reasoning_content": "".join(thought)} if thought else {}
        about = self._parts(message.parts)
        step |= {"extra": {"penstock": about}} if about else {}
        asked = [part for part in message.parts if part.type == "tool_call"]
        made = [_tool_call(part, f"call-{len(self._calls) + at}", self._report) for at, part in enumerate(asked, 1)]
        step |= {"tool_calls": made} if made else {}
        for part, call in zip(asked, made, strict=True):
            self._calls.append((part.id, part.name, step, call))
        return step

    def _result(self, result: Part) -> None:
        """Put a tool's result into the step that called it; one whose call is not there gets a step of its own."""
        found: Wire = {}
        answered = next((one for one in reversed(self._calls) if _is_of(result, one)), None)
        step: Wire
        if answered is not None:
            step = answered[2]
            found["source_call_id"] = answered[3]["tool_call_id"]
        else:
            self._report.note("tool results without their call")
            step = {"source": "user", "message": "", "extra": {"penstock": {"tool_call_id": result.id}}}
            self._line.steps.append(step)
        found["content"] = result.text or ""
        if result.data is not None:
            found["extra"] = {"penstock": {"data": result.data}}
            self._report.note("parts that are no text (media, signatures)")
        results: list[Wire] = step.setdefault("observation", {"results": []})["results"]
        results.append(found)

    def _answer(self, node: Node) -> None:
        call, span = node.call, node.call.call.span
        said = _choice(node)
        step = self._agent_step(said.message)
        if node is not self._line.nodes[-1] or call.replies[node.choice]:
            self._seen.add(call.replies[node.choice])
        step |= {"timestamp": moment(span.start_ns), "llm_call_count": 1}
        model, effort = span.model_served or span.model, _effort(call.turn.sampling)
        step |= {"model_name": model} if model else {}
        step |= {"reasoning_effort": effort} if effort else {}
        metrics = _metrics(call.call, said.index, self._report)
        step |= {"metrics": metrics} if metrics else {}
        about = step.setdefault("extra", {}).setdefault("penstock", {})
        about |= _facts(span, said)
        others = [self._other(call, one) for one in call.turn.choices if one.index != node.choice]
        about |= {"choices": others} if others else {}
        self._report.note("answers besides the first (n > 1)", len(others))
        tools = [openai_tool(tool) for tool in call.turn.tools]
        if self._tools is not None and tools != self._tools:
            about["tool_definitions"] = tools
        self._tools = tools
        self._report.answers += 1
        self._line.steps.append(step)
        self._line.places[span.sequence] = step

    def _other(self, call: _Answered, one: Choice) -> Wire:
        metrics = _metrics(call.call, one.index, None)
        metrics = {name: metrics[name] for name in ("completion_token_ids", "logprobs") if name in metrics}
        return {
            "index": one.index,
            "finish_reason": one.finish,
            "message": one.message.model_dump(exclude_none=True),
        } | ({"metrics": metrics} if metrics else {})


def _is_of(result: Part, one: tuple[str | None, str | None, Wire, Wire]) -> bool:
    id, name, step, call = one
    if result.id is not None:
        return id == result.id
    told: list[Wire] = step.get("observation", {}).get("results", [])
    return result.name in (None, name) and all(it.get("source_call_id") != call["tool_call_id"] for it in told)


def _refer(step: Wire, call: str | None, trajectory: str) -> None:
    """Add the reference to a sub-agent to the result of the tool call that started it."""
    results: list[Wire] = step.setdefault("observation", {"results": []})["results"]
    own = next((one for one in results if call is not None and one.get("source_call_id") == call), None)
    if own is None:
        known = call is not None and any(it["tool_call_id"] == call for it in step.get("tool_calls", ()))
        own = Wire({"source_call_id": call} if known else {})
        results.append(own)
    refs: list[Wire] = own.setdefault("subagent_trajectory_ref", [])
    refs.append({"trajectory_id": trajectory})


def _tool_call(part: Part, unnamed: str, report: AtifReport) -> Wire:
    value = parse_arguments(part.arguments or "")
    made: Wire = {"tool_call_id": part.id or unnamed, "function_name": part.name or "", "arguments": {}}
    about: Wire = {} if part.id else {"without_id": True}
    if isinstance(value, dict):
        made["arguments"] = value
    else:
        about["arguments"] = part.arguments
        report.note("arguments that are no JSON object")
    return made | ({"extra": {"penstock": about}} if about else {})


def _content(parts: Iterable[Part]) -> str | list[Wire]:
    """The text of a message: a string, or a part for each text where there are several."""
    texts = [part.text or "" for part in parts if part.type in ("text", "refusal")]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts] if texts else ""


def _text(message: Message) -> str:
    return "".join(part.text or "" for part in message.parts if part.type == "text")


def _choice(node: Node) -> Choice:
    return next(one for one in node.call.turn.choices if one.index == node.choice)


def _effort(sampling: Mapping[str, Any]) -> str | None:
    for name in ("reasoning_effort", "reasoning", "output_config"):
        value: Any = sampling.get(name)
        value = obj(value).get("effort") if isinstance(value, dict) else value
        if isinstance(value, str):
            return value
    return None


def _counts(usage: Usage | None) -> Wire:
    if usage is None:
        return {}
    found: Wire = {"prompt_tokens": usage.input_tokens, "completion_tokens": usage.output_tokens}
    found |= {"cached_tokens": usage.cached_tokens}
    more = {"reasoning_tokens": usage.reasoning_tokens, "cache_write_tokens": usage.cache_write_tokens}
    more = {name: count for name, count in more.items() if count is not None}
    return {name: count for name, count in found.items() if count is not None} | ({"extra": more} if more else {})


def _metrics(call: EpisodeCall, choice: int, report: AtifReport | None) -> Wire:
    """Counts, cost and tokens of one answer. With several answers the counts are those of all."""
    span, found = call.span, _counts(call.span.usage)
    found |= {} if span.cost is None else {"cost_usd": span.cost}
    if call.bodies is None or not by_name(span.dialect).token_fields:
        return found
    tokens = read_tokens(call.bodies[1], span.stream)
    own = tokens.outputs.get(choice)
    if own is None or not own.ids:
        return found
    found |= {"prompt_token_ids": _ids(tokens.prompt)} if tokens.prompt else {}
    found["completion_token_ids"] = _ids(own.ids)
    scores = [one.logprob for one in read_logprobs(call.bodies[1], span.stream, choice)]
    whole = len(scores) == len(found["completion_token_ids"]) and None not in scores
    found |= {"logprobs": scores} if whole else {}
    if report is not None:
        report.spelt += bool(tokens.prompt)
        report.note("tokens without their log-probabilities", int(not whole))
    return found


def _ids(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


def _facts(span: Span, said: Choice) -> Wire:
    """The facts of a call that ATIF has no fields for."""
    took = None if span.end_ns is None else span.end_ns - span.start_ns
    found: Wire = {"sequence": span.sequence, "response_id": span.response_id, "finish_reason": said.finish}
    found |= {"duration_ns": took, "first_byte_ns": span.first_byte_ns, "versions": span.versions, "arm": span.arm}
    return {name: value for name, value in found.items() if value is not None}


def _agent(line: _Line, spans: Sequence[Span]) -> Wire:
    names = Counter(span.agent for span in spans if span.agent)
    models = Counter(name for span in spans if (name := span.model_served or span.model))
    made: Wire = {"name": names.most_common(1)[0][0] if names else UNKNOWN, "version": UNKNOWN}
    made |= {"model_name": models.most_common(1)[0][0]} if models else {}
    tools = [openai_tool(tool) for tool in line.nodes[0].call.turn.tools]
    return made | ({"tool_definitions": tools} if tools else {})


def _totals(line: _Line, inner: Iterable[Wire]) -> Wire:
    """Sums over the conversation's own calls; the cost is that of embedded ones too. Missing counts are told."""
    metrics = [step.get("metrics", {}) for step in line.steps if step.get("llm_call_count")]
    found: Wire = {}
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd"):
        counts = [one[name] for one in metrics if name in one]
        counts += [one["total_cost_usd"] for one in inner if "total_cost_usd" in one] if name == "cost_usd" else []
        found |= {f"total_{name}": sum(counts)} if counts else {}
    found["total_steps"] = len(line.steps)
    lacking = sum("prompt_tokens" not in one or "completion_tokens" not in one for one in metrics)
    return found | ({"extra": {"uncounted_calls": lacking}} if lacking else {})


_ORDER: Final = (
    "step_id", "timestamp", "source", "model_name", "reasoning_effort", "message", "reasoning_content", "tool_calls",
    "observation", "metrics", "is_copied_context", "llm_call_count", "extra",
)  # fmt: skip


def _ordered(step: Wire) -> Wire:
    return {name: step[name] for name in _ORDER if name in step}


def as_line(made: Wire) -> bytes:
    """A trajectory as one line of JSON."""
    return dumps(made).encode() + b"\n"
