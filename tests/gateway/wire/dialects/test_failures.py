"""How an answer with a good HTTP status ended: whole, with an error, or cut. Every dialect, every place."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from fakes.formats import completion_events, response_events
from hypothesis import given
from hypothesis import strategies as st

from examples.demo.model import DemoAnswer, DemoToolCall, Json, chat_events, message_events
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.family import Failure

NASTY = [
    "data: [DONE]",
    "\n\ndata: [DONE]\n\n",
    "event: error\n",
    '"error"',
    '{"error": {"message": "no"}}',
    "message_stop",
]
ASKED: Json = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
CALLED = (DemoToolCall("c1", "find", '{"a": "data: [DONE]"}'),)


@dataclass(frozen=True, slots=True)
class Good:
    """A kind of stream that is whole."""

    dialect: str
    made: Callable[[DemoAnswer], Sequence[bytes]]
    asked: Json
    after: int
    """Events after the one that ends it."""
    stream: bool = True

    @property
    def request(self) -> bytes:
        return json.dumps(self.asked).encode()

    def failed(self, body: bytes) -> Failure | None:
        return by_name(self.dialect).facts(self.request, body, self.stream).failed


def chat(more: Json) -> Callable[[DemoAnswer], Sequence[bytes]]:
    return lambda answer: list(chat_events(ASKED | more, answer))


def gemini(answer: DemoAnswer) -> list[bytes]:
    said: list[Json] = [{"content": {"parts": [{"text": answer.text[at : at + 3]}]}} for at in range(0, 9, 3)]
    said[-1]["finishReason"] = "MAX_TOKENS"
    return [json.dumps({"candidates": [it], "usageMetadata": {"promptTokenCount": 1}}).encode() for it in said]


USAGE: Json = {"stream_options": {"include_usage": True}}
PROMPT, INPUT = Json(model="m", prompt="x"), Json(model="m", input="x")
GOOD: dict[str, Good] = {
    "chat": Good("chat", chat({}), ASKED, 1),
    "chat-usage": Good("chat", chat(USAGE), ASKED, 2),
    "chat-n": Good("chat", chat({"n": 3}), ASKED | {"n": 3}, 1),
    "chat-undone": Good("chat", lambda answer: list(chat_events(ASKED, answer))[:-1], ASKED, 0),
    "completions": Good("completions", lambda answer: list(completion_events(PROMPT, answer)), PROMPT, 1),
    "messages": Good("messages", lambda answer: list(message_events(ASKED, answer)), ASKED, 1),
    "responses": Good("responses", lambda answer: list(response_events(INPUT, answer)), INPUT, 0),
    "gemini": Good("gemini", lambda answer: [b"data: %b\r\n\r\n" % it for it in gemini(answer)], {"contents": []}, 0),
    "gemini-array": Good(
        "gemini", lambda answer: [b"[%b]" % b",\r\n".join(gemini(answer))], {"contents": []}, 0, stream=False
    ),
}
KINDS = pytest.mark.parametrize("kind", list(GOOD))
TEXTS = st.text(max_size=20) | st.sampled_from(NASTY)
ANSWERS = st.builds(DemoAnswer, TEXTS, st.sampled_from([(), CALLED]))


@KINDS
@given(answer=ANSWERS, data=st.data())
def test_a_stream_is_good_from_its_end_on_and_nowhere_before(
    kind: str, answer: DemoAnswer, data: st.DataObject
) -> None:
    good = GOOD[kind]
    events = good.made(answer)
    whole, end = b"".join(events), sum(map(len, events[: len(events) - good.after]))
    # A CR ends its line. Nothing at all is no stream where the answer is one array.
    end -= whole[:end].endswith(b"\r\n")
    cut = data.draw(st.integers(not good.stream, len(whole)) | st.integers(max(0, end - 8), min(end + 8, len(whole))))
    assert good.failed(whole) is None
    assert good.failed(whole[:cut]) == (None if cut >= end else "ended_early")


ERRORS: dict[str, Sequence[bytes]] = {
    "openai": (
        b'data: {"error":{"message":"Overloaded.","type":"server_error","code":500}}\n\n',
        b'data: {"id":"c","error":{"code":502},"choices":[{"index":0,"delta":{},"finish_reason":"error"}]}\n\n',
        b'event: error\ndata: {"message":"Overloaded."}\n\n',
        b'data: {"object":"error","message":"Overloaded.","code":500}\r\n\r\n',
    ),
    "messages": (
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}\n\n',
        b'data: {"type": "error", "error": {"type": "api_error", "message": "No."}}\n\n',
    ),
    "responses": (
        b'event: error\ndata: {"type":"error","code":"server_error","message":"No.","sequence_number":3}\n\n',
        b'data: {"type":"response.failed","response":{"id":"r","status":"failed","error":{"message":"No."}}}\n\n',
    ),
    "gemini": (b'data: {"error":{"code":503,"message":"Overloaded.","status":"UNAVAILABLE"}}\r\n\r\n',),
}
CASES = [(kind, error) for kind in GOOD if kind != "gemini-array" for error in ERRORS.get(kind, ERRORS["openai"])]


@pytest.mark.parametrize("done", [b"", b"data: [DONE]\n\n"], ids=["", "done"])
@pytest.mark.parametrize(("kind", "error"), CASES)
@given(data=st.data())
def test_an_error_after_any_event_is_an_error(kind: str, error: bytes, done: bytes, data: st.DataObject) -> None:
    good = GOOD[kind]
    events = good.made(DemoAnswer("Hello there."))
    at = data.draw(st.integers(0, len(events)))
    assert good.failed(b"".join([*events[:at], error, done])) == "stream_error"


BODIES: list[tuple[str, Any]] = [
    ("chat", {"error": {"message": "No.", "code": 500}}),
    ("chat", {"error": "No."}),
    ("chat", {"object": "error", "message": "No.", "code": 404}),
    ("chat", {"id": "c", "choices": [{"message": {"content": ""}, "finish_reason": "error", "error": {"code": 502}}]}),
    ("completions", {"error": {"message": "No."}}),
    ("responses", {"id": "r", "status": "failed", "error": {"code": "server_error", "message": "No."}, "output": []}),
    ("responses", {"error": {"message": "No."}}),
    ("messages", {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
    ("count_tokens", {"type": "error", "error": {"type": "invalid_request_error", "message": "No."}}),
    ("gemini", {"error": {"code": 400, "message": "No.", "status": "INVALID_ARGUMENT"}}),
    ("gemini_count_tokens", {"error": {"code": 400, "message": "No."}}),
    ("gemini_embeddings", {"error": {"code": 400, "message": "No."}}),
    ("embeddings", {"error": {"message": "No."}}),
]


@pytest.mark.parametrize(("dialect", "body"), BODIES)
def test_a_body_that_is_an_error_is_one(dialect: str, body: Any) -> None:
    assert by_name(dialect).facts(b"{}", json.dumps(body).encode(), False).failed == "error_body"


WHOLE: list[tuple[str, Any]] = [
    ("chat", {"choices": [{"message": {"content": "x"}, "finish_reason": "length"}], "error": None}),
    ("responses", {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "error": None}),
    ("responses", {"status": "queued"}),
    ("messages", {"type": "message", "content": [], "stop_reason": "max_tokens"}),
    ("gemini", {"promptFeedback": {"blockReason": "SAFETY"}}),
    ("embeddings", {"object": "list", "data": []}),
    ("chat", {}),
    ("opaque", {"error": "nobody reads it"}),
]


@pytest.mark.parametrize(("dialect", "body"), WHOLE)
def test_a_body_that_is_none_is_good(dialect: str, body: Any) -> None:
    assert by_name(dialect).facts(b"{}", json.dumps(body).encode(), False).failed is None


STREAMS: dict[str, tuple[str, bytes, Failure | None]] = {
    "nothing": ("chat", b"", "ended_early"),
    "done-alone": ("chat", b"data: [DONE]\n\n", None),
    "done-without-its-blank-line": ("chat", b'data: {"choices":[{"delta":{"content":"x"}}]}\n\ndata:[DONE]', None),
    "length": ("chat", b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n', None),
    "one-of-two": ("chat", b'data: {"choices":[{"index":1,"delta":{},"finish_reason":"stop"}]}\n\n', "ended_early"),
    "incomplete": ("responses", b'data: {"type":"response.incomplete","response":{"status":"incomplete"}}\n\n', None),
    "cancelled": ("responses", b'data: {"type":"response.cancelled","response":{}}\n\n', "stream_error"),
    "responses-done": ("responses", b'data: {"type":"response.completed","response":{}}\n\ndata: [DONE]\n\n', None),
    "max-tokens": ("messages", b'data: {"type":"message_delta","delta":{"stop_reason":"max_tokens"}}\n\n', None),
    "blocked": ("gemini", b'data: {"promptFeedback":{"blockReason":"SAFETY"}}\n\n', None),
    "array-error": ("gemini", b'data: {"error":{"code":503}}\n\n', "stream_error"),
}


@pytest.mark.parametrize("name", list(STREAMS))
def test_streams_of_odd_servers(name: str) -> None:
    dialect, body, failed = STREAMS[name]
    request = b'{"n":2}' if name == "one-of-two" else b"{}"
    assert by_name(dialect).facts(request, body, True).failed == failed


def test_a_finish_reason_far_from_the_end_is_found() -> None:
    """Some servers send more after it, and no [DONE]."""
    end = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
    more = b'data: {"choices":[],"usage":null}\n\n' * 20
    assert by_name("chat").facts(b"{}", end + more, True).failed is None
    stop = b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n'
    assert by_name("messages").facts(b"{}", stop + b'data: {"type":"ping"}\n\n' * 20, True).failed is None
