"""Frames of AWS's event stream and events of servers: whole, cut anywhere, damaged anywhere, and any bytes at all."""

from __future__ import annotations

import struct
from binascii import crc32
from itertools import accumulate, pairwise

import pytest
from fakes.event_stream import event, exception, frame
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.gateway.wire.dialects.bedrock import EventStreamFrame, frames
from penstock.gateway.wire.dialects.sse import ServerSentEvent, SseParser, events, first_data, last_data

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
HEADERS = st.dictionaries(st.text("abc:-", min_size=1, max_size=9), TEXTS, max_size=4)
FRAMES = st.lists(st.tuples(HEADERS, st.binary(max_size=60)), max_size=5)
OTHERS = (
    b"\1t\0" b"\1f\1" b"\1b\2\xff" b"\1s\3\0\1" b"\1i\4\0\0\0\1" b"\1l\5\0\0\0\0\0\0\0\1" b"\1y\6\0\3abc"
    b"\1z\x08\0\0\0\0\0\0\0\1" b"\1u\x09" + bytes(16)
)  # fmt: skip
"""A header of each type that is no text."""


@given(FRAMES)
def test_what_is_written_is_read(told: list[tuple[dict[str, str], bytes]]) -> None:
    problems: list[str] = []
    body = b"".join(frame(headers, payload, OTHERS) for headers, payload in told)
    assert list(frames(body, problems)) == [EventStreamFrame(headers, payload) for headers, payload in told]
    assert problems == []


@given(FRAMES, st.data())
def test_a_body_that_is_cut_anywhere_gives_the_frames_before_the_cut(
    told: list[tuple[dict[str, str], bytes]], data: st.DataObject
) -> None:
    pieces = [frame(headers, payload) for headers, payload in told]
    body, ends = b"".join(pieces), [0, *accumulate(map(len, pieces))]
    cut, problems = data.draw(st.integers(0, len(body))), list[str]()
    whole = sum(end <= cut for end in ends) - 1
    assert list(frames(body[:cut], problems)) == [EventStreamFrame(*it) for it in told[:whole]]
    assert problems == ([] if cut in ends else ["response: the stream ends within a frame"])


@given(FRAMES.filter(bool), st.data())
def test_a_changed_byte_is_told(told: list[tuple[dict[str, str], bytes]], data: st.DataObject) -> None:
    pieces = [frame(headers, payload) for headers, payload in told]
    body, problems = bytearray(b"".join(pieces)), list[str]()
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    found = list(frames(bytes(body), problems))
    ends = [0, *accumulate(map(len, pieces))]
    hit = max(number for number, end in enumerate(ends) if end <= at)
    assert found[:hit] == [EventStreamFrame(*it) for it in told[:hit]]
    if at - ends[hit] < 12:
        assert problems == [f"response: what stands at byte {ends[hit]} is no frame of an event stream"]
    else:
        assert problems == [f"response: the frame at byte {ends[hit]} does not match its checksum"]
        assert found[hit + 1 :] == [EventStreamFrame(*it) for it in told[hit + 1 :]]


@given(st.binary(max_size=80), st.booleans())
def test_any_bytes(body: bytes, sound: bool) -> None:
    """Also where the lengths match their checksum and the headers are anything."""
    if sound:
        start = struct.pack(">II", len(body) + 16, len(body) // 2)
        body = start + struct.pack(">I", crc32(start)) + body + b"sum."
    problems: list[str] = []
    assert all(isinstance(found.name, str) for found in frames(body, problems))
    assert bool(problems) == bool(body) or sound


@pytest.mark.parametrize(("size", "headers"), [(0, 0), (15, 0), (16, 1), (100, 2**32 - 1)])
def test_lengths_that_cannot_be(size: int, headers: int) -> None:
    start = struct.pack(">II", size, headers)
    problems: list[str] = []
    assert list(frames(start + struct.pack(">I", crc32(start)) + bytes(200), problems)) == []
    assert problems == ["response: what stands at byte 0 is no frame of an event stream"]


def test_what_frames_are_called() -> None:
    body = event("messageStart", {}) + exception("throttlingException", "Slow.")
    body += frame({":message-type": "error", ":error-code": "InternalError", ":error-message": "Oh."}, b"")
    body += frame({}, b"x")
    found = [(it.kind, it.name) for it in frames(body, [])]
    wanted = [("event", "messageStart"), ("exception", "throttlingException"), ("error", "InternalError")]
    assert found == [*wanted, ("event", "")]
    # Those that nobody wants are passed over.
    body = event("messageStart", {}) + event("contentBlockDelta", {}) + event("messageStop", {})
    assert [it.name for it in frames(body, [], skipped=b"contentBlockDelta")] == ["messageStart", "messageStop"]


# -- events of servers: the standard's examples, and any chunking ------------------------------------------------------


ENDS = (b"\n", b"\r", b"\r\n")
FIELDS = (
    b"data: a|data:b|data:  c|data|data: \xc3\xa9|: comment|event: e|event|id: 7|id: \0|retry: 10|retry: x|other: 1"
)
LINES = st.sampled_from([*(FIELDS + b"|||data: \xff|\xef\xbb\xbfdata: bom|data: x:y| data: z").split(b"|")])
STREAMS = st.lists(st.tuples(LINES, st.sampled_from(ENDS)), max_size=30).map(lambda it: b"".join(a + b for a, b in it))


def data(body: bytes) -> list[str]:
    return [event.data for event in events(body)]


@pytest.mark.parametrize("end", ENDS)
def test_the_standards_examples(end: bytes) -> None:
    def told(text: str) -> list[ServerSentEvent]:
        return list(events(text.encode().replace(b"\n", end)))

    assert told("data: YHOO\ndata: +2\ndata: 10\n\n") == [ServerSentEvent("message", "YHOO\n+2\n10", "")]
    assert told(": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n") == [
        ServerSentEvent("message", "first event", "1"),
        ServerSentEvent("message", "second event", ""),
        ServerSentEvent("message", " third event", ""),
    ]
    assert told("data\n\ndata\ndata\n\ndata:") == [
        ServerSentEvent("message", "", ""),
        ServerSentEvent("message", "\n", ""),
    ]
    assert told("data:test\n\ndata: test\n\n") == [ServerSentEvent("message", "test", "")] * 2
    assert told("event: add\ndata: 73857293\n\nevent: remove\n\ndata: 1\n\n") == [
        ServerSentEvent("add", "73857293", ""),
        ServerSentEvent("message", "1", ""),
    ]


def test_an_event_is_given_as_soon_as_its_blank_line_is_there() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r\n\r") == [ServerSentEvent("message", "a", "")]
    assert parser.feed(b"\ndata: b\r\n") == []
    assert parser.feed(b"") == []
    assert parser.feed(b"\r\n") == [ServerSentEvent("message", "b", "")]


def test_characters_may_be_split_and_the_byte_order_mark_is_dropped_once() -> None:
    body = "\ufeffdata: \u00e9\U0001f600\n\n\ufeffdata: lost\n\n".encode()
    parser = SseParser()
    assert [event for at in range(len(body)) for event in parser.feed(body[at : at + 1])] == [
        ServerSentEvent("message", "\u00e9\U0001f600", "")
    ]


def test_an_id_lasts_and_one_with_a_null_is_ignored() -> None:
    body = b"id: 1\ndata: a\n\ndata: b\n\nid: 2\0\ndata: c\n\nid: 3\n\ndata: d\n\n"
    assert [event.id for event in events(body)] == list("1113")
    # What is for reconnecting makes no event.
    assert data(b"id: 1\ndata: a\n\nretry: 250\n\nid\ndata: b\nretry: 1s\n\n") == ["a", "b"]


def test_a_line_without_an_end_costs_its_own_size() -> None:
    parser = SseParser()
    parser.feed(b"data: ")
    for _ in range(2000):
        parser.feed(b"x" * 1000)
    assert len(parser.feed(b"\n\n")[0].data) == 2_000_000


@given(STREAMS | st.binary(max_size=200), st.lists(st.integers(0, 400), max_size=12))
def test_any_chunking_gives_the_same_events(body: bytes, cuts: list[int]) -> None:
    parser = SseParser()
    places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    chunked = [event for a, b in pairwise(places) for event in parser.feed(body[a:b])]
    assert chunked == list(events(body))


@given(STREAMS | st.binary(max_size=200), st.integers(0, 6))
@example(b"data: a\n\n\n\ndata: b\r\n\r\ndata: c\r\rdata: d\n\n", 3)
@example(b"data: a\r\n\r\n\r\ndata: b\r\n\r\n", 1)
@example(b"data: a\n\n" * 5 + b"data: cut", 2)
def test_first_and_last_give_what_the_parser_gives(body: bytes, count: int) -> None:
    whole = data(body)
    assert [it.decode("utf-8", "replace") for it in first_data(body, count)] == whole[:count]
    assert [it.decode("utf-8", "replace") for it in last_data(body, count)] == (whole[-count:] if count else [])
