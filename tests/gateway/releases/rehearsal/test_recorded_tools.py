"""Cassettes of tool results, also of real trajectories."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from fakes.some import some

from bench.trajectories import DATA, calls_of
from penstock.gateway.model.turn import Turn
from penstock.gateway.traffic.trials.tool_player import Cassette, CassetteMiss
from penstock.gateway.wire.dialects import by_name


def call(number: int, name: str, arguments: str) -> dict[str, Any]:
    """An assistant's message with one call."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}]}


def result(number: int, text: str) -> dict[str, Any]:
    """What its tool returned."""
    return {"role": "tool", "tool_call_id": f"c{number}", "content": text}


def turn(*messages: dict[str, Any]) -> Turn:
    """A request with these messages."""
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Seat?"}, *messages]
    return by_name("chat").read(json.dumps({"model": "m", "messages": told}).encode(), b"", False)


SAID = [
    call(1, "look", '{"seat": "1A", "row": 1}'),
    result(1, "free"),
    call(2, "look", '{"row":1,"seat":"1A"}'),
    result(2, "taken"),
    call(3, "book", "{}"),
    result(3, "done"),
]
TURNS = [turn(*SAID[:end]) for end in (0, 2, 4, 6)]


def test_a_call_returns_what_it_returned_the_same_time_before() -> None:
    cassette = Cassette.of(TURNS)
    answers = [cassette.answer(*asked) for asked in [("book", ""), *[("look", '{"row":1.0,"seat":"1A"}')] * 2]]
    assert [answer.text if answer else None for answer in answers] == ["done", "free", "taken"]
    assert not cassette.misses


def test_what_was_not_called_is_a_miss_and_never_made_up() -> None:
    cassette = Cassette.of(TURNS)
    assert cassette.answer("look", '{"seat":"2B"}') is None
    assert len(cassette.misses) == 1
    booked = some(cassette.answer("book", "{}"))
    assert booked.text == "done"
    assert cassette.answer("book", "{}") is None
    assert cassette.misses == [CassetteMiss("look", '{"seat":"2B"}', 1), CassetteMiss("book", "{}", 2)]


def test_what_is_taken_back_is_given_again_and_not_what_another_request_has() -> None:
    cassette, asked = Cassette.of(TURNS), ("look", '{"row":1,"seat":"1A"}')
    mine, others = cassette.answer(*asked), cassette.answer(*asked)
    assert mine is not None
    assert others is not None
    cassette.take_back([(*asked, mine)])
    again = cassette.answer(*asked)
    assert again is mine, "the other request, which is under way, has that one"
    assert cassette.answer(*asked) is None
    assert [miss.occurrence for miss in cassette.misses] == [3]


def test_a_conversation_that_is_told_again_counts_once() -> None:
    once, often = Cassette.of(TURNS[-1:]), Cassette.of([*TURNS, TURNS[1], TURNS[-1]])
    assert once.results == often.results
    assert [len(results) for results in often.results.values()] == [2, 1]


def test_two_agents_of_a_rollout_both_count() -> None:
    told = [{"role": "user", "content": "Other"}, call(1, "book", "{}"), result(1, "no")]
    other = by_name("chat").read(json.dumps({"messages": told}).encode(), b"", False)
    cassette = Cassette.of([*TURNS, other])
    assert [part.text for part in cassette.results["book", "{}"]] == ["done", "no"]


def test_calls_that_were_never_answered_have_no_result() -> None:
    cassette = Cassette.of([turn(*SAID[:5])])
    assert cassette.answer("book", "{}") is None


def test_parallel_calls_are_told_apart_and_dialects_without_ids_go_by_name() -> None:
    parts = [{"functionCall": {"name": name, "args": {"x": 1}}} for name in ("a", "b")]
    answers = [{"functionResponse": {"name": name, "response": {"said": name}}} for name in ("b", "a")]
    contents = [{"role": "model", "parts": parts}, {"role": "user", "parts": answers}]
    read = by_name("gemini").read(json.dumps({"contents": contents}).encode(), b"", False)
    cassette = Cassette.of([read])
    for name in ("a", "b"):
        answer = some(cassette.answer(name, '{"x":1}'))
        assert json.loads(answer.text or "") == {"said": name}


@pytest.mark.skipif(not DATA.exists(), reason="the real trajectories are not there")
def test_a_real_agent_that_does_the_same_again_never_diverges() -> None:
    played = 0
    with gzip.open(DATA) as lines:
        for line in lines:
            messages = json.loads(line)["messages"]
            calls = list(calls_of(messages))
            cassette = Cassette.of(by_name("chat").read(body, b"", False) for body, _ in calls)
            told = json.loads(calls[-1][0])["messages"]
            for at, message in enumerate(told):
                for place, made in enumerate(message.get("tool_calls") or (), 1):
                    answer = some(cassette.answer(made["function"]["name"], made["function"]["arguments"]))
                    assert answer.text == told[at + place]["content"]
                    played += 1
            assert not cassette.misses
    assert played > 300


Exchanges = list[tuple[dict[str, Any], dict[str, Any]]]
KEPT_RESPONSES: Exchanges = [
    (
        {"input": "Seat?"},
        {"id": "resp_1", "output": [{"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}]},
    ),
    (
        {
            "input": [{"type": "function_call_output", "call_id": "c1", "output": "free"}],
            "previous_response_id": "resp_1",
        },
        {"id": "resp_2", "output": []},
    ),
]
KEPT_MESSAGES: Exchanges = [
    (
        {"messages": [{"role": "user", "content": "Seat?"}], "thread": {"type": "create"}},
        {"id": "msg_1", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "free"}]}
            ],
            "thread": {"type": "continue", "previous_message_id": "msg_1"},
        },
        {"id": "msg_2", "content": []},
    ),
]


@pytest.mark.parametrize(("dialect", "asked"), [("responses", KEPT_RESPONSES), ("messages", KEPT_MESSAGES)])
def test_a_conversation_that_the_provider_keeps_is_followed_by_its_responses(dialect: str, asked: Exchanges) -> None:
    bodies = [(json.dumps(one).encode(), json.dumps(other).encode()) for one, other in asked]
    cassette = Cassette.of(by_name(dialect).read(one, other, False) for one, other in bodies)
    answer = some(cassette.answer("look", "{}"))
    assert answer.text == "free"
    cassette.take_back([("look", "{}", answer)])
    assert cassette.answer("look", "{}") == answer
    assert cassette.answer("look", "{}") is None
    assert cassette.fresh_copy().answer("look", "{}") == answer
