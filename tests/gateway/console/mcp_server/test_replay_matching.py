"""Which recorded call a request asks for: whatever does not count changes nothing, and whatever counts is told."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from fakes.mistakes import tells
from hypothesis import given
from hypothesis import strategies as st

from penstock.console.mcp_server.replay_calls import (
    CallMatcher,
    ReplayCall,
    ReplayMiss,
    canonical,
    differences,
    key,
    nearest,
)

SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-5, 5) | st.text(max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab/~", max_size=2), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES, max_size=3)
TOOLS = st.tuples(st.sampled_from(["one", "two"]), ARGUMENTS)
META = st.dictionaries(st.sampled_from(["progressToken", "traceparent", "io.modelcontextprotocol/clientInfo"]), VALUES)


def called(name: str, arguments: Any, number: int = 1, server: str = "s", **more: Any) -> ReplayCall:
    return ReplayCall(server, f"a1#{number}", "tools/call", {"name": name, "arguments": arguments, **more})


def shuffled(value: Any) -> Any:
    """The same value written in another way."""
    if isinstance(value, dict):
        return {name: shuffled(one) for name, one in reversed(cast("dict[str, Any]", value).items())}
    if isinstance(value, list):
        return [shuffled(one) for one in cast("list[Any]", value)]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@given(st.lists(TOOLS, max_size=8), st.data())
def test_equal_calls_are_answered_in_their_order_and_others_never(
    recorded: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    calls = [called(name, arguments, number) for number, (name, arguments) in enumerate(recorded, 1)]
    matcher, left = CallMatcher(calls), list(calls)
    asked = data.draw(st.permutations([*recorded, *data.draw(st.lists(TOOLS, max_size=3))]))
    for name, arguments in asked:
        params = {"arguments": shuffled(arguments), "_meta": data.draw(META), "name": name}
        found = matcher.take("tools/call", params)
        same = [one for one in left if canonical(one.params["arguments"]) == canonical(arguments)]
        same = [one for one in same if one.params["name"] == name]
        if same:
            assert found is same[0]
            left.remove(same[0])
        else:
            assert isinstance(found, ReplayMiss)
            assert found.code in (-32601, -32602)


@given(VALUES, VALUES)
def test_values_are_equal_where_nothing_differs(one: Any, other: Any) -> None:
    assert not list(differences(one, shuffled(one)))
    assert bool(list(differences(one, other))) == (canonical(one) != canonical(other))
    assert canonical(one) == canonical(json.loads(json.dumps(one)))


@given(st.lists(TOOLS, min_size=1, max_size=6), TOOLS)
def test_the_nearest_differs_in_the_fewest_places(
    recorded: list[tuple[str, dict[str, Any]]], asked: tuple[str, dict[str, Any]]
) -> None:
    calls = [called(name, arguments, number) for number, (name, arguments) in enumerate(recorded, 1)]
    params = {"name": asked[0], "arguments": asked[1]}
    found, places = nearest(calls, params)
    same = [call for call in calls if call.params["name"] == asked[0]] or calls
    assert found in same
    assert len(places) == min(len(nearest([call], params)[1]) for call in same)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"name": "t"}, {"name": "t", "arguments": {}}, True),
        ({"name": "t", "arguments": None}, {"name": "t", "arguments": {}}, True),
        ({"name": "t", "arguments": {"a": 1}}, {"name": "t", "arguments": {"a": 1.0}}, True),
        ({"name": "t", "arguments": {"a": 1}}, {"name": "t", "arguments": {"a": True}}, False),
        ({"name": "t", "arguments": {"a": 2**60}}, {"name": "t", "arguments": {"a": 2**60 + 1}}, False),
        ({"name": "t", "arguments": {"a": None}}, {"name": "t", "arguments": {}}, False),
        ({"name": "t", "_meta": {"x/y": 1}}, {"name": "t"}, True),
        ({"name": "t", "requestState": "a"}, {"name": "t", "requestState": "b"}, False),
        ({"name": "t", "inputResponses": {"q": 1}}, {"name": "t", "inputResponses": {"q": 2}}, True),
        ({"name": "t", "inputResponses": {"q": 1}}, {"name": "t"}, False),
    ],
)
def test_what_counts(one: Any, other: Any, same: bool) -> None:
    assert (key("tools/call", one) == key("tools/call", other)) == same
    assert key("prompts/get", one) != key("tools/call", one)


def test_who_opens_a_session_does_not_count() -> None:
    assert key("initialize", {"clientInfo": 1}) == key("initialize", None)


def test_a_miss_names_the_nearest_call_and_what_differs() -> None:
    matcher = CallMatcher([called("far", {"city": "Bergen"}, 1), called("search", {"city": "Oslo", "n": [1, 2]}, 2)])
    miss = matcher.take("tools/call", {"name": "search", "arguments": {"city": "Bergen", "n": [1], "x": {}}})
    assert isinstance(miss, ReplayMiss)
    assert miss.code == -32602
    assert tells(miss.message, "nearest is tools/call search (a1#2)", "3 places differ")
    assert miss.message.partition("differ: ")[2].split("; ") == [
        '/arguments/city is "Oslo" there and "Bergen" here',
        "/arguments/n/1 is 2 there and nothing here",
        "/arguments/x is nothing there and {} here",
    ]
    assert miss.data["differs"] == ["/arguments/city", "/arguments/n/1", "/arguments/x"]
    unknown = matcher.take("prompts/get", {"name": "p"})
    assert isinstance(unknown, ReplayMiss)
    assert (unknown.code, unknown.message.rpartition("; ")[2]) == (-32601, "it has: tools/call")


def test_after_the_last_answer_lists_go_on_and_tools_do_not() -> None:
    pages = [ReplayCall("s", f"a1#{number}", "tools/list", None) for number in (1, 2)]
    matcher = CallMatcher([*pages, called("t", {}, 3), called("t", {}, 4)])
    assert [matcher.take("tools/list", {}) for _ in range(4)] == [pages[0], pages[1], pages[1], pages[1]]
    places = [
        found.place for _ in range(2) if isinstance(found := matcher.take("tools/call", {"name": "t"}), ReplayCall)
    ]
    assert places == ["a1#3", "a1#4"]
    over = matcher.take("tools/call", {"name": "t"})
    assert isinstance(over, ReplayMiss)
    assert tells(over.message, "tools/call t was called 2 times", "a1#4 was the last")


def test_a_round_is_known_by_its_state_and_first_by_what_was_answered() -> None:
    first = called("t", {}, 1)
    rounds = [called("t", {}, n, requestState="s", inputResponses={"q": n}) for n in (2, 3)]
    matcher = CallMatcher([first, *rounds])
    assert matcher.take("tools/call", {"name": "t"}) is first
    asked = {"name": "t", "requestState": "s"}
    assert matcher.take("tools/call", asked | {"inputResponses": {"q": 3}}) is rounds[1]
    assert matcher.take("tools/call", asked | {"inputResponses": {"q": 9}}) is rounds[0]


def test_a_round_that_comes_too_early_is_told_what_it_has_too_much() -> None:
    miss = CallMatcher([called("t", {}, 1)]).take("tools/call", {"name": "t", "inputResponses": {}})
    assert isinstance(miss, ReplayMiss)
    assert tells(miss.message, "1 place differs", "/inputResponses is nothing there")


def test_two_servers_are_never_chosen_between() -> None:
    miss = CallMatcher([called("t", {}, 1, "a"), called("t", {}, 2, "b")]).take("tools/call", {"name": "t"})
    assert isinstance(miss, ReplayMiss)
    assert tells(miss.message, "tools/call t", "several servers (a, b)", "--server NAME")
