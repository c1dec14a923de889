"""Server-sent events, sans-I/O: bytes in, events out, as the WHATWG standard says (HTML §9.2.6).

`SseParser` is incremental and takes any chunking: a line may end in LF, CR or CRLF, and a chunk may end anywhere, also
inside a line end or a character. It never raises; an event that was not finished by a blank line is dropped. The delay
before reconnecting (`retry`) is ignored.

A span's head needs two or three events out of hundreds. `first_data` and `last_data` find them by searching for blank
lines instead of reading every line, and return the undecoded data, which a JSON parser takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

BOM = b"\xef\xbb\xbf"
BLOCK = 1 << 16
_FIELD = re.compile(rb"(?:\xef\xbb\xbf)?[\r\n]*+(?:(?:data|event|id|retry)(?:[:\r\n])|:)")
_FIELDS = (b"data:", b"event:", b"id:", b"retry:")
_LOOKED_AT = 64
TAIL = 256


class ServerSentEvent(NamedTuple):
    """One event, as a browser would dispatch it."""

    type: str
    """`message` unless the stream named another."""
    data: str
    """The data lines joined by LF; bytes that are no UTF-8 are replaced."""
    id: str
    """The newest id of the stream so far, "" before the first."""


class SseParser:
    """Takes chunks of a stream and returns the events that they complete."""

    __slots__ = ("_after_cr", "_at_start", "_data", "_id", "_line", "_type")

    def __init__(self) -> None:
        self._at_start = True
        self._after_cr = False
        self._line: list[bytes] = []
        self._data: list[bytes] = []
        self._type = b""
        self._id = b""

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Return the events that end within this chunk."""
        return [event for line in self._lines(chunk) if (event := self._take(line)) is not None]

    def _lines(self, chunk: bytes) -> list[bytes]:
        # A CR ends its line at once, so that its event is not held back; an LF that follows belongs to the same line
        # end.
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        lines = chunk.splitlines(keepends=True)
        rest = lines.pop() if lines and lines[-1][-1] not in b"\r\n" else b""
        if lines:
            self._after_cr = not rest and chunk.endswith(b"\r")
            lines[0] = b"".join([*self._line, lines[0]])
            self._line = []
        self._line.append(rest)
        return [line.rstrip(b"\r\n") for line in lines]

    def _take(self, line: bytes) -> ServerSentEvent | None:
        if self._at_start:
            line, self._at_start = line.removeprefix(BOM), False
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        self._field(name, value.removeprefix(b" "))
        return None

    def _field(self, name: bytes, value: bytes) -> None:
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._type = value
        elif name == b"id" and b"\0" not in value:
            self._id = value

    def _dispatch(self) -> ServerSentEvent | None:
        kind, data, self._type, self._data = self._type, self._data, b"", []
        return ServerSentEvent(_text(kind) or "message", _text(b"\n".join(data)), _text(self._id)) if data else None


def begins_event_stream(body: bytes) -> bool | None:
    """True if these are the first bytes of a stream of events; None while there are too few to tell."""
    if _FIELD.match(body[:_LOOKED_AT]) is not None:
        return True
    told = body[:_LOOKED_AT].removeprefix(BOM).lstrip(b"\r\n")
    return None if BOM.startswith(body) or not told or any(it.startswith(told) for it in _FIELDS) else False


def events(body: bytes) -> Iterator[ServerSentEvent]:
    """The events of a whole body."""
    parser = SseParser()
    for start in range(0, len(body), BLOCK):
        yield from parser.feed(body[start : start + BLOCK])


def first_data(body: bytes, count: int) -> list[bytes]:
    """Data of the first `count` events, oldest first."""
    found: list[bytes] = []
    blank, start = _blank(body), len(BOM) if body.startswith(BOM) else 0
    while start < len(body) and len(found) < count:
        cut = body.find(blank, start)
        end = len(body) if cut < 0 else cut + len(blank)
        found += _datas(body[start:end])
        start = end
    return found[:count]


def last_data(body: bytes, count: int) -> list[bytes]:
    """Data of the last `count` events, oldest first."""
    found: list[bytes] = []
    blank, start, end = _blank(body), len(BOM) if body.startswith(BOM) else 0, len(body)
    while end > start and len(found) < count:
        cut = body.rfind(blank, start, end - 1)
        begin = start if cut < 0 else cut + len(blank)
        found = _datas(body[begin:end]) + found
        end = begin
    return found[max(len(found) - count, 0) :]


def _blank(body: bytes) -> bytes:
    # Either guess gives right answers, since the bytes between two blank lines are still parsed line by line; the right
    # guess gives them fast.
    return b"\r\n\r\n" if b"\r\n\r\n" in body[-TAIL:] else b"\n\n"


def _datas(block: bytes) -> list[bytes]:
    """Data of the events in a piece of a stream that begins after a blank line."""
    found: list[bytes] = []
    lines: list[bytes] = []
    for line in block.splitlines():
        if line.startswith(b"data:"):
            lines.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line == b"data":
            lines.append(b"")
        elif not line and lines:
            found.append(b"\n".join(lines))
            lines = []
    return found


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
