"""Chat completions: real wire bodies (checked against the official SDK's models), plain and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.wire_bodies import Json, agreed, body, cut, same, sse
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Part, Turn
from penstock.gateway.wire.dialects import by_name

CHAT = by_name("chat")

REQUEST: Json = json.loads("""{"model": "gpt-x", "messages": [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "name": "ann", "content": [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f1"}}, {"type": "hologram", "x": 1}]},
    {"role": "assistant", "content": null, "reasoning_content": "Look it up.", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{\\"at\\": \\"Rome\\"}"}},
        {"id": "call_2", "type": "custom", "custom": {"name": "shell", "input": "ls -l"}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": [
        {"type": "text", "text": "18"}, {"type": "text", "text": "C"}]},
    {"role": "tool", "tool_call_id": "call_2", "content": "a.txt"},
    {"role": "assistant", "content": null, "function_call": {"name": "old", "arguments": "{}"}},
    {"role": "function", "name": "old", "content": "new"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
  "tools": [
    {"type": "function", "function": {
        "name": "weather", "description": "Tells it.", "parameters": {"type": "object", "properties": {}}}},
    {"type": "custom", "custom": {"name": "shell", "description": "Runs."}}, {"type": "web_search"}],
  "functions": [{"name": "old", "parameters": {}}],
  "temperature": 0.5, "n": 1, "stream": true, "stream_options": {"include_usage": true}}""")
USAGE: Json = {
    "prompt_tokens": 30,
    "completion_tokens": 12,
    "total_tokens": 42,
    "prompt_tokens_details": {"cached_tokens": 16, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 4, "audio_tokens": 0},
}
CALLS: list[Json] = [
    {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"at": "Oslo"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "weather", "arguments": ""}},
]


def choice(index: int = 0, finish: str | None = "stop", **message: Any) -> Json:
    said: Json = {"role": "assistant", "content": None, **message}
    return {"index": index, "finish_reason": finish, "logprobs": None, "message": said}


HEAD: Json = {"id": "chatcmpl-1", "created": 1, "model": "gpt-x-1"}


def answer(*choices: Json) -> Json:
    return {**HEAD, "object": "chat.completion", "usage": USAGE, "choices": list(choices)}


def chunk(*choices: Json, **more: Any) -> Json:
    return {**HEAD, "object": "chat.completion.chunk", "choices": list(choices), **more}


def piece(index: int = 0, finish: str | None = None, **delta: Any) -> Json:
    return {"index": index, "finish_reason": finish, "delta": delta, "logprobs": None}


def told(plain: Json) -> list[Any]:
    """A plain answer as the chunks that OpenAI would send."""
    chunks = [chunk(piece(it["index"], role="assistant", content="")) for it in plain["choices"]]
    for it in plain["choices"]:
        at, said = it["index"], it["message"]
        for key in ("reasoning_content", "content", "refusal"):
            chunks += [chunk(piece(at, **{key: part})) for part in cut(said.get(key) or "")]
        for number, call in enumerate(said.get("tool_calls") or []):
            start = {**call, "index": number, "function": {**call["function"], "arguments": ""}}
            chunks.append(chunk(piece(at, tool_calls=[start])))
            chunks += [
                chunk(piece(at, tool_calls=[{"index": number, "function": {"arguments": part}}]))
                for part in cut(call["function"]["arguments"])
            ]
    chunks += [chunk(piece(it["index"], it["finish_reason"])) for it in plain["choices"]]
    return [*chunks, chunk(usage=plain["usage"]), "[DONE]"]


def read(response: bytes, streamed: bool, request: Any = REQUEST) -> Turn:
    return CHAT.read(body(request), response, streamed)


def test_a_request_is_read_whole() -> None:
    turn = read(body(answer(choice(content="Hi."))), False)
    assert [message.role for message in turn.messages] == (
        ["system", "user", "assistant", "tool", "tool", "assistant", "function", "assistant"]
    )
    assert turn.messages[1].name == "ann"
    assert [part.type for part in turn.messages[1].parts] == ["text", "media", "media", "media", "unknown"]
    assert turn.messages[1].parts[4].data == {"type": "hologram", "x": 1}
    assert [message.parts for message in turn.messages[2:]] == [
        [
            Part(type="reasoning", text="Look it up."),
            Part(type="tool_call", id="call_1", name="weather", arguments='{"at": "Rome"}'),
            Part(type="tool_call", id="call_2", name="shell", arguments="ls -l"),
        ],
        [Part(type="tool_call_response", id="call_1", text="18C")],
        [Part(type="tool_call_response", id="call_2", text="a.txt")],
        [Part(type="tool_call", name="old", arguments="{}")],
        [Part(type="tool_call_response", name="old", text="new")],
        [Part(type="refusal", text="No.")],
    ]
    assert [tool.name for tool in turn.tools] == ["weather", "shell", "web_search", "old"]
    assert turn.tools[0].parameters == {"type": "object", "properties": {}}
    assert turn.sampling == {"temperature": 0.5, "n": 1, "stream_options": {"include_usage": True}}
    assert turn.problems == []


def test_a_plain_answer() -> None:
    plain = answer(choice(content="Calling.", tool_calls=CALLS, finish="tool_calls"))
    ChatCompletion.model_validate(plain)
    turn = read(body(plain), False)
    assert turn.choices[0].finish == "tool_calls"
    assert turn.choices[0].message.parts == [
        Part(type="text", text="Calling."),
        Part(type="tool_call", id="call_a", name="weather", arguments='{"at": "Oslo"}'),
        Part(type="tool_call", id="call_b", name="weather", arguments=""),
    ]
    facts = agreed("chat", body(REQUEST), body(plain), False)
    assert (facts.model, facts.model_served, facts.response_id) == ("gpt-x", "gpt-x-1", "chatcmpl-1")
    assert facts.usage == Usage(input_tokens=30, output_tokens=12, cached_tokens=16, reasoning_tokens=4)
    assert facts.tool_calls == 2


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "plain",
    [
        answer(choice(content="Hello \u00e9\U0001f600 there.")),
        answer(choice(content="Calling.", tool_calls=CALLS, finish="tool_calls")),
        answer(choice(content='\\"function":{"name":"x', reasoning_content="Hm, \n\n hm.", finish="length")),
        answer(choice(refusal="I will not.")),
        answer(choice(0, content="One"), choice(1, content="Two", finish="length"), choice(2, tool_calls=CALLS)),
    ],
)
def test_a_stream_reads_as_the_plain_answer(plain: Json, end: str) -> None:
    ChatCompletion.model_validate(plain)
    for it in told(plain)[:-1]:
        ChatCompletionChunk.model_validate(it)
    request = {**REQUEST, "n": len(plain["choices"])}
    wire = sse(*told(plain), end=end)
    same(read(wire, True, request), read(body(plain), False, request))
    facts = agreed("chat", body(request), wire, True)
    assert facts == agreed("chat", body(request), body(plain), False)
    assert facts == CHAT.facts(body(request), wire.replace(b'":', b'": ').replace(b',"', b', "'), True)
    assert CHAT.reply_fingerprint(wire, True) == CHAT.reply_fingerprint(body(plain), False)


def test_calls_of_all_kinds_and_audio_are_assembled() -> None:
    """Old function calls, custom ones and those without an index; reasoning by the name that vLLM gives it."""
    wire = sse(
        chunk(piece(role="assistant", function_call={"name": "old", "arguments": ""})),
        chunk(piece(function_call={"arguments": '{"a"'})),
        chunk(piece(function_call={"arguments": ":1}"}, audio={"id": "au", "transcript": "He"})),
        chunk(piece(audio={"transcript": "y", "data": "AA"})),
        chunk(piece(finish="function_call")),
        "[DONE]",
    )
    (only,) = read(wire, True).choices
    assert only.message.parts == [
        Part(type="media", data={"id": "au", "data": "AA", "transcript": "Hey"}),
        Part(type="tool_call", name="old", arguments='{"a":1}'),
    ]
    assert agreed("chat", body(REQUEST), wire, True).tool_calls == 1

    wire = sse(
        chunk(piece(tool_calls=[{"index": 0, "id": "c", "type": "custom", "custom": {"name": "shell", "input": "l"}}])),
        chunk(piece(tool_calls=[{"index": 0, "custom": {"input": "s"}}])),
        chunk(piece(tool_calls=[{"id": "f", "function": {"name": "weather", "arguments": "{"}}])),
        chunk(piece(tool_calls=[{"function": {"arguments": "}"}}])),
        chunk(piece(finish="tool_calls")),
    )
    (only,) = read(wire, True).choices
    parts = [(part.id, part.name, part.arguments) for part in only.message.parts]
    assert parts == [("c", "shell", "ls"), ("f", "weather", "{}")]
    assert agreed("chat", body(REQUEST), wire, True).tool_calls == 2
    thought = [piece(role="assistant", reasoning="Th"), piece(reasoning="ink"), piece(finish="stop")]
    plain = body(answer(choice(reasoning="Think")))
    assert read(sse(*map(chunk, thought)), True).choices == read(plain, False).choices
    assert read(plain, False).choices[0].message.parts == [Part(type="reasoning", text="Think")]


def test_a_stream_that_ends_early_gives_what_there_is() -> None:
    wire = sse(chunk(piece(role="assistant", content="Hal")), chunk(piece(content="f")))[:-20]
    turn = read(wire, True)
    assert turn.choices[0].message.parts == [Part(type="text", text="Hal")]
    assert turn.problems == ["response: the stream ended early"]
    assert agreed("chat", body(REQUEST), wire, True).response_id == "chatcmpl-1"
    assert read(b"", True).problems == ["response: the stream ended early"]


@pytest.mark.parametrize(
    "wire",
    [
        b'data: {"error":{"message":"Overloaded","code":503}}\n\n',
        b'event: error\ndata: {"error":{"message":"Overloaded"}}\n\n',
        b'event: error\ndata: {"message":"Overloaded"}\n\n',
        b'data: {"error":"Overloaded"}\n\n',
    ],
)
def test_an_error_within_a_stream(wire: bytes) -> None:
    turn = read(sse(chunk(piece(content="Hal"))) + wire, True)
    assert turn.error == "Overloaded"
    assert turn.choices[0].message.parts == [Part(type="text", text="Hal")]
    assert turn.problems == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ({"error": {"message": "No.", "type": "invalid_request_error", "param": None, "code": None}}, "No."),
        ({"object": "error", "message": "No.", "type": "BadRequestError", "code": 400}, "No."),
        ({"detail": "No."}, "No."),
        ({"detail": [{"loc": ["body"]}]}, '{"detail":[{"loc":["body"]}]}'),
        ({"error": {"code": 7}}, '{"code":7}'),
    ],
)
def test_errors_of_many_servers(error: Any, message: str) -> None:
    turn = read(body(error), False)
    assert turn.error == message
    assert turn.choices == []
    assert read(body({**answer(choice(content="a")), "error": None}), False).error is None


def test_what_cannot_be_read_is_a_problem() -> None:
    turn = CHAT.read(b'{"model":"m","messages":[1,{"role":"user","content":7}]}', b"<html>", False)
    assert turn.problems == ["response: not a readable JSON object", "request: messages[0] is not an object"]
    assert turn.messages[0].parts == [Part(type="unknown", data=7)]
    assert CHAT.read(b"", b"", False).problems == ["request: empty", "response: empty"]
    turn = CHAT.read(b"{}", b"data: {\n\ndata: [DONE]\n\n", True)
    assert turn.problems == ["response: event 1 is not a readable JSON object"]


SENT_BACK: list[Json] = [
    {"role": "assistant", "content": "Calling.", "tool_calls": CALLS},
    {"tool_calls": CALLS, "content": [{"type": "text", "text": "Calling.", "cache_control": {}}], "role": "assistant"},
    {"role": "assistant", "content": "Calling.", "refusal": None, "audio": None, "function_call": None, "tool_calls": [
        {"function": {"arguments": '{"at":"Oslo"}', "name": "weather"}, "type": "function", "id": "call_a"},
        {"function": {"arguments": "{}", "name": "weather"}, "type": "function", "id": "call_b"},
    ]},
]  # fmt: skip


@pytest.mark.parametrize("message", SENT_BACK)
def test_an_answer_sent_back_is_known_again(message: Json) -> None:
    plain = answer(choice(content="Calling.", reasoning_content="Hm.", tool_calls=CALLS, finish="tool_calls"))
    sources = CHAT.message_fingerprints(body({"messages": [{"role": "user", "content": "Go."}, message]}))
    assert len(sources) == 2
    assert sources[1] == CHAT.reply_fingerprint(body(plain), False) == CHAT.reply_fingerprint(sse(*told(plain)), True)


def test_a_different_message_is_not_the_same() -> None:
    tool = {"role": "tool", "tool_call_id": "a", "content": "1"}
    alike = [tool, {**tool, "content": "2"}, {**tool, "tool_call_id": "b"}, {"role": "user", "content": "1"}]
    others = [{"role": "assistant", "content": "1"}, {"role": "assistant", "tool_calls": CALLS[:1]}, SENT_BACK[0]]
    assert len(set(CHAT.message_fingerprints(body({"messages": alike + others})))) == 7
    assert CHAT.message_fingerprints(b"{}") == CHAT.message_fingerprints(b"[") == []
    assert (
        CHAT.reply_fingerprint(body({"error": {"message": "No."}}), False) == CHAT.reply_fingerprint(b"", True) == b""
    )


TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)


def made(content: str, thought: str, arguments: list[str]) -> Json:
    functions: list[Json] = [{"name": "f", "arguments": it} for it in arguments]
    calls: list[Json] = [{"id": f"c{at}", "type": "function", "function": it} for at, it in enumerate(functions)]
    return choice(content=content, reasoning_content=thought, tool_calls=calls)


MADE = st.builds(made, TEXTS, TEXTS, st.lists(TEXTS, max_size=3))


@given(st.lists(MADE, min_size=1, max_size=3))
def test_any_answer_reads_the_same_streamed(choices: list[Json]) -> None:
    plain = answer(*({**it, "index": at} for at, it in enumerate(choices)))
    wire, request = sse(*told(plain)), {**REQUEST, "n": len(choices)}
    same(read(wire, True, request), read(body(plain), False, request))
    assert CHAT.facts(body(request), wire, True) == CHAT.facts(body(request), body(plain), False)
    assert CHAT.reply_fingerprint(wire, True) == CHAT.reply_fingerprint(body(plain), False)
