"""Anthropic messages and token counting: real wire bodies (checked against the official SDK's models)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message as SdkMessage
from anthropic.types import RawMessageStreamEvent
from fakes.wire_bodies import Json, agreed, body, cut, same, sse
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Part, Turn
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.base import Facts

MESSAGES = by_name("messages")
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

REQUEST: Json = json.loads("""{"model": "claude-x", "max_tokens": 1024, "stream": true, "temperature": 1,
  "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
  "messages": [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "redacted_thinking", "data": "xx"},
        {"type": "text", "text": "Calling."},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sky"}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "blind", "is_error": true},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "blue"}]},
        {"type": "tool_result", "tool_use_id": "toolu_3", "content": [{"type": "image", "source": {}}]},
        {"type": "image", "source": {"type": "url", "url": "http://h/i.png"}}, {"type": "mystery"}]}],
  "tools": [
    {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}},
    {"type": "web_search_20250305", "name": "web_search"}]}""")
USAGE: Json = {
    "input_tokens": 10,
    "cache_read_input_tokens": 100,
    "cache_creation_input_tokens": 20,
    "output_tokens": 30,
    "output_tokens_details": {"thinking_tokens": 7},
    "service_tier": "standard",
}


def answer(*content: Json, stop: str = "end_turn") -> Json:
    head: Json = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x-1", "stop_sequence": None}
    return {**head, "content": list(content), "stop_reason": stop, "usage": USAGE}


def block(at: int, whole: Json) -> list[Json]:
    """A content block as the events that Anthropic sends."""
    empty: Json = {"text": "", "thinking": "", "signature": "", "input": {}}
    start: Json = {key: empty.get(key, value) for key, value in whole.items() if key != "citations"}
    deltas: list[Json] = [{"type": "thinking_delta", "thinking": it} for it in cut(whole.get("thinking", ""))]
    deltas += [{"type": "signature_delta", "signature": whole["signature"]}] if "signature" in whole else []
    deltas += [{"type": "citations_delta", "citation": it} for it in whole.get("citations", [])]
    deltas += [{"type": "text_delta", "text": it} for it in cut(whole.get("text", ""))]
    if whole.get("input"):
        deltas += [{"type": "input_json_delta", "partial_json": it} for it in ["", *cut(json.dumps(whole["input"]))]]
    return [
        {"type": "content_block_start", "index": at, "content_block": start},
        *[{"type": "content_block_delta", "index": at, "delta": it} for it in deltas],
        {"type": "content_block_stop", "index": at},
    ]


def told(plain: Json) -> list[Json]:
    """A plain answer as the events of a stream."""
    start: Json = {**plain, "content": [], "stop_reason": None, "usage": {**USAGE, "output_tokens": 1}}
    blocks = [event for at, it in enumerate(plain["content"]) for event in block(at, it)]
    end: Json = {"stop_reason": plain["stop_reason"], "stop_sequence": None}
    return [
        {"type": "message_start", "message": start},
        {"type": "ping"},
        *blocks,
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": 30, "input_tokens": None}},
        {"type": "message_stop"},
    ]


def read(response: bytes, streamed: bool, request: Any = REQUEST) -> Turn:
    return MESSAGES.read(body(request), response, streamed)


TOOLS = answer(
    {"type": "thinking", "thinking": "Let me look.", "signature": "sig"},
    {"type": "redacted_thinking", "data": "xx"},
    {"type": "text", "text": "Calling \u00e9."},
    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sky", "n": [1, 2.5]}},
    {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
    {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}},
    stop="tool_use",
)
PLACE = {"document_index": 0, "document_title": None, "start_char_index": 0, "end_char_index": 1}
CITED: Json = {"type": "char_location", "cited_text": "a", **PLACE}
ANSWERS: list[Json] = [
    answer({"type": "text", "text": "Hello \U0001f600 there."}),
    TOOLS,
    answer({"type": "text", "text": '"type":"tool_use" \\"type\\":', "citations": [CITED]}, stop="max_tokens"),
    answer(),
]


def test_a_request_is_read_whole() -> None:
    turn = read(body(ANSWERS[0]), False)
    assert [message.role for message in turn.messages] == ["system", "user", "assistant", "user"]
    assert turn.messages[2].parts == [
        Part(type="reasoning", text="Hm."),
        Part(type="reasoning", data={"type": "redacted_thinking", "data": "xx"}),
        Part(type="text", text="Calling."),
        Part(type="tool_call", id="toolu_1", name="look", arguments='{"at":"sky"}'),
    ]
    failed, fine, seen, image, mystery = turn.messages[3].parts
    assert (failed.id, failed.text, failed.data["is_error"]) == ("toolu_1", "blind", True)
    assert fine == Part(type="tool_call_response", id="toolu_2", text="blue")
    assert (seen.text, seen.data) == ("", [{"type": "image", "source": {}}])
    assert (image.type, mystery.type, mystery.data) == ("media", "unknown", {"type": "mystery"})
    assert [tool.name for tool in turn.tools] == ["look", "web_search"]
    assert turn.tools[0].parameters == {"type": "object"}
    assert turn.sampling == {"max_tokens": 1024, "temperature": 1}
    assert turn.problems == []


def test_a_plain_answer() -> None:
    turn = read(body(TOOLS), False)
    assert [part.type for part in turn.choices[0].message.parts] == (
        ["reasoning", "reasoning", "text", "tool_call", "tool_call", "unknown"]
    )
    facts = agreed("messages", body(REQUEST), body(TOOLS), False)
    assert (facts.model, facts.model_served, facts.response_id) == ("claude-x", "claude-x-1", "msg_1")
    assert (facts.finish, facts.tool_calls, facts.choices) == ("tool_use", 2, 1)
    # What was cached is part of the input.
    counted = Usage(input_tokens=130, output_tokens=30, cached_tokens=100, cache_write_tokens=20, reasoning_tokens=7)
    assert facts.usage == counted


@pytest.mark.parametrize("plain", ANSWERS)
def test_a_stream_reads_as_the_plain_answer(plain: Json) -> None:
    SdkMessage.model_validate(plain)
    for event in told(plain):
        if event["type"] not in ("ping", "message_delta"):
            EVENT.validate_python(event)
    wire = sse(*told(plain), named=True)
    same(read(wire, True), read(body(plain), False))
    assert agreed("messages", body(REQUEST), wire, True) == agreed("messages", body(REQUEST), body(plain), False)
    assert MESSAGES.reply_fingerprint(wire, True) == MESSAGES.reply_fingerprint(body(plain), False)


def test_a_stream_that_ends_early_gives_what_there_is() -> None:
    """Broken arguments are kept as they came."""
    events = told(answer({"type": "tool_use", "id": "t", "name": "look", "input": {"at": "the sky"}}))
    turn = read(sse(*events[:6], named=True), True)
    assert turn.choices[0].message.parts[0].arguments == '{"at": '[:6]
    events = told(TOOLS)
    called = next(at for at, event in enumerate(events) if event.get("content_block", {}).get("type") == "tool_use")
    wire = sse(*events[: called + 1], named=True)
    turn = read(wire, True)
    assert turn.problems == ["response: the stream ended early"]
    call = turn.choices[0].message.parts[-1]
    assert (call.type, call.name, call.arguments) == ("tool_call", "look", "{}")
    facts = MESSAGES.facts(body(REQUEST), wire, True)
    assert (facts.response_id, facts.finish, facts.choices) == ("msg_1", None, 1)


@pytest.mark.parametrize("named", [True, False])
def test_an_error_within_a_stream(named: bool) -> None:
    failure = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    turn = read(sse(*told(ANSWERS[0])[:5], failure, named=named), True)
    assert turn.error == "Overloaded"
    assert turn.problems == []
    assert turn.choices[0].message.parts[0].text == "Hello"[:3] + "lo "

    turn = read(body({"type": "error", "error": {"type": "invalid_request_error", "message": "No."}}), False)
    assert (turn.error, turn.choices) == ("No.", [])


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_an_answer_sent_back_is_known_again(system: Any) -> None:
    back = [dict(reversed(it.items())) for it in TOOLS["content"] if "thinking" not in it["type"]]
    back[1]["cache_control"] = {"type": "ephemeral"}
    look = {"role": "user", "content": [{"type": "text", "text": "Look."}]}
    messages = [look, {"content": back, "role": "assistant"}]
    sources = MESSAGES.message_fingerprints(body({"messages": messages, "system": system}))
    assert (
        sources[2]
        == MESSAGES.reply_fingerprint(body(TOOLS), False)
        == MESSAGES.reply_fingerprint(sse(*told(TOOLS)), True)
    )
    assert sources[:2] == MESSAGES.message_fingerprints(body(REQUEST))[:2]
    (known,) = MESSAGES.message_fingerprints(b'{"messages":[{"content":"Hi.","role":"assistant"}]}')
    assert known == MESSAGES.reply_fingerprint(body(answer({"type": "text", "text": "Hi."})), False)
    # Results of tools count.
    results = [[{"type": "tool_result", "tool_use_id": "t", "content": text}] for text in "ab"]
    one, other = MESSAGES.message_fingerprints(body({"messages": [{"role": "user", "content": it} for it in results]}))
    assert one != other


def test_counting_tokens_uses_none_up() -> None:
    counting = by_name("count_tokens")
    assert counting.facts(body(REQUEST), b'{"input_tokens":5}', False) == Facts(model="claude-x")
    turn = counting.read(body(REQUEST), b'{"input_tokens":5}', False)
    assert (turn.dialect, len(turn.messages), turn.choices, turn.usage) == ("count_tokens", 4, [], None)
    assert counting.message_fingerprints(body(REQUEST)) == MESSAGES.message_fingerprints(body(REQUEST))
    assert counting.reply_fingerprint(b'{"input_tokens":5}', False) == b""


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS, lambda it: st.lists(it, max_size=3), max_leaves=4
)


def called(name: str, given: Json) -> Json:
    return {"type": "tool_use", "id": name, "name": name, "input": given}


BLOCKS = (
    TEXTS.map(lambda it: Json(type="text", text=it))
    | TEXTS.map(lambda it: Json(type="thinking", thinking=it, signature=it))
    | st.builds(called, TEXTS, st.dictionaries(TEXTS, VALUES, max_size=3))
)


@given(st.lists(BLOCKS, max_size=4))
def test_any_answer_reads_the_same_streamed(content: list[Json]) -> None:
    plain = answer(*content)
    wire = sse(*told(plain), named=True, end="\r\n")
    same(read(wire, True), read(body(plain), False))
    assert MESSAGES.facts(body(REQUEST), wire, True) == MESSAGES.facts(body(REQUEST), body(plain), False)
