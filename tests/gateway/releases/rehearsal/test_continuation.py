"""Requests that go on without their agent, read again by their dialects."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from fakes.provider import FORMATS
from fakes.wire_bodies import sse
from hypothesis import given
from hypothesis import strategies as st

from examples.demo.model import DemoAnswer, DemoToolCall, Json
from penstock.gateway.model.turn import Message, Part
from penstock.gateway.traffic.trials.tool_player import (
    ContinuationError,
    HiddenMessages,
    exchange,
    plain,
    restore,
)
from penstock.gateway.wire.dialects import by_name, find
from penstock.gateway.wire.dialects.base import JsonPostDialect

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
words = texts.filter(str.strip)
names = st.text("abcdef_", min_size=1, max_size=8)
arguments = st.dictionaries(names, st.none() | st.booleans() | st.integers(-9, 9) | texts, max_size=3)
calls = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)


def dialect(name: str) -> JsonPostDialect:
    found = by_name(name)
    assert isinstance(found, JsonPostDialect)
    return found


def answered(name: str, asked: Json, said: str, made: list[tuple[str, Json]], stream: bool) -> bytes:
    """A model's answer with tool calls, on the wire."""
    if name == "gemini":
        parts: list[Json] = [{"text": said}] if said else []
        parts += [{"functionCall": {"name": it, "args": given}, "thoughtSignature": "s"} for it, given in made]
        candidates: list[Json] = [{"content": {"role": "model", "parts": [part]}} for part in parts]
        candidates[-1]["finishReason"] = "STOP"
        answers: list[Json] = [{"candidates": [candidate]} for candidate in candidates]
        if stream:
            return b"".join(b"data: " + json.dumps(one).encode() + b"\r\n\r\n" for one in answers)
        return json.dumps({"candidates": [{"content": {"role": "model", "parts": parts}}]}).encode()
    if name == "codeassist":
        told = answered("gemini", asked, said, made, stream)
        return re.sub(rb"(?m)\{.*\}", rb'{"response": \g<0>}', told)
    if name == "interactions":
        steps: list[Json] = [{"type": "model_output", "content": [{"type": "text", "text": said}]}] if said else []
        steps += [{"type": "function_call", "id": f"c{at}", "name": it, "arguments": given}
                  for at, (it, given) in enumerate(made)]  # fmt: skip
        ended: Json = {"id": "i", "status": "requires_action"}
        if stream:
            starts = [{"event_type": "step.start", "index": at, "step": step} for at, step in enumerate(steps)]
            events = [{"event_type": "interaction.created", "interaction": {"id": "i"}}, *starts]
            return sse(*events, {"event_type": "interaction.completed", "interaction": ended})
        return json.dumps(ended | {"steps": steps}).encode()
    wanted = tuple(DemoToolCall(f"call_{at}", it, json.dumps(given)) for at, (it, given) in enumerate(made))
    plain, piecewise = FORMATS[PATHS[name]]
    answer = DemoAnswer(said, wanted)
    return b"".join(piecewise(asked, answer)) if stream and piecewise else json.dumps(plain(asked, answer)).encode()


def request(name: str, questions: list[str]) -> Json:
    """A request with these questions."""
    if name == "gemini":
        system = {"parts": [{"text": "Be brief."}]}
        return {"systemInstruction": system, "contents": [{"role": "user", "parts": [{"text": q}]} for q in questions]}
    if name == "codeassist":
        return {"model": "m", "request": request("gemini", questions)}
    if name == "interactions":
        steps = [{"type": "user_input", "content": [{"type": "text", "text": q}]} for q in questions]
        return {"model": "m", "system_instruction": "Be brief.", "input": steps if questions[1:] else questions[0]}
    told = [{"role": "user", "content": question} for question in questions]
    asked: Json = {"model": "m", "temperature": 0.5, "tools": []}
    if name == "responses":
        return asked | {"instructions": "Be brief.", "input": told}
    if name == "messages":
        return asked | {"max_tokens": 9, "system": "Be brief.", "messages": told}
    return asked | {"messages": [{"role": "system", "content": "Be brief."}, *told]}


def recorded(name: str, call: str, text: str) -> Part:
    """A result as it is read from a request of this dialect."""
    if name == "codeassist":
        return recorded("gemini", call, text)
    if name == "interactions":
        body: Json = {"input": [{"type": "function_result", "call_id": "old", "name": call, "result": text}]}
    elif name == "gemini":
        part = {"functionResponse": {"name": call, "response": {"result": text}}}
        body = {"contents": [{"role": "user", "parts": [part]}]}
    elif name == "messages":
        block = {"type": "tool_result", "tool_use_id": "old", "content": text}
        body = {"messages": [{"role": "user", "content": [block]}]}
    elif name == "responses":
        body = {"input": [{"type": "function_call_output", "call_id": "old", "output": text}]}
    else:
        body = {"messages": [{"role": "tool", "tool_call_id": "old", "content": text}]}
    return dialect(name).read(json.dumps(body).encode(), b"", False).messages[0].parts[0]


def flat(messages: list[Message]) -> list[tuple[str, Part]]:
    """Parts with their roles: how many messages a role's parts are in, dialects do not agree on."""
    return [(message.role, part) for message in messages for part in message.parts]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("name", ["chat", "messages", "responses", "gemini", "codeassist", "interactions"])
@given(questions=st.lists(words, min_size=1, max_size=3), said=words | st.just(""), made=calls, data=st.data())
def test_read_again_it_is_the_conversation_the_answer_and_the_results(
    name: str, stream: bool, questions: list[str], said: str, made: list[tuple[str, Json]], data: st.DataObject
) -> None:
    spoken, asked = dialect(name), request(name, questions)
    body = json.dumps(asked).encode()
    response = answered(name, asked, said, made, stream)
    results = [recorded(name, call, data.draw(texts)) for call, _ in made]
    told = [*spoken.conversation(asked), *exchange(spoken, response, stream, results)]
    before = spoken.read(body, response, stream)
    after = spoken.read(json.dumps(spoken.with_conversation(asked, told)).encode(), b"", False)
    ids = [part.id for part in before.choices[0].message.parts if part.type == "tool_call"]
    wanted = flat([*before.messages, before.choices[0].message])
    got = flat(after.messages)
    assert got[: len(wanted)] == wanted
    rest = [part for _, part in got[len(wanted) :]]
    assert [(part.type, part.id, part.text, part.data) for part in rest] == [
        ("tool_call_response", call_id, result.text, result.data) for call_id, result in zip(ids, results, strict=True)
    ]
    assert (after.sampling, after.tools, after.model) == (before.sampling, before.tools, before.model)


@given(said=texts)
def test_a_failed_result_of_anthropic_stays_one(said: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "old", "content": said, "is_error": True}
    body = json.dumps({"messages": [{"role": "user", "content": [block]}]}).encode()
    result = dialect("messages").read(body, b"", False).messages[0].parts[0]
    asked = request("messages", ["?"])
    response = answered("messages", asked, "", [("look", {})], False)
    (_, turn) = exchange(dialect("messages"), response, False, [result])
    assert turn["content"] == [block | {"tool_use_id": "call_0"}]


def test_functions_of_before_there_were_tools() -> None:
    message = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
    response = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
    made = exchange(dialect("chat"), response, False, [Part(type="tool_call_response", text="7")])
    assert made == [message, {"role": "function", "name": "look", "content": "7"}]


def test_a_call_whose_result_has_another_shape_cannot_be_gone_on_with() -> None:
    item = {"type": "computer_call", "id": "i", "call_id": "c", "action": {"type": "screenshot"}}
    with pytest.raises(ContinuationError):
        exchange(dialect("responses"), json.dumps({"output": [item]}).encode(), False, [Part(type="unknown")])


# -- what the agent has not seen ---------------------------------------------------------------------------------------


def told(role: str, text: str, **more: Any) -> Json:
    return {"role": role, "content": text} | more


HIDDEN = [told("assistant", "", tool_calls=[]), told("tool", "7")]
FIRST = HiddenMessages([told("user", "a")], HIDDEN)


def test_what_the_agent_has_not_seen_is_put_back_before_the_answer() -> None:
    later = [told("user", "a"), told("assistant", "b"), told("user", "c")]
    assert restore(later, [FIRST]) == [later[0], *HIDDEN, *later[1:]]
    second = HiddenMessages(later, [told("tool", "8")])
    longer = [*later, told("assistant", "d"), told("user", "e")]
    assert restore(longer, [FIRST, second]) == [later[0], *HIDDEN, *later[1:], told("tool", "8"), *longer[3:]]


def test_it_is_put_back_where_markers_of_caches_have_moved() -> None:
    later = [told("user", "a", cache_control={"type": "ephemeral"}), told("assistant", "b"), told("user", "c")]
    assert restore(later, [FIRST])[1:3] == HIDDEN


def test_a_long_conversation_is_not_copied_for_each_of_its_places() -> None:
    """The event loop does this before each request; it took four seconds."""
    parts = [{"type": "text", "text": "a"}] * 3
    long: list[Json] = [{"role": "user" if at % 2 == 0 else "assistant", "content": parts} for at in range(2001)]
    before = plain(long)
    hidden = [HiddenMessages(before[:end], HIDDEN) for end in range(1, 1000, 2)]
    began = time.process_time()
    assert len(restore(long, hidden)) == len(long) + 2 * len(hidden)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "messages",
    [
        [told("user", "a")],
        [told("user", "a"), told("user", "again")],
        [told("user", "another"), told("assistant", "b"), told("user", "c")],
    ],
)
def test_another_conversation_is_left_alone(messages: list[Json]) -> None:
    assert restore(messages, [FIRST]) == messages


def test_paths_are_of_their_dialects() -> None:
    assert {name: find("POST", path).name for name, path in PATHS.items()} == {name: name for name in PATHS}
