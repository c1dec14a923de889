"""No dialect raises on anything: arbitrary bytes, cut bodies, wrong types at every level, endless nesting."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from fakes.event_stream import event, frame
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.gateway.model.turn import Turn
from penstock.gateway.wire.dialects import DIALECTS, by_name
from penstock.gateway.wire.dialects.base import Dialect, Facts
from penstock.gateway.wire.dialects.loose_json import arr, obj
from penstock.gateway.wire.dialects.request_body import LARGE

KEYS = """
id model usage choices message messages delta content text type role tool_calls function_call index finish_reason n
function custom name arguments input output item response output_index content_index error event content_block summary
partial_json thinking citation stop_reason system instructions tools functions prompt status call_id audio source object
incomplete_details prompt_tokens prompt_tokens_details input_tokens cached_tokens is_error tool_use_id image_url action
reasoning_content refusal detail instructions description functionDeclarations systemInstruction system_instruction
contents parts functionCall functionResponse candidates finishReason usageMetadata promptTokenCount generationConfig
generateContentRequest requests args thought inlineData responseId modelVersion
stopReason toolUse toolResult toolUseId reasoningContent reasoningText citationsContent toolConfig toolSpec inputTokens
inferenceConfig start contentBlockIndex citation json
"""
WORDS = """
assistant tool user text tool_use tool_result thinking redacted_thinking function_call_output function_call message
reasoning error message_start message_delta content_block_start content_block_delta response.completed [DONE] refusal
response.output_item.added response.output_item.done response.output_text.delta custom in_progress
response.function_call_arguments.delta response.reasoning_summary_text.delta
"""
NUMBERS = st.integers() | st.floats(allow_nan=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.sampled_from(WORDS.split()) | st.text(max_size=5)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda it: st.lists(it, max_size=4) | st.dictionaries(st.sampled_from(KEYS.split()), it, max_size=6),
    max_leaves=25,
)
BODIES = st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode())
NAMED = st.tuples(st.sampled_from(["", "event: error\n", "event: message_start\n"]), VALUES)
SSE = NAMED.map(lambda it: f"{it[0]}data: {json.dumps(it[1])}\n\n".encode()) | st.binary(max_size=30)
EVENTS = st.sampled_from(["messageStart", "contentBlockStart", "contentBlockDelta", "messageStop", "metadata"])
FRAMES = st.builds(event, EVENTS, VALUES) | st.binary(max_size=30).map(lambda it: frame({}, it))
STREAMS = (st.lists(SSE, max_size=6) | st.lists(FRAMES, max_size=6)).map(b"".join)


def survives(dialect: Dialect, request: bytes, response: bytes, streamed: bool) -> None:
    """Every function answers, and what it answers can be shown."""
    facts, peeked = (
        dialect.facts(request, response, streamed),
        dialect.request_fields(request) if dialect.peeks else None,
    )
    assert isinstance(facts, Facts)
    assert facts == dialect.facts(request, response, streamed, peeked)
    turn = dialect.read(request, response, streamed)
    assert Turn.model_validate_json(turn.model_dump_json()).problems == turn.problems
    assert all(dialect.message_fingerprints(request))
    assert isinstance(dialect.reply_fingerprint(response, streamed), bytes)
    asked, items, _ = dialect.items(request)
    assert asked in (None, peeked) or peeked is None or len(request) > LARGE
    assert all(isinstance(dialect.item_fingerprint(bytes(item)), bytes) for item in items)
    assert all(dialect.reply_fingerprints(response, streamed))
    assert all(isinstance(it, str) for it in dialect.continuation_names(response, streamed))
    assert dialect.model(request) is None or isinstance(dialect.model(request), str)
    assert dialect.model(request) == dialect.model(request, asked=asked)
    assert dialect.system_texts(request).asked in (None, asked)
    for place in [*dialect.system_texts(request).places, *dialect.tool_texts(request)]:
        assert json.loads(place.literal) == place.text
        assert place.literal in request


@pytest.mark.parametrize("name", [dialect.name for dialect in DIALECTS])
@given(request=BODIES, plain=BODIES, stream=STREAMS)
@example(request=b'{"model":false,"request":{"model":"m"}}', plain=b"", stream=b"")
def test_anything(name: str, request: bytes, plain: bytes, stream: bytes) -> None:
    survives(by_name(name), request, plain, False)
    survives(by_name(name), request, stream, True)


SAMPLES: dict[str, tuple[Any, Any, list[Any]]] = json.loads("""{
"chat": [
    {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "n": 1,
     "tools": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"id": "i", "model": "m", "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}},
     "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "tool_calls": [
         {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}}]},
    [{"id": "i", "choices": [{"index": 0, "delta": {"content": "a", "tool_calls": [
         {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}}]},
     {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}}]],
"messages": [
    {"model": "m", "system": "s", "messages": [{"role": "user", "content": [{"type": "tool_result", "content": "a"}]}]},
    {"id": "i", "usage": {"input_tokens": 1, "cache_read_input_tokens": 1},
     "content": [{"type": "text", "text": "a"}, {"type": "tool_use", "name": "f", "input": {"a": [1]}}]},
    [{"type": "message_start", "message": {"id": "i", "content": [], "usage": {"input_tokens": 1}}},
     {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "input": {}}},
     {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
     {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}]],
"responses": [
    {"model": "m", "input": [{"type": "function_call_output", "call_id": "c", "output": "a"}],
     "tools": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"id": "i", "status": "completed", "usage": {"input_tokens": 1, "input_tokens_details": {"cached_tokens": 1}},
     "output": [{"type": "message", "content": [{"type": "output_text", "text": "a"}]}]},
    [{"type": "response.created", "response": {"id": "i", "output": []}},
     {"type": "response.output_item.added", "output_index": 0, "item": {"type": "message", "content": []}},
     {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "a"}]],
"gemini": [
    {"systemInstruction": {"parts": [{"text": "s"}]}, "generationConfig": {"temperature": 1}, "contents": [
         {"role": "user", "parts": [{"text": "a"}, {"functionResponse": {"name": "f", "response": {}}}]},
         {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": 1}}}]}],
     "tools": [{"functionDeclarations": [{"name": "f", "description": "d"}]}]},
    {"usageMetadata": {"promptTokenCount": 1}, "responseId": "i", "modelVersion": "m",
     "candidates": [{"index": 0, "finishReason": "STOP", "content": {"parts": [{"functionCall": {}}]}}]},
    [{"candidates": [{"index": 0, "content": {"parts": [{"text": "a"}]}}], "responseId": "i"},
     {"candidates": [{"finishReason": "STOP"}], "usageMetadata": {"promptTokenCount": 1}}]],
"converse": [
    {"system": [{"text": "s"}], "inferenceConfig": {"temperature": 1}, "messages": [
         {"role": "user", "content": [{"toolResult": {"toolUseId": "c", "content": [{"json": {"a": 1}}]}}]},
         {"role": "assistant", "content": [{"toolUse": {"toolUseId": "c", "name": "f", "input": {}}}]}],
     "toolConfig": {"tools": [{"toolSpec": {"name": "f", "description": "d"}}], "toolChoice": {"any": {}}}},
    {"output": {"message": {"role": "assistant", "content": [{"reasoningContent": {"reasoningText": {}}}]}},
     "stopReason": "end_turn", "usage": {"inputTokens": 1, "cacheReadInputTokens": 1}},
    [{"contentBlockIndex": 0, "start": {"toolUse": {"toolUseId": "c", "name": "f"}}},
     {"contentBlockIndex": 0, "delta": {"toolUse": {"input": "{}"}, "text": "a", "citation": {}}},
     {"stopReason": "end_turn", "usage": {"inputTokens": 1}}]]}""")


def written(name: str, events: Iterable[Any]) -> bytes:
    """A stream of a sample's events; a frame is called what its event would be."""
    if name != "converse":
        return "".join(f"data: {json.dumps(it)}\n\n" for it in events).encode()
    kinds = (("start", "contentBlockStart"), ("delta", "contentBlockDelta"))
    return b"".join(event(next((of for key, of in kinds if key in obj(it)), "messageStop"), it) for it in events)


ODD: tuple[Any, ...] = (None, True, -1, 2**70, 1.5, "", "x", [], {}, [[]], [None], ["x"], {"x": None})


def mutants(value: Any) -> list[Any]:
    """The value with one odd thing in one place, for every place and every odd thing."""
    places: Iterable[tuple[Any, Any]] = obj(value).items() or enumerate(arr(value))
    return [*ODD, *(replaced(value, key, odd) for key, inner in places for odd in mutants(inner))]


def replaced(value: Any, key: Any, inner: Any) -> Any:
    changed = value.copy()
    changed[key] = inner
    return changed


@pytest.mark.parametrize("name", list(SAMPLES))
def test_wrong_types_at_every_level(name: str) -> None:
    request, plain, events = SAMPLES[name]
    dialect, good = by_name(name), json.dumps(request).encode()
    for odd in mutants(request):
        survives(dialect, json.dumps(odd).encode(), json.dumps(plain).encode(), False)
    for odd in mutants(plain):
        survives(dialect, good, json.dumps(odd).encode(), False)
    for odd in mutants(events):
        survives(dialect, good, written(name, arr(odd) or [odd]), True)


@pytest.mark.parametrize("name", list(SAMPLES))
def test_bodies_cut_at_every_byte(name: str) -> None:
    request, plain, events = SAMPLES[name]
    asked, answered = json.dumps(request).encode(), json.dumps(plain).encode()
    told = written(name, events)
    for at in range(max(len(asked), len(answered), len(told))):
        survives(by_name(name), asked[:at], answered[:at], False)
        survives(by_name(name), asked, told[:at], True)


@pytest.mark.parametrize("name", list(SAMPLES))
@pytest.mark.parametrize("depth", [200, 250, 260, 1020, 10_000])
def test_deep_nesting(name: str, depth: int) -> None:
    """What is deeper than any reader goes is let go before anybody looks at what it is called."""
    keys = b"messages content x input choices output usage error model tools".split()[: 10 if depth < 1000 else 2]
    for deep in (b"[" * depth + b"]" * depth, b'{"content":' * depth + b"1" + b"}" * depth):
        for key in keys[: 1 if len(deep) > 50_000 else 10]:
            body = b'{"%b":%b}' % (key, deep)
            survives(by_name(name), body, body, False)
            survives(by_name(name), body, b"data: " + body + b"\n\n", True)
            survives(by_name(name), body, frame({":event-type": "messageStop"}, body), True)


@pytest.mark.parametrize("name", list(SAMPLES))
def test_a_head_takes_no_monstrous_strings_or_numbers(name: str) -> None:
    usage = {"prompt_tokens": 2**60, "input_tokens": True}
    huge = json.dumps({"model": "m" * 10_000, "id": "i" * 10_000, "usage": usage}).encode()
    facts = by_name(name).facts(huge, huge, False)
    assert (facts.model, facts.model_served, facts.response_id) == (None, None, None)
    assert facts.usage is None or facts.usage.input_tokens is None
