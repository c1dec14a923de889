"""Which earlier answer a conversation goes on from, or why it goes on from none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.toy_template import Json, packed
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.traffic.proxy.exact.chat_answer import message_fingerprints, messages, only_text
from penstock.gateway.traffic.proxy.exact.sessions import (
    AttemptTurns,
    SessionCache,
    TurnMatch,
    has_standard_prompt,
    learn,
    session_key,
)

KEY = session_key(None, b'{"model":"policy"}', {})
SYSTEM = {"role": "system", "content": "Be good."}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1,  "b": 2}'}}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> Json:
    return {"role": "assistant", "content": text} | more


class Engine:
    """Says what it is told to; every call adds its messages' and answers' ids."""

    def __init__(self) -> None:
        self.attempt = AttemptTurns()
        self.ids: list[int] = []

    def call(self, asked: list[Json], *answers: Json, key: Any = KEY, session: str = "s1", **more: Any) -> None:
        """A call whose prompt goes on from everything before."""
        self.ids += [len(self.ids) + 10]
        choices = [
            {"index": at, "message": one, "finish_reason": "stop", "token_ids": [900 + at]}
            for at, one in enumerate(answers)
        ]
        request = json.dumps({"model": "policy", "messages": asked} | more).encode()
        response = json.dumps({"choices": choices, "prompt_token_ids": self.ids}).encode()
        learn(self.attempt, session, key, (request, response), False)
        self.ids = [*self.ids, 900]

    def find(self, asked: list[Json], key: Any = KEY) -> Any:
        """What a conversation goes on from: the ids of all of it; else why not."""
        found = self.attempt.find(key, message_fingerprints(messages({"messages": asked})))
        return found.turn.ids() if isinstance(found, TurnMatch) else found


BEGUN = [SYSTEM, user("Hi"), assistant("Yes?")]


@pytest.fixture
def engine() -> Engine:
    made = Engine()
    made.call(BEGUN[:2], BEGUN[2])
    return made


def test_a_conversation_goes_on_from_its_answer(engine: Engine) -> None:
    assert engine.find([*BEGUN, user("Why?")]) == packed([10, 900])
    engine.call([*BEGUN, user("Why?")], assistant("So."))
    assert engine.find([*BEGUN, user("Why?"), assistant("So."), user("Ah")]) == packed([10, 900, 12, 900])


def test_the_newest_of_equal_answers_counts(engine: Engine) -> None:
    engine.ids = [77]
    engine.call(BEGUN[:2], BEGUN[2])
    assert engine.find([*BEGUN, user("Why?")]) == packed([77, 11, 900])


def test_tool_calls_are_the_same_however_their_json_is_written(engine: Engine) -> None:
    engine.call([*BEGUN, user("f?")], assistant(None, tool_calls=[CALL]))
    written: Json = CALL | {"function": {"name": "f", "arguments": '{"b":2,"a":1}'}}
    asked = [*BEGUN, user("f?"), assistant("", tool_calls=[written]), {"role": "tool", "content": "1"}]
    assert isinstance(engine.find(asked), bytes)
    for other in ({"id": "c2"}, {"function": {"name": "g", "arguments": "{}"}}):
        changed = assistant("", tool_calls=[written | other])
        assert engine.find([*BEGUN, user("f?"), changed, {"role": "tool", "content": "1"}]) == packed([10, 900])


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ([SYSTEM, user("Ho")], "first"),
        ([user("Hi")], "first"),
        (BEGUN[:2], "forked"),
        ([*BEGUN[:2], assistant("No?"), user("Why?")], "compacted"),
        ([SYSTEM, user("A summary."), assistant("Yes?"), user("Why?")], "compacted"),
    ],
    ids=str,
)
def test_why_nothing_is_gone_on_from(engine: Engine, asked: list[Json], why: str) -> None:
    assert engine.find(asked) == why


def test_a_conversation_without_its_last_answer_is_one_that_is_asked_again(engine: Engine) -> None:
    engine.call([*BEGUN, user("Why?")], assistant("So."))
    assert engine.find([*BEGUN, user("Where?")]) == packed([10, 900])
    assert engine.find([*BEGUN, user("Why?")]) == packed([10, 900])


def test_other_weights_have_other_tokens(engine: Engine) -> None:
    for other in (
        session_key(None, b'{"model":"policy@v2"}', {}),
        session_key(None, b'{"model":"policy"}', {"policy": "v2"}),
    ):
        assert engine.find([*BEGUN, user("Why?")], other) == "version"
    assert engine.find([*BEGUN, user("Why?")], session_key("planner", b'{"model":"policy"}', {})) == "first"


def test_reasoning_may_be_left_out_but_not_made_up(engine: Engine) -> None:
    engine.call([*BEGUN, user("Why?")], assistant("So.", reasoning_content="hm"))
    for field in ({}, {"reasoning_content": "hm"}, {"reasoning": "hm"}):
        asked = [*BEGUN, user("Why?"), assistant("So.", **field), user("Ah")]
        assert engine.find(asked) == packed([10, 900, 12, 900])
    made_up = [*BEGUN, user("Why?"), assistant("So.", reasoning="ha"), user("Ah")]
    assert engine.find(made_up) == packed([10, 900])
    engine.call([*BEGUN, user("Why?"), assistant("So."), user("Ah")], assistant("Oh."))
    assert isinstance(engine.find([*made_up, assistant("Oh."), user("!")]), bytes)
    assert engine.find([*made_up, assistant("Oh."), user("!")]) == packed([10, 900])


@pytest.mark.parametrize("sent", ["So.", "\n\nSo.", "So. \n"])
def test_white_space_at_the_edges_of_an_answer_may_be_left_out(engine: Engine, sent: str) -> None:
    engine.call([*BEGUN, user("Why?")], assistant("\n\nSo. \n", reasoning="\nhm\n"))
    for reasoning in ("\nhm\n", "hm", ""):
        asked = [*BEGUN, user("Why?"), assistant(sent, reasoning=reasoning), user("Ah")]
        assert engine.find(asked) == packed([10, 900, 12, 900])


@pytest.mark.parametrize("text", [None, "", "\n", "\n\n"])
def test_a_blank_text_beside_a_tool_call_may_be_left_out(engine: Engine, text: str | None) -> None:
    engine.call([*BEGUN, user("f?")], assistant("\n\n", tool_calls=[CALL]))
    asked = [*BEGUN, user("f?"), assistant(text, tool_calls=[CALL]), {"role": "tool", "content": "1"}]
    assert engine.find(asked) == packed([10, 900, 12, 900])


def test_of_answers_that_differ_at_their_edges_the_very_one_counts() -> None:
    engine = Engine()
    answers = [assistant(text) for text in ("A", " A", "A\n")]
    engine.call(BEGUN[:2], *answers)
    for at, answer in enumerate(answers):
        assert engine.find([*BEGUN[:2], answer, user("!")]) == packed([10, 900 + at])
    # None of them: the newest one.
    assert engine.find([*BEGUN[:2], assistant(" A "), user("!")]) == packed([10, 902])
    assert engine.find([*BEGUN[:2], assistant("B"), user("!")]) == "compacted"


def test_white_space_in_the_middle_and_of_others_counts(engine: Engine) -> None:
    engine.call([*BEGUN, user("Why?")], assistant("So it is."))
    assert engine.find([*BEGUN, user("Why?"), assistant("So  it is."), user("Ah")]) == packed([10, 900])
    assert engine.find([BEGUN[0], user("Hi "), BEGUN[2], user("Why?")]) == "compacted"


def test_each_of_several_answers_can_be_gone_on_from() -> None:
    engine = Engine()
    engine.call(BEGUN[:2], assistant("A"), assistant("B"))
    assert engine.find([*BEGUN[:2], assistant("A"), user("!")]) == packed([10, 900])
    assert engine.find([*BEGUN[:2], assistant("B"), user("!")]) == packed([10, 901])


def test_an_answer_that_says_nothing_is_not_gone_on_from(engine: Engine) -> None:
    engine.call([*BEGUN, user("Why?")], assistant(None))
    assert engine.find([*BEGUN, user("Why?"), assistant(None), user("Ah")]) == packed([10, 900])


@pytest.mark.parametrize(
    ("finish", "stop", "ended"),
    [("stop", None, True), ("stop", 7, True), ("stop", "So", False), ("length", None, False)],
)
def test_who_stopped_an_answer(finish: str, stop: int | str | None, ended: bool) -> None:
    engine = Engine()
    choice = {"index": 0, "message": assistant("Yes?"), "finish_reason": finish, "stop_reason": stop}
    answer = {"choices": [choice | {"token_ids": [1]}], "prompt_token_ids": [5]}
    body = json.dumps({"model": "m", "messages": BEGUN[:2]}).encode()
    learn(engine.attempt, "s", KEY, (body, json.dumps(answer).encode()), False)
    found = engine.attempt.find(KEY, message_fingerprints(messages({"messages": [*BEGUN, user("?")]})))
    assert isinstance(found, TurnMatch)
    assert found.turn.piece.ended is ended


@pytest.mark.parametrize(
    "more", [{"echo": True}, {"continue_final_message": True}, {"truncate_prompt_tokens": 5}, {"messages": []}], ids=str
)
def test_a_prompt_that_is_not_the_conversation_is_not_learned(more: Json) -> None:
    assert not has_standard_prompt({"messages": BEGUN} | more)
    assert has_standard_prompt(
        {"messages": BEGUN} | {"echo": False, "truncate_prompt_tokens": None, "add_generation_prompt": True}
    )
    engine = Engine()
    engine.call(BEGUN[:2], BEGUN[2], **more)
    assert engine.find([*BEGUN, user("Why?")]) == "first"


def test_pictures_are_seen() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    for content in ([picture], [{"type": "text", "text": "a"}, picture]):
        assert not only_text(messages({"messages": [{"role": "user", "content": content}]}))
        assert not only_text(messages({"messages": [{"role": "tool", "content": content}]}))
    assert only_text(messages({"messages": [*BEGUN, {"role": "tool", "content": [{"type": "text", "text": "a"}]}]}))


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 400)), max_size=40), st.integers(100, 2000))
def test_what_is_kept_is_bounded_and_the_newest(puts: list[tuple[str, int]], most: int) -> None:
    sessions, model = SessionCache(most, 4), dict[str, int]()
    for name, size in puts:
        attempt = AttemptTurns(size=size)
        sessions.put((name, "a1"), attempt)
        model.pop(name, None)
        model[name] = size
        while len(model) > 1 and (sum(model.values()) > most or len(model) > 4):
            del model[next(iter(model))]
        assert sessions.get((name, "a1")) is attempt
    assert {name for name in "abcde" if sessions.get((name, "a1")) is not None} == set(model)


def test_an_attempt_that_grows_is_counted_anew() -> None:
    sessions, attempt = SessionCache(1000), AttemptTurns(size=100)
    sessions.put(("a", "a1"), attempt)
    attempt.size = 900
    sessions.put(("a", "a1"), attempt)
    sessions.put(("b", "a1"), AttemptTurns(size=200))
    assert sessions.get(("a", "a1")) is None
