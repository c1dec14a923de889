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
from functools import lru_cache
from typing import Final, NamedTuple

PRELUDE: Final = 12
LEAST: Final = PRELUDE + 4
"""Bytes of a frame without headers and payload."""
_prelude = struct.Struct(">III").unpack_from
_checksum = struct.Struct(">I").unpack_from
FIXED: Final = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""Bytes of a header's value, by its type: booleans, numbers, a time, a UUID."""
_BYTES, _TEXT = b"\6", b"\7"
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


def begins_frame(body: bytes) -> bool | None:
    """True if a body begins with a frame; None while there are too few bytes to tell."""
    if len(body) < PRELUDE:
        return None
    size, headers, checksum = _prelude(body, 0)
    return crc32(body[:8]) == checksum and size >= LEAST + headers


def frames(body: bytes, problems: list[str], skipped: bytes | None = None) -> Iterator[EventStreamFrame]:
    """Yield the complete frames of a body, and note in `problems` why the rest cannot be read. `skipped`: frames with
    these bytes among their headers are passed over unread."""
    at = 0
    while at < len(body):
        if len(body) - at < PRELUDE:
            problems.append("response: the stream ends within a frame")
            return
        size, headers, checksum = _prelude(body, at)
        if crc32(body[at : at + 8]) != checksum or size < LEAST + headers:
            problems.append(f"response: what stands at byte {at} is no frame of an event stream")
            return
        if len(body) - at < size:
            problems.append("response: the stream ends within a frame")
            return
        start, end = at + PRELUDE, at + size - 4
        if skipped is not None and body.find(skipped, start, start + headers) >= 0:
            at += size
            continue
        if crc32(body[at:end]) != _checksum(body, end)[0]:
            problems.append(f"response: the frame at byte {at} does not match its checksum")
        yield EventStreamFrame(_headers(body[start : start + headers]), body[start + headers : end])
        at += size


@lru_cache(maxsize=256)
def _headers(block: bytes) -> Mapping[str, str]:
    """The headers whose values are texts, as far as they can be read. Events of one kind have the same headers each
    time."""
    found: dict[str, str] = {}
    at = 0
    while at < len(block):
        name_end = at + 1 + block[at]
        name, kind = block[at + 1 : name_end].decode("utf-8", "replace"), block[name_end : name_end + 1]
        at = name_end + 1
        if kind in (_BYTES, _TEXT):
            size = int.from_bytes(block[at : at + 2])
            at += 2
            if kind == _TEXT:
                found[name] = block[at : at + size].decode("utf-8", "replace")
            at += size
        elif kind and kind[0] in FIXED:
            at += FIXED[kind[0]]
        else:
            break
    return found
