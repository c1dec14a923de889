"""Frames of AWS's event stream: whole, cut anywhere, damaged anywhere, and any bytes at all."""

from __future__ import annotations

import struct
from binascii import crc32
from itertools import accumulate

import pytest
from fakes.event_stream import event, exception, frame
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.dialects.event_stream import Frame, frames

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
    assert list(frames(body, problems)) == [Frame(headers, payload) for headers, payload in told]
    assert problems == []


@given(FRAMES, st.data())
def test_a_body_that_is_cut_anywhere_gives_the_frames_before_the_cut(
    told: list[tuple[dict[str, str], bytes]], data: st.DataObject
) -> None:
    pieces = [frame(headers, payload) for headers, payload in told]
    body, ends = b"".join(pieces), [0, *accumulate(map(len, pieces))]
    cut, problems = data.draw(st.integers(0, len(body))), list[str]()
    whole = sum(end <= cut for end in ends) - 1
    assert list(frames(body[:cut], problems)) == [Frame(*it) for it in told[:whole]]
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
    assert found[:hit] == [Frame(*it) for it in told[:hit]]
    if at - ends[hit] < 12:
        assert problems == [f"response: what stands at byte {ends[hit]} is no frame of an event stream"]
    else:
        assert problems == [f"response: the frame at byte {ends[hit]} does not match its checksum"]
        assert found[hit + 1 :] == [Frame(*it) for it in told[hit + 1 :]]


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
