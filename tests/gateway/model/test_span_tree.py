"""Which of its agent's spans a call was made in, and how a rollout looks with both."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from fakes.goldens import check_golden, text_of
from fakes.memory_tape import MemoryTape, call, chat_exchange
from hypothesis import given
from hypothesis import strategies as st
from rich.console import RenderableType

from penstock.console.views import rollout_tree
from penstock.console.views.rollouts import facts
from penstock.gateway.api.pagination import summary
from penstock.gateway.api.rollouts import detail_of
from penstock.gateway.model.base import SpanKind
from penstock.gateway.model.span import ParentGuess, Span, SpanNode, guess_parents, span_tree


def node(name: str, start: int, end: int, parent: str | None = None, answered: str | None = None) -> SpanNode:
    """A span of the agent's, by milliseconds."""
    return SpanNode(name, parent, "t" * 32, call(at_ms=start).start_ns, call(at_ms=end).start_ns, answered)


def asked(at: int, ms: int = 10, answered: str | None = None, sequence: int = 1) -> Span:
    return call(sequence, at_ms=at, ms=ms, response_id=answered)


def guess(agent: list[SpanNode], at: int, **more: Any) -> tuple[str | None, list[str]]:
    """(parent, candidates) of a call, by name."""
    found = guess_parents(agent, [asked(at, **more)]).get(1, ParentGuess(None))
    return found.parent and found.parent.span_id, [one.span_id for one in found.candidates]


RUN = [node("run", 0, 100), node("step", 10, 50, "run"), node("llm", 20, 30, "step")]


@pytest.mark.parametrize(
    ("at", "parent"), [(5, "run"), (15, "step"), (20, "llm"), (30, "llm"), (31, "step"), (60, "run"), (101, None)]
)
def test_a_call_stands_in_the_innermost_span_that_was_open_when_it_began(at: int, parent: str | None) -> None:
    assert guess(RUN, at) == (parent, [])
    assert guess(RUN[::-1] + RUN, at) == (parent, []), "their order says nothing, nor do spans that were sent twice"
    assert guess(RUN, 25, ms=50) == ("llm", []), "it may outlive its span"
    assert guess([node("a", 0, 10), node("b", 11, 20)], 12) == ("b", []), "one that ended before is no candidate"


BRANCHES = [node("run", 0, 100), node("a", 10, 90, "run"), node("a1", 20, 80, "a"), node("b", 10, 90, "run")]


def test_of_several_branches_it_is_the_span_that_all_stand_in() -> None:
    assert guess(BRANCHES, 30) == ("run", ["b", "a1"])
    assert guess(BRANCHES[1:], 30) == (None, ["b", "a1"])


def test_the_id_of_the_response_decides() -> None:
    named = [*BRANCHES, node("c", 15, 25, "b", answered="c-1")]
    assert guess(named, 30, answered="c-1") == ("c", [])
    assert guess(named, 20, answered="c-2") == ("a1", []), "that span has made another call"
    assert guess(named, 20, answered=None) == ("run", ["c", "a1"])


def test_an_id_that_unrelated_spans_carry_says_nothing() -> None:
    twice = [node("a", 0, 5, answered="c-1"), node("b", 6, 9, answered="c-1"), node("run", 0, 100)]
    assert guess(twice, 50, answered="c-1") == ("run", [])
    inner = [node("a", 0, 5, answered="c-1"), node("b", 1, 4, "a", answered="c-1")]
    assert guess(inner, 50, answered="c-1") == ("b", [])


def test_where_the_id_of_a_response_is_read() -> None:
    said = ('{"id":"c-1","choices":[]}', ' {\n "id" : "c-1"}')
    for attributes in ({"gen_ai.response.id": "c-1"}, *({"output.value": it} for it in said)):
        assert SpanNode.of(call(kind="otel", attributes=attributes)).response_id == "c-1"
    odd: list[Any] = ['{"choices":[]}', ["c-1"], "c-1"]
    for attributes in (None, {"gen_ai.response.id": 7}, *({"output.value": it} for it in odd)):
        assert SpanNode.of(call(kind="otel", attributes=attributes)).response_id is None


NAMES = st.sampled_from("abcdef")
NODES = st.builds(
    node, NAMES, st.integers(0, 20), st.integers(0, 20), st.none() | NAMES, st.none() | st.sampled_from("xyz")
)
CALLS = st.lists(st.builds(asked, st.integers(0, 20), answered=st.none() | st.sampled_from("xyz")), max_size=4)


@given(st.lists(NODES, max_size=8), CALLS, st.randoms())
def test_whatever_strangers_send_the_answer_follows_from_it(
    agent: list[SpanNode], calls: list[Span], random: Any
) -> None:
    calls = [one.model_copy(update={"sequence": number}) for number, one in enumerate(calls, 1)]
    # A name stands for one span, as an id does.
    agent = list({one.span_id: one for one in agent}.values())
    found = guess_parents(agent, calls)
    random.shuffle(agent)
    random.shuffle(calls)
    assert guess_parents(agent, calls) == found
    assert {one.sequence: guess_parents(agent, [one])[one.sequence] for one in calls if one.sequence in found} == found
    for one in calls:
        for open_one in found.get(one.sequence, ParentGuess(None)).candidates:
            assert open_one.start_ns <= one.start_ns <= open_one.end_ns


def any_span(kind: SpanKind, start: int, own: str, parent: str | None) -> Span:
    return call(kind=kind, at_ms=start, span_id=own, parent_id=parent)


KINDS = st.sampled_from(get_args(SpanKind))
SPANS = st.builds(any_span, KINDS, st.integers(0, 20), NAMES, st.none() | NAMES)


@given(st.lists(SPANS, max_size=10))
def test_a_tree_has_every_span_once_and_reaches_it(spans: list[Span]) -> None:
    spans = [one.model_copy(update={"sequence": number}) for number, one in enumerate(spans, 1)]
    inside = span_tree(spans)
    assert sorted(one.sequence for found in inside.values() for one in found) == [one.sequence for one in spans]
    reached, waiting = set[int | None](), list[int | None]([None])
    while waiting:
        at = waiting.pop()
        reached.add(at)
        waiting += [one.sequence for one in inside.get(at, [])]
    assert inside.keys() <= reached


# --- how it looks ---


def agent_span(sequence: int, name: str, at: int, ms: int, own: str, parent: str | None = None, **fields: Any) -> Span:
    about: dict[str, Any] = {"name": name, "at_ms": at, "ms": ms, "span_id": own, "parent_id": parent}
    about |= {"usage": None, "body": None, "model": None, "finish": None, "http_status": None, "response_id": None}
    return call(sequence, kind="otel", **about | fields)


def instrumented() -> MemoryTape:
    """An agent that searches, then asks twice, and whose tool fails. Its spans come when it has ended."""
    tape = MemoryTape()
    hello = [{"role": "user", "content": "Is it raining in Bern?"}]
    again = [*hello, {"role": "user", "content": "And?"}]
    tape.add(call(1, at_ms=1300, ms=500), chat_exchange(hello, {"content": "I shall look."}))
    tape.add(call(2, at_ms=2500, ms=300), chat_exchange(again, {"content": "Yes."}))
    tape.add(call(3, at_ms=4000, ms=100), chat_exchange(hello, {"content": "Alone."}))
    searched = {"db.query.text": "SELECT 1", "city": "Bern", "retries": 0, "span.kind": "internal", "thread.id": 7}
    tape.add(agent_span(4, "search", 1100, 50, "s", attributes=searched))
    asked: dict[str, Any] = {"gen_ai.request.model": "gpt-5-mini", "gen_ai.usage.input_tokens": 100}
    asked |= {"gen_ai.usage.output_tokens": 20, "input.value": '{"messages": []}'}
    asked |= {"gen_ai.input.messages": [{"role": "user", "parts": []}]}
    tape.add(agent_span(5, "chat gpt-5-mini", 1200, 700, "c", "run", attributes=asked))
    failed = {"gen_ai.tool.name": "weather", "gen_ai.tool.call.arguments": {"city": "Bern"}}
    failed |= {"otel.status_description": "TimeoutError: no answer\nin 20 ms"}
    error = {"status": "error", "error": "otel", "attributes": failed}
    tape.add(agent_span(6, "execute_tool weather", 2100, 20, "w", "run", **error))
    tape.add(agent_span(7, "invoke_agent forecaster", 1000, 2000, "run", attributes={"task": "x" * 100, "dry": True}))
    return tape


def shown(tape: MemoryTape) -> RenderableType:
    rollout = tape.rollout("r1")
    assert rollout is not None
    return rollout_tree.rollout_tree(summary(tape, rollout), [detail_of(tape, span) for span in tape.spans("r1")])


def test_an_instrumented_agent() -> None:
    check_golden("instrumented-rollout", shown(instrumented()))


def test_spans_that_stand_deeper_than_a_terminal_is_wide_are_all_shown() -> None:
    tape = MemoryTape()
    for depth in range(1, 1500):
        parent = f"s{depth - 1}" if depth > 1 else None
        tape.add(agent_span(depth, f"level-{depth}", depth, 1500 - depth, f"s{depth}", parent))
    text = text_of(shown(tape), 200)
    assert "level-1499" in text
    assert max(len(line) - len(line.lstrip("│ └├─")) for line in text.splitlines()) < 100


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        (None, []),
        ({"a": 1, "b": 0.5, "c": True, "d": "x", "e": "never"}, ["a 1", "b 0.5", "c true", "d x"]),
        ({"messages": '[{"a": 1}]', "map": {"a": 1}, "list": [1], "none": None, "empty": " "}, []),
        ({"a": "y" * 61}, [f"a {'y' * 59}…"]),
        ({"http.method": "POST", "http.url": "http://x/y", "http.status_code": 200}, ["url http://x/y", "http 200"]),
        ({"llm.model_name": "m", "gen_ai.request.model": "n"}, ["model n"]),
        ({"llm.token_count.prompt": 7}, ["7 → ? tokens"]),
        ({"gen_ai.tool.name": "made"}, []),
    ],
)
def test_a_few_attributes_are_told(attributes: dict[str, Any] | None, told: list[str]) -> None:
    assert facts(call(kind="otel", name="made up", attributes=attributes)) == told
