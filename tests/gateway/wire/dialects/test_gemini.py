"""Gemini: requests as the official SDK writes them, answers plain, as events and as one array."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.wire_bodies import agreed, same, sse

from penstock.gateway.model.span import Span, Usage
from penstock.gateway.model.turn import Exchange, Message, Part, Tool
from penstock.gateway.reading.turns import read_exchange
from penstock.gateway.traffic.budgets.claims import bound
from penstock.gateway.wire.dialects import by_name, find
from penstock.gateway.wire.dialects.base import Facts
from penstock.gateway.wire.dialects.request_body import LARGE
from penstock.gateway.wire.dialects.unread_content import find_unread

# What google-genai 3.4.0 sent, byte for byte.
ASKED = (
    rb'{"contents": [{"parts": [{"text": "q"}], "role": "user"}, {"parts": [{"functionCall": {"args": {"a": 1}, "name":'
    rb' "find"}}], "role": "model"}, {"parts": [{"functionResponse": {"name": "find", "response": {"result": "ok"}}}],'
    rb' "role": "user"}], "systemInstruction": {"parts": [{"text": "You are \u00e9 \u6f22 \"agent\"."}], "role":'
    rb' "user"}, "tools": [{"functionDeclarations": [{"description": "Finds.", "name": "find", "parameters":'
    rb' {"properties": {"a": {"description": "x", "type": "INTEGER"}}, "type": "OBJECT"}}]}], "generationConfig":'
    rb' {"temperature": 0.2, "thinkingConfig": {"include_thoughts": true}}}'
)
USAGE = {"promptTokenCount": 4, "candidatesTokenCount": 2, "thoughtsTokenCount": 5, "totalTokenCount": 11}
PARTS: list[Any] = [
    {"text": "Let me", "thought": True},
    {"text": " see.", "thought": True},
    {"text": "Hel"},
    {"text": "lo"},
    {"functionCall": {"id": "c1", "name": "find", "args": {"a": {"b": [1]}}}, "thoughtSignature": "abc"},
]


def answer(parts: list[Any], **end: Any) -> dict[str, Any]:
    """An answer of one candidate, or a piece of one."""
    candidate = {"content": {"parts": parts, "role": "model"}, "index": 0} | end
    usage = USAGE if end else {"promptTokenCount": 4, "totalTokenCount": 4}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini-x-002", "responseId": "r1"}


WHOLE = [{"text": "Let me see.", "thought": True}, {"text": "Hello"}, PARTS[4]]
PLAIN = json.dumps(answer(WHOLE, finishReason="STOP")).encode()
PIECES = [answer(PARTS[:1]), answer(PARTS[1:3]), answer(PARTS[3:], finishReason="STOP")]
USED = Usage(input_tokens=4, output_tokens=7, reasoning_tokens=5)
FACTS = Facts(None, "gemini-x-002", "r1", "STOP", USED, tool_calls=1, choices=1)


GEMINI = by_name("gemini")


def test_a_request_of_the_official_sdk() -> None:
    turn = GEMINI.read(ASKED, PLAIN, False)
    assert turn.problems == []
    assert turn.sampling == {"temperature": 0.2, "thinkingConfig": {"include_thoughts": True}}
    parameters = {"properties": {"a": {"description": "x", "type": "INTEGER"}}, "type": "OBJECT"}
    assert turn.tools == [Tool(name="find", description="Finds.", parameters=parameters)]
    assert turn.messages == [
        Message(role="system", parts=[Part(type="text", text='You are é 漢 "agent".')]),
        Message(role="user", parts=[Part(type="text", text="q")]),
        Message(role="assistant", parts=[Part(type="tool_call", name="find", arguments='{"a":1}')]),
        Message(role="user", parts=[Part(type="tool_call_response", name="find", text='{"result":"ok"}')]),
    ]


def test_an_answer_plain_as_events_and_as_an_array() -> None:
    events = sse(*PIECES, end="\r\n")
    array = json.dumps(PIECES, indent=1).encode()
    turns = [GEMINI.read(ASKED, body, streamed) for body, streamed in ((PLAIN, False), (events, True), (array, False))]
    same(turns[1], turns[2])
    assert [turn.problems for turn in turns] == [[], [], []]
    found = [(part.type, part.text) for part in turns[0].choices[0].message.parts]
    assert found == [("reasoning", "Let me see."), ("text", "Hello"), ("tool_call", None)]
    same(turns[0], turns[1])
    assert turns[0].choices[0].message.parts[-1].arguments == '{"a":{"b":[1]}}'
    for body, streamed in ((PLAIN, False), (events, True), (array, False)):
        assert agreed("gemini", ASKED, body, streamed) == FACTS


def test_several_candidates() -> None:
    asked = json.dumps({"contents": [], "generationConfig": {"candidateCount": 2}}).encode()
    said: Any = ((1, "b", {}), (0, "a", {"finishReason": "STOP"}), (1, "c", {"finishReason": "MAX_TOKENS"}))
    pieces = [{"candidates": [{"index": at, "content": {"parts": [{"text": it}]}} | end]} for at, it, end in said]
    facts = agreed("gemini", asked, sse(*pieces), True)
    assert (facts.choices, facts.finish) == (2, "STOP")
    turn = GEMINI.read(asked, sse(*pieces), True)
    assert [[part.text for part in choice.message.parts] for choice in turn.choices] == [["a"], ["bc"]]


ROUTES = {
    "gemini": """/v1beta/models/gemini-3-flash:generateContent /v1/models/gemini-3-flash:streamGenerateContent
        /v1beta1/projects/p/locations/l/publishers/google/models/m:generateContent""",
    "gemini_count_tokens": "/models/gemini-3-flash:countTokens",
    "gemini_embeddings": "/v1/models/embedding-001:embedContent /v1/models/embedding-001:batchEmbedContents",
    "opaque": """/v1/models/gemini-3-flash:predict /v1/models/a/b:generateContent /v1beta/models/:generateContent
        /v1beta/cachedContents""",
}


@pytest.mark.parametrize("name", ROUTES)
def test_routes(name: str) -> None:
    for path in ROUTES[name].split():
        assert find("POST", path).name == name, path
        assert find("GET", path).name != "gemini", path


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v1beta/models/gemini-3-flash:streamGenerateContent?alt=sse", "gemini-3-flash"),
        ("/v1beta/models/gemini%2D3-fl%61sh:generateContent", "gemini-3-flash"),
        ("/v1/tunedModels/abc:generateContent", "tunedModels/abc"),
        ("", None),
    ],
)
def test_the_model_stands_in_the_path(path: str, model: str | None) -> None:
    assert GEMINI.model(ASKED, path) == model


def test_what_a_client_sends_back_continues_the_conversation() -> None:
    asked = json.loads(ASKED)
    history = [*asked["contents"], {"role": "model", "parts": PARTS}, {"role": "user", "parts": [{"text": "and?"}]}]
    later = GEMINI.message_fingerprints(json.dumps(asked | {"contents": history}).encode())
    assert later[:-2] == GEMINI.message_fingerprints(ASKED)
    assert later[-2] == GEMINI.reply_fingerprint(PLAIN, False) == GEMINI.reply_fingerprint(sse(*PIECES), True)
    assert later[-2] == GEMINI.reply_fingerprint(json.dumps(PIECES).encode(), False)


def test_snake_case_and_single_objects_are_read_too() -> None:
    asked: dict[str, Any] = {
        "system_instruction": {"parts": {"text": "Be a cat."}},
        "contents": {"parts": {"text": "hi"}},
        "tools": {"function_declarations": [{"name": "f", "description": "F.", "parametersJsonSchema": {"x": 1}}]},
        "safetySettings": [],
    }
    body = json.dumps(asked).encode()
    turn = GEMINI.read(body, PLAIN, False)
    assert [(it.role, it.parts[0].text) for it in turn.messages] == [("system", "Be a cat."), ("user", "hi")]
    assert turn.tools == [Tool(name="f", description="F.", parameters={"x": 1})]
    assert turn.sampling == {"safetySettings": []}
    [place] = GEMINI.system_texts(body).places
    [tool] = GEMINI.tool_texts(body)
    assert (place.text, tool.name, tool.text) == ("Be a cat.", "f", "F.")


def test_media_and_code_are_kept() -> None:
    parts = [{"inlineData": {"data": "eA=="}}, {"file_data": {"fileUri": "u"}}, {"executableCode": {"code": "1"}}]
    asked = json.dumps({"contents": [{"parts": parts}], "tools": [{"googleSearch": {}}]}).encode()
    turn = GEMINI.read(asked, PLAIN, False)
    found = [(part.type, part.data) for part in turn.messages[0].parts]
    assert found == [("media", parts[0]), ("media", parts[1]), ("unknown", parts[2])]
    assert turn.tools == [Tool(name="googleSearch")]


def test_places_of_system_texts_and_descriptions() -> None:
    [place] = GEMINI.system_texts(ASKED).places
    assert (place.text, place.role) == ('You are é 漢 "agent".', "system")
    assert [(it.name, it.text) for it in GEMINI.tool_texts(ASKED)] == [("find", "Finds.")]
    inside = b'{"generateContentRequest": ' + ASKED + b"}"
    [inner] = by_name("gemini_count_tokens").system_texts(inside).places
    assert inner.text == place.text
    assert inner.literal == place.literal
    assert inner.path == ("generateContentRequest", *place.path)


def test_counts_and_embeddings() -> None:
    count = by_name("gemini_count_tokens")
    assert count.facts(ASKED, b'{"totalTokens": 7}', False) == Facts()
    inside = b'{"generateContentRequest": ' + ASKED + b"}"
    assert len(count.read(inside, b'{"totalTokens": 7}', False).messages) == 4
    asked = b'{"requests": [{"content": {"parts": [{"text": "hello"}], "role": "user"}, "model": "models/e"}]}'
    answered = b'{"embeddings": [{"values": [0.1]}], "usageMetadata": {"promptTokenCount": 3}}'
    turn = by_name("gemini_embeddings").read(asked, answered, False)
    assert turn.messages == [Message(role="user", parts=[Part(type="text", text="hello")])]
    assert (turn.sampling, turn.choices, turn.usage) == ({}, [], Usage(input_tokens=3))
    assert by_name("gemini_embeddings").facts(asked, answered, False) == Facts(usage=Usage(input_tokens=3))
    assert by_name("gemini_embeddings").message_fingerprints(asked) == []


def test_a_stream_without_its_end_is_a_problem() -> None:
    for body, streamed in ((sse(*PIECES[:2]), True), (json.dumps(PIECES[:2]).encode(), False)):
        turn = GEMINI.read(ASKED, body, streamed)
        assert turn.problems == ["response: the stream ended early"]
    cut = GEMINI.read(ASKED, json.dumps(PIECES).encode()[:-9], False)
    assert cut.problems[0].startswith("response: a JSON array that ended early")
    blocked = sse({"promptFeedback": {"blockReason": "SAFETY"}})
    assert GEMINI.read(ASKED, blocked, True).problems == []

    # A turn names the model of its span.
    exchange = Exchange(url="", request_headers=[], request_body=ASKED, response_headers=[], response_body=PLAIN)
    span = Span(rollout="r", attempt="a1", sequence=1, model="gemini-3-flash")
    assert read_exchange("gemini", exchange, span).model == "gemini-3-flash"


NAMES = [(400, "INVALID_ARGUMENT"), (401, "UNAUTHENTICATED"), (404, "NOT_FOUND"), (503, "UNAVAILABLE")]


@pytest.mark.parametrize(("status", "name"), NAMES)
def test_own_errors_have_googles_shape_and_are_read(status: int, name: str) -> None:
    body = json.loads(GEMINI.family.error_body(status, "Not so.", "odd", "model"))
    assert body == {"error": {"code": status, "message": "model: Not so.", "status": name}}
    for said in (body, [body]):
        turn = GEMINI.read(ASKED, json.dumps(said).encode(), False)
        assert (turn.error, turn.problems) == ("model: Not so.", [])


# -- Code Assist: the same in envelopes --------------------------------------------------------------------------------

ENVELOPE = b'{"model": "gemini-x", "project": "p", "user_prompt_id": "u#1", "request": %b}' % ASKED


def wrapped(answer: Any) -> dict[str, Any]:
    return {"response": answer, "traceId": "t"}


@pytest.mark.parametrize("form", ["plain", "events", "array"])
def test_code_assist_is_read_as_gemini(form: str) -> None:
    inside = {"plain": PLAIN, "events": sse(*PIECES), "array": json.dumps(PIECES).encode()}[form]
    told = {
        "plain": json.dumps(wrapped(json.loads(PLAIN))).encode(),
        "events": sse(*map(wrapped, PIECES), end="\r\n"),
        "array": json.dumps([*map(wrapped, PIECES)]).encode(),
    }[form]
    stream, code_assist = form == "events", find("POST", "/v1internal:streamGenerateContent")
    turn = code_assist.read(ENVELOPE, told, stream)
    same(turn, GEMINI.read(ASKED, inside, stream).model_copy(update={"dialect": "codeassist", "model": "gemini-x"}))
    facts = agreed("codeassist", ENVELOPE, told, stream)
    assert facts == Facts("gemini-x", "gemini-x-002", "r1", "STOP", USED, tool_calls=1, choices=1)
    assert find_unread(code_assist, ENVELOPE, told, stream, facts, told) == {}
    assert code_assist.reply_fingerprints(told, stream) == GEMINI.reply_fingerprints(inside, stream)


def test_a_request_of_code_assist() -> None:
    code_assist, count = by_name("codeassist"), find("POST", "/v1internal:countTokens")
    assert [bytes(it) for it in code_assist.items(ENVELOPE).raw] == [bytes(it) for it in GEMINI.items(ASKED).raw]
    assert code_assist.message_fingerprints(ENVELOPE) == GEMINI.message_fingerprints(ASKED)
    places = [*code_assist.system_texts(ENVELOPE).places, *code_assist.tool_texts(ENVELOPE)]
    inside = [*GEMINI.system_texts(ASKED).places, *GEMINI.tool_texts(ASKED)]
    assert [(it.text, it.path) for it in places] == [(it.text, ("request", *it.path)) for it in inside]
    limited = ENVELOPE.replace(b'"temperature": 0.2', b'"maxOutputTokens": 99')
    assert bound(code_assist, code_assist.request_fields(limited), 1).answer == 99
    assert code_assist.model(ENVELOPE) == "gemini-x"
    error = b'{"error": {"code": 429, "message": "quota", "status": "RESOURCE_EXHAUSTED"}}'
    for stream, told in ((False, error), (True, sse(json.loads(error)))):
        assert code_assist.read(ENVELOPE, told, stream).error == "quota"
        assert code_assist.facts(ENVELOPE, told, stream).failed == ("stream_error" if stream else "error_body")
    assert count.read(b'{"request": %b}' % ASKED, b'{"totalTokens": 9}', False).usage is None
    assert not count.uses_tokens
    large = ENVELOPE.replace(b'"q"', b'"' + b"q" * LARGE + b'"')
    assert [it.role for it in code_assist.read(large, b"", False).messages] == ["system", "user", "assistant", "user"]
    assert len(code_assist.items(large).raw) == 4
