"""Frames of `application/vnd.amazon.eventstream`, in which AWS sends streams: bytes in, frames out. Pure.

    4 bytes   length of the whole frame            4 bytes   length of its headers
    4 bytes   CRC-32 of these eight bytes          headers, payload
    4 bytes   CRC-32 of all that stands before it

A header is the length of its name (1 byte), the name, the type of its value (1 byte) and the value. Numbers are
big-endian. Where a frame's lengths do not match their checksum, its end is unknown, and reading ends there. A frame
whose payload does not match its checksum is read and noted as a problem, since a secret in it may have been masked on
the tape.
"""

from __future__ import annotations

import struct
from binascii import crc32
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Final, NamedTuple

PRELUDE: Final = 12
LEAST: Final = PRELUDE + 4
"""Bytes of a frame without headers and payload."""
_prelude = struct.Struct(">III").unpack_from
_checksum = struct.Struct(">I").unpack_from
_FIXED: Final = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""Bytes of a header's value, by its type: booleans, numbers, a time, a UUID."""
_BYTES, _TEXT = 6, 7
"""The types of values that begin with their length in two bytes."""


class EventStreamFrame(NamedTuple):
    """One message of the stream."""

    headers: Mapping[str, str]
    """The headers whose values are texts; only these say what the frame is."""
    payload: bytes

    @property
    def kind(self) -> str:
        """The message type: `event`, `exception` or `error`."""
        return self.headers.get(":message-type", "event")

    @property
    def name(self) -> str:
        """The type of the event or exception."""
        names = (self.headers.get(name) for name in (":event-type", ":exception-type", ":error-code"))
        return next(filter(None, names), "")


class HeaderValue(NamedTuple):
    """A header of a frame, and the offsets of its value."""

    name: bytes
    long: bool
    """True for a text or bytes, which begin with their length."""
    text: bool
    start: int
    end: int


def begins_frame(body: bytes) -> bool | None:
    """True if a body begins with a frame; None while there are too few bytes to tell."""
    if len(body) < PRELUDE:
        return None
    size, headers, checksum = _prelude(body, 0)
    return crc32(body[:8]) == checksum and size >= LEAST + headers


def frame_bounds(body: bytes) -> Iterator[tuple[int, int, int, int]]:
    """(start, start of the headers, of the payload, end of the payload) of each complete frame of a body; raises
    `ValueError` behind a place that begins no frame."""
    at = 0
    while len(body) - at >= PRELUDE:
        size, headers, checksum = _prelude(body, at)
        if crc32(body[at : at + 8]) != checksum or size < LEAST + headers:
            raise ValueError(f"what stands at byte {at} is no frame of an event stream")
        if len(body) - at < size:
            return
        yield at, at + PRELUDE, at + PRELUDE + headers, at + size - 4
        at += size


def header_values(block: bytes) -> Iterator[HeaderValue]:
    """The headers of a frame; raises `ValueError` behind one that cannot be read."""
    at = 0
    while at < len(block):
        name_end = at + 1 + block[at]
        kind, start = block[name_end] if name_end < len(block) else -1, name_end + 1
        if long := kind in (_BYTES, _TEXT):
            size, start = int.from_bytes(block[start : start + 2]), start + 2
        else:
            size = _FIXED.get(kind, len(block))
        if start + size > len(block):
            raise ValueError("a frame of an event stream has headers that cannot be read")
        yield HeaderValue(block[at + 1 : name_end], long, kind == _TEXT, start, start + size)
        at = start + size


def frames(body: bytes, problems: list[str], skipped: bytes | None = None) -> Iterator[EventStreamFrame]:
    """Yield the complete frames of a body, and note in `problems` why the rest cannot be read. `skipped`: frames with
    these bytes among their headers are passed over unread."""
    over = 0
    try:
        for start, headers, payload, end in frame_bounds(body):
            over = end + 4
            if skipped is not None and body.find(skipped, headers, payload) >= 0:
                continue
            if crc32(body[start:end]) != _checksum(body, end)[0]:
                problems.append(f"response: the frame at byte {start} does not match its checksum")
            yield EventStreamFrame(_headers(body[headers:payload]), body[payload:end])
    except ValueError as error:
        problems.append(f"response: {error}")
        return
    if over < len(body):
        problems.append("response: the stream ends within a frame")


@lru_cache(maxsize=256)
def _headers(block: bytes) -> Mapping[str, str]:
    """The headers whose values are texts, as far as they can be read. Events of one kind have the same headers each
    time."""
    found: dict[str, str] = {}
    with suppress(ValueError):
        for one in header_values(block):
            if one.text:
                found[one.name.decode("utf-8", "replace")] = block[one.start : one.end].decode("utf-8", "replace")
    return found
