"""What is taken out of an answer: exactly what was added, whatever the pieces it comes in."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from fakes import vllm_wire
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.calls.capture.answer import Cleaner, Events
from penstock.gateway.calls.capture.request import Asked, ask
from penstock.gateway.demo.model import Answer, Call
from penstock.gateway.dialects import by_name

Json = dict[str, Any]
LIMIT = 1 << 20
TOOLS = Answer("Let me look.", (Call("c1", "get", '{"x": "é 1"}'), Call("c2", "put", "{}")))
OWN: list[Json] = [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}]
REQUESTS: list[Json] = [{"model": "m", "messages": []} | own | more for own in OWN for more in ({}, {"n": 3})]


def asked_of(request: Json, dialect: str = "chat") -> Asked:
    made = ask(by_name(dialect), json.dumps(request).encode())
    assert made is not None
    return made


def through(asked: Asked, pieces: list[bytes], limit: int = LIMIT) -> bytes:
    events = Events(Cleaner(asked), limit)
    return b"".join([*map(events.feed, pieces), events.rest()])


def cut(body: bytes, at: list[int]) -> list[bytes]:
    places = sorted({0, len(body), *(place % (len(body) + 1) for place in at)})
    return [body[a:b] for a, b in pairwise(places)]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_a_plain_answer_is_what_it_would_have_been(request_: Json) -> None:
    asked = asked_of(request_)
    for format, dialect in ((vllm_wire.chat, "chat"), (vllm_wire.completion, "completions")):
        asked = asked_of(request_, dialect)
        given_ = json.dumps(format(json.loads(asked.body), TOOLS)).encode()
        cleaner = Cleaner(asked)
        assert cleaner.document(given_) == json.dumps(format(request_, TOOLS)).encode()
        assert cleaner.ids


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=repr)
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_a_stream_is_what_it_would_have_been(request_: Json, end: bytes) -> None:
    asked = asked_of(request_)
    unasked, given_ = (
        b"".join(vllm_wire.chat_events(one, TOOLS)).replace(b"\n", end) for one in (request_, json.loads(asked.body))
    )
    assert given_ != unasked
    for size in (len(given_), 1, 7, 64):
        assert through(asked, [given_[at : at + size] for at in range(0, len(given_), size)]) == unasked


def test_a_stream_of_completions_too() -> None:
    request_: Json = {"model": "m", "prompt": "a", "n": 2}
    asked = asked_of(request_, "completions")
    given_ = b"".join(vllm_wire.completion_events(json.loads(asked.body), Answer("To be or not.")))
    assert through(asked, [given_]) == b"".join(vllm_wire.completion_events(request_, Answer("To be or not.")))


LINES = st.sampled_from([
    b"", b"", b": comment", b"event: x", b"id: 7", b"retry: 10", b"data", b"data:", b"data: [DONE]", b"data: {",
    b'data: {"choices":[{"delta":{"content":"a"},"token_ids":null}]}', b'data: {"error":{"message":"no"}}', b"\xff",
])  # fmt: skip
OURS = b'data: {"choices":[{"delta":%b,"token_ids":[1],"finish_reason":%b,"logprobs":{"content":[]}}]}'
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
CUTS = st.lists(st.integers(0, 1 << 16), max_size=12)


@given(st.lists(st.tuples(LINES, ENDS), max_size=12), CUTS)
def test_what_needs_no_change_passes_byte_for_byte(lines: list[tuple[bytes, bytes]], at: list[int]) -> None:
    body = b"".join(line + end for line, end in lines)
    assert through(asked_of({}), cut(body, at)) == body
    assert through(asked_of({}), cut(body, at), limit=20) == body


@given(st.lists(st.tuples(st.booleans(), ENDS), min_size=1, max_size=6), ENDS, CUTS)
def test_events_are_changed_or_left_out_wherever_they_are_cut(
    story: list[tuple[bool, bytes]], end: bytes, at: list[int]
) -> None:
    said, nulled = b'{"content":"a"}', OURS.replace(b"[1]", b"null").replace(b'{"content":[]}', b"null")
    body = b": hi" + end + b"".join(OURS % (said if says else b"{}", b"null") + one + one for says, one in story)
    clean = b": hi" + end + b"".join(nulled % (said, b"null") + one + one for says, one in story if says)
    if not story[0][0]:  # its comment stays
        clean = clean[: 4 + len(end)] + story[0][1] + clean[4 + len(end) :]
    assert through(asked_of({}), cut(body, at)) == clean


def test_an_event_passes_as_soon_as_it_is_whole() -> None:
    for end in (b"\n", b"\r\n", b"\r"):
        events, one = Events(Cleaner(asked_of({})), LIMIT), OURS % (b'{"content":"a"}', b"null") + end + end
        whole = len(one) - (end == b"\r\n")  # a CR ends its line, and the LF after it comes late
        assert [bool(events.feed(one[at : at + 1])) for at in range(whole)] == [False] * (whole - 1) + [True]


@pytest.mark.parametrize(
    ("delta", "finish", "stays"),
    [(b"{}", b"null", False), (b"{}", b'"stop"', True), (b'{"content":""}', b"null", True), (b"null", b"null", True)],
)
def test_only_events_that_say_and_end_nothing_are_left_out(delta: bytes, finish: bytes, stays: bool) -> None:
    event = OURS % (delta, finish) + b"\n\n"
    assert bool(through(asked_of({}), [event])) is stays
    assert through(asked_of({"logprobs": True}), [event]) == event.replace(b"[1]", b"null")
    assert through(asked_of({}), [event.replace(b"[1]", b"null").replace(b'{"content":[]}', b"null")])


def test_data_in_several_lines_stays_in_several_lines() -> None:
    body = (
        b'id: 1\ndata: {"choices":[{"delta":\r\ndata:{"content":"a"},\ndata: "token_ids":[1,\ndata: 2]}]}\nevent: x\n\n'
    )
    assert through(asked_of({}), [body]) == (
        b'id: 1\ndata: {"choices":[{"delta":\r\ndata:{"content":"a"},\r\ndata: "token_ids":null}]}\r\nevent: x\n\n'
    )


def test_a_stream_that_ends_within_an_event_is_still_cleaned() -> None:
    event = OURS % (b'{"content":"a"}', b"null")
    for end in (b"", b"\n", b"\r"):
        nulled = event.replace(b"[1]", b"null").replace(b'{"content":[]}', b"null")
        assert through(asked_of({}), cut(event + end, [30, 60])) == nulled + end


def test_an_event_without_end_is_not_held_for_ever() -> None:
    events = Events(Cleaner(asked_of({})), 1000)
    body = b'data: {"choices":[{"token_ids":[' + b"1," * 2000
    out = [events.feed(body[at : at + 100]) for at in range(0, len(body), 100)]
    assert b"".join(out) == body
    assert out[10:] == [body[:1100], *(body[at : at + 100] for at in range(1100, len(body), 100))]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b'{"choices":[{"token_ids":[1]}]',
        b'[{"choices":[{"token_ids":[1]}]}]',
        b'{"choices":"x","token_ids":[1],"logprobs":1}',
        b'{"error":{"message":"no","choices":[{"token_ids":[1]}]}}',
        b'{"choices":[{"message":{"content":"\\"token_ids\\":[1]","token_ids":[1]},"token_ids":null}]}',
        b'{"choices":[{"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"token_ids":[1]}]}',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_what_is_not_understood_or_not_ours_stays(body: bytes) -> None:
    cleaner = Cleaner(asked_of({}))
    assert cleaner.document(body) is body
    assert not cleaner.ids
