"""Sub-agents: named by headers, inferred from conversations; and the tool times that agents give."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes.memory_tape import call
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.facts import AGENT_ID, PARENT_AGENT, TOOL_DURATIONS
from penstock.gateway.model.turn import Choice, Message, Part, Turn
from penstock.gateway.reading.diagnosis.sub_agents import may_have_sub_agents, measured_tools, sub_agents, told_callers
from penstock.gateway.reading.diagnosis.tool_calls import ModelCall, read_tool_requests

Agent = list[list[list[Any]]]
"""What an agent does: in each step it asks for tools, each of which runs agents one after the other."""
NOTHING: Agent = []


def agents(width: int) -> st.SearchStrategy[Agent]:
    """Agents whose answers ask for so many tools at most."""

    def outer(inner: st.SearchStrategy[Agent]) -> st.SearchStrategy[Agent]:
        tools = st.lists(st.lists(inner, max_size=2), min_size=1, max_size=width)
        return st.lists(tools, max_size=2)

    return st.recursive(st.just(NOTHING), outer, max_leaves=8)


@dataclass
class World:
    """Runs an agent and its sub-agents; notes their calls, and which tool call began each."""

    named: bool = False
    """Their headers name them."""
    telling: bool = False
    """The arguments of a tool call hold the prompt of the sub-agent."""
    calls: list[ModelCall] = field(default_factory=list[ModelCall])
    begun: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """By prompt of each sub-agent: the prompt of the agent above, and the id of the tool call."""

    def run(self, agent: Agent, now: int = 0, prompt: str = "The whole task", above: str = "") -> int:
        """When it has ended."""
        about = {AGENT_ID: prompt, PARENT_AGENT: above} if above and self.named else {}
        said = [Message(role="user", parts=[Part(type="text", text=prompt)])]
        for step, tools in enumerate(agent):
            ids = [f"{prompt}, {step}.{at}" for at, _ in enumerate(tools)]
            prompts = [[f"{id}.{at}" for at, _ in enumerate(runs)] for id, runs in zip(ids, tools, strict=True)]
            given = [json.dumps(texts if self.telling else {}) for texts in prompts]
            asks = [Part(type="tool_call", id=id, name="do", arguments=it) for id, it in zip(ids, given, strict=True)]
            now = end = self._call(now, said, asks, about)
            for id, runs, texts in zip(ids, tools, prompts, strict=True):
                then = now
                for inner, text in zip(runs, texts, strict=True):
                    self.begun[text] = prompt, id
                    then = self.run(inner, then + 1, text, prompt)
                end = max(end, then)
            results = [Message(role="tool", parts=[Part(type="tool_call_response", id=id, text="x")]) for id in ids]
            said, now = [*said, Message(role="assistant", parts=asks), *results], end + 1
        return self._call(now, said, [Part(type="text", text="It is done.")], about)

    def _call(self, now: int, said: list[Message], parts: list[Part], about: dict[str, Any]) -> int:
        turn = Turn(dialect="chat", messages=said, choices=[Choice(message=Message(role="assistant", parts=parts))])
        self.calls.append(ModelCall(0, now, now + 5, turn, attributes=about))
        return now + 6

    def found(self) -> dict[str, tuple[str, str | None]]:
        """The same as `begun`, as far as it is found."""
        calls = sorted(self.calls, key=lambda one: one.start_ns)
        calls = [
            ModelCall(at, it.start_ns, it.end_ns, it.turn, attributes=it.attributes) for at, it in enumerate(calls)
        ]
        prompts = [one.turn.messages[0].parts[0].text or "" for one in calls]
        found = sub_agents(calls, read_tool_requests(calls))
        assert all(one.inferred != self.named for one in found)
        for one in found:
            (prompt,) = {prompts[at] for at in one.calls}
            assert prompts.count(prompt) == len(one.calls)
        return {
            prompts[one.calls[0]]: (prompts[one.asked_by], one.call_id) for one in found if one.asked_by is not None
        }


@given(agents(3), st.booleans())
def test_the_tool_call_whose_prompt_it_is_began_a_sub_agent(agent: Agent, named: bool) -> None:
    world = World(named, telling=True)
    world.run(agent)
    assert world.found() == world.begun


@given(agents(1))
def test_without_headers_and_prompts_the_times_tell_of_tools_that_run_alone(agent: Agent) -> None:
    world = World()
    world.run(agent)
    assert world.found() == world.begun


@given(agents(3), st.booleans())
def test_no_sub_agent_is_placed_below_another_call_than_its_own(agent: Agent, named: bool) -> None:
    world = World(named)
    world.run(agent)
    for prompt, (above, id) in world.found().items():
        assert above == world.begun[prompt][0]
        assert id in (None, world.begun[prompt][1])


def test_what_may_be_inside_one_tool_or_beside_it_stays_unlinked() -> None:
    world = World()
    world.run([[[[[[NOTHING, NOTHING]]]], [NOTHING]]])
    assert len(world.begun) == 4
    assert set(world.found()) < set(world.begun)


def heads(*ones: tuple[int, int, int, str | None]) -> list[Any]:
    """Spans, by (start in ms, length in ms, tool calls, id of the sub-agent)."""
    return [
        call(at, at_ms=start, ms=ms, tool_calls=tools, attributes={AGENT_ID: agent} if agent else None)
        for at, (start, ms, tools, agent) in enumerate(ones, 1)
    ]


def test_heads_tell_the_call_that_started_a_named_sub_agent() -> None:
    spans = heads((0, 10, 2, None), (20, 5, 0, "a"), (21, 5, 1, "b"), (40, 5, 0, "b"), (60, 5, 0, None))
    assert told_callers(reversed(spans)) == {2: 1, 3: 1, 4: 1}
    assert told_callers(heads((0, 10, 1, None), (15, 9, 1, None), (20, 5, 0, "a"))) == {}, "either may have"
    assert told_callers(heads((0, 10, 0, None), (20, 5, 0, "a"))) == {}, "it has asked for no tool"
    assert told_callers(heads((0, 10, 1, None))) == {}


def test_a_conversation_that_only_grows_has_no_sub_agents() -> None:
    grows = [call(at, request_bytes=size) for at, size in enumerate((10, 20, 20, 30), 1)]
    assert not may_have_sub_agents(grows)
    assert may_have_sub_agents([*grows, call(5, request_bytes=12)])
    assert may_have_sub_agents([call(1, request_bytes=12, attributes={AGENT_ID: "a"})])


def carried(*names: str) -> list[Message]:
    asks = [Part(type="tool_call", id=str(at), name=name) for at, name in enumerate(names)]
    results = [Part(type="tool_call_response", id=str(at), text=name) for at, name in enumerate(names)]
    reminder = Message(role="user", parts=[Part(type="text", text="Go on")])
    return [reminder, Message(role="assistant", parts=asks), Message(role="user", parts=results), reminder]


@pytest.mark.parametrize(
    ("durations", "names", "took", "left"),
    [
        (["Bash=5", "Read=7"], ["Bash", "Read"], [5, 7], []),
        (["Bash=5", "Read=7", "Bash=9"], ["Bash", "Read", "Bash"], [5, 7, 9], []),
        (["Read=7"], ["Bash", "Read"], [None, 7], []),
        (["Bash=5"], ["Bash", "Bash"], [None, None], ["Bash=5"]),
        (["Bash=5", "Grep=1"], ["Bash"], [5], ["Grep=1"]),
        (["Bash=soon"], ["Bash"], [None], ["Bash=soon"]),
        (["Bash=1234567890123"], ["Bash"], [None], ["Bash=1234567890123"]),
        ([], ["Bash"], [None], []),
    ],
)
def test_tool_times_are_paired_with_results(
    durations: list[str], names: list[str], took: list[int | None], left: list[str]
) -> None:
    messages = carried(*names)
    found = measured_tools({TOOL_DURATIONS: durations}, messages)
    ns = [found.took_ns.get(id(part)) for part in messages[2].parts]
    assert ([one and one // 10**6 for one in ns], found.left) == (took, left)
