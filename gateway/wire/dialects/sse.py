"""Server-sent events, sans-I/O: bytes in, events out, as the WHATWG standard says (HTML §9.2.6); and what they hold, as
JSON objects one by one (`chunks`), or as structs all at once (`StreamReader`).

`SseParser` is incremental and takes any chunking: a line may end in LF, CR or CRLF, and a chunk may end anywhere, also
inside a line end or a character. It never raises; an event that was not finished by a blank line is dropped. The delay
before reconnecting (`retry`) is ignored.

A span's head needs two or three events out of hundreds. `first_data` and `last_data` find them by searching for blank
lines instead of reading every line, and return the undecoded data, which a JSON parser takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import NoneType
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from penstock.gateway.wire.dialects.loose_json import (
    BOM,
    MOST_OBJECTS,
    MOST_PROBLEMS,
    UNREADABLE,
    Json,
    is_bulky,
    loads,
    obj,
    objs,
)

BLOCK = 1 << 16
TAIL = 256
FEW: Final = 8
"""Streams of fewer events are read in full."""
_FIELD = re.compile(rb"(?:\xef\xbb\xbf)?[\r\n]*+(?:(?:data|event|id|retry)(?:[:\r\n])|:)")
_FIELDS = (b"data:", b"event:", b"id:", b"retry:")
_LOOKED_AT = 64


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


def chunks(body: bytes, problems: list[str], side: str = "response") -> Iterator[Json]:
    """The JSON objects of a stream. An error event gets the same shape however it was sent: an object with `error`.
    `side`: the body's name in problems."""
    unreadable = 0
    for number, event in enumerate(events(body), 1):
        value = loads(event.data)
        if chunk := obj(value):
            failed = "error" in (event.type, chunk.get("type"), chunk.get("object"))
            if chunk.get("error"):
                yield chunk
            else:
                yield chunk | {"error": chunk} if failed else {key: it for key, it in chunk.items() if key != "error"}
        elif event.type == "error" and event.data.strip():
            yield {"error": event.data}
        elif value != {} and event.data.strip() != "[DONE]":
            unreadable += 1
            if unreadable <= MOST_PROBLEMS:
                problems.append(f"{side}: event {number} is not a readable JSON object")
    if unreadable > MOST_PROBLEMS:
        problems.append(f"{side}: {unreadable - MOST_PROBLEMS:,} more events are no readable JSON objects")


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


# -- all events of a stream as structs, decoded at once, for a span's summary ------------------------------------------

# A summary that read fewer events than a Turn could contradict it. So it reads all of them, but decodes only the fields
# that it needs, and makes no Python call for an event: where each event is a line of data and a blank line, which is
# how nearly all servers write them, the decoder gets the data of all as one JSON array. All other streams (data on
# several lines, a field of another type, an error that only its event's name tells) are read one by one with `chunks`,
# as a Turn reads it, and fitted into the same structs.

S = TypeVar("S", bound=msgspec.Struct)
_DATA: Final = re.compile(rb"\ndata(?:: ?(.+)\n(?=\n))?")
"""Matches a line of data. Its group is empty, which is no JSON, unless a blank line follows."""
_ERROR: Final = re.compile(rb"\nevent: ?error[ \t]*\n")
_DONE: Final = b"[DONE]"
_TEXT: Final = re.compile(rb'"(?:content|text|thinking|reasoning\w*)": ?"([^"\\\0-\x1f]*)"')
_CALLED: Final = re.compile(rb"(?i)call|tool|function")
_ODD_BYTES: Final = b'"\\' + bytes(range(32))
_ODD: Final = re.compile(b"[%b]" % re.escape(_ODD_BYTES))
"""Matches what may not stand within one text, or makes it one that some readers refuse."""
_TAIL_BYTES: Final = 12
_SLICE: Final = 1 << 20
"""Bytes that are decoded at a time: nothing else runs meanwhile."""


class StreamReader(Generic[S]):
    """Reads bodies into structs of one kind. All its fields, and those of structs in it, must have defaults."""

    def __init__(self, kind: type[S]) -> None:
        self._kind = kind
        self._one = msgspec.json.Decoder(kind).decode
        self._all: Callable[[bytes], list[S]] = msgspec.json.Decoder(cast(Any, list)[kind]).decode

    def body(self, body: bytes) -> S:
        if len(body) <= MOST_OBJECTS or not is_bulky(body):
            try:
                return self._one(body)
            except UNREADABLE:
                pass
        return as_struct(self._kind, obj(loads(body)))

    def events(self, body: bytes) -> Iterator[list[S]]:
        """Yield the events of a stream, several at a time."""
        whole = body.removeprefix(BOM)
        if b"\r" in whole:
            whole = whole.replace(b"\r\n", b"\n")
        if b"\r" in whole:
            yield self._one_by_one(body)
            return
        # An event without a blank line after it is not complete and does not count.
        start, last = 0, whole.rfind(b"\n\n") + 2
        while last >= 2 and start < last:
            end = last if last - start <= _SLICE else whole.find(b"\n\n", start + _SLICE, last) + 2
            yield self._at_once(b"\n" + whole[start:end])
            start = end

    def _at_once(self, part: bytes) -> list[S]:
        found = _DATA.findall(part)
        if found and found[-1] == _DONE:
            found.pop()
        named_error = part.find(b"error") >= 0 and _ERROR.search(part) is not None
        if not named_error and not (len(part) > _SLICE and is_bulky(part)):
            try:
                made = self._all(b"[%b]" % b",".join(found))
            except UNREADABLE:
                made = []
            # The counts differ where one line held more than one value, or none.
            if len(made) == len(found):
                return made
        return self._one_by_one(part)

    def _one_by_one(self, part: bytes) -> list[S]:
        return [as_struct(self._kind, chunk) for chunk in chunks(part, [])]


def as_struct(kind: type[S], wire: Json) -> S:
    """An object as a struct; a value of another type than the field's counts as absent."""
    made = kind()
    for name, fit in _fields(kind):
        if name in wire:
            setattr(made, name, fit(wire[name]))
    return made


@lru_cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    return tuple((name, _fitting(hint)) for name, hint in get_type_hints(kind).items())


def _fitting(hint: Any) -> Callable[[Any], Any]:
    """Return a function that converts a value to a field's type: unchanged, an object as a struct, or the objects of a
    list as structs."""
    options = [one for one in get_args(hint) if one is not NoneType]
    below = next((one for one in options if isinstance(one, type) and issubclass(one, msgspec.Struct)), None)
    listed = next((get_args(one)[0] for one in options if get_origin(one) is list), None)

    def fit(value: Any) -> Any:
        if isinstance(value, list):
            return None if listed is None else [as_struct(listed, item) for item in objs(value)]
        return as_struct(below, obj(value)) if below is not None and isinstance(value, dict) else None

    return fit if options and (below or listed) else lambda value: value


class BriefStream(NamedTuple):
    """A stream without most of the events that say nothing but a text."""

    body: bytes
    left_out: int = 0
    """Bytes of the texts of the events that are left out."""


def distinct_events(body: bytes) -> BriefStream:
    """A stream in which events that follow each other, and differ in one text of the answer only, are one: most of a
    long stream is such events, and what they say beside the text is said by one of them too. The same object where
    there are few of them. Of events with tool calls all stay."""
    blank = b"\r\n\r\n" if b"\r\n\r\n" in body[-TAIL:] else b"\n\n"
    begin = body.rfind(blank, 0, len(body) // 2)
    end = body.find(blank, begin + len(blank))
    like = body[begin + len(blank) : end]
    if begin < 0 or end < 0 or len(body) > _SLICE or _CALLED.search(like) or (said := _TEXT.search(like)) is None:
        return BriefStream(body)
    between = like[said.end(1) :] + blank + like[: said.start(1)]
    first, *texts = _split(body, between)
    if len(texts) < FEW:
        return BriefStream(body)
    last, told = texts.pop(), b" ".join(texts)
    if len(told.translate(None, _ODD_BYTES)) == len(told):
        return BriefStream(between.join((first, b"", last)), len(told) - len(texts) + 1)
    kept, left_out = [first], 0
    for text in texts:
        if _ODD.search(text):
            kept.append(text)
            continue
        left_out += len(text)
        if kept[-1] or len(kept) == 1:
            kept.append(b"")
    return BriefStream(between.join([*kept, last]), left_out)


def _split(body: bytes, between: bytes) -> list[bytes]:
    """`body.split(between)`. That begins each search anew, which for a long `between` costs more than the search: so a
    short end of it is searched for, and the pieces are put together again for a comparison."""
    begin, end = body.find(between) + len(between), body.rfind(between)
    head, tail = between[:-_TAIL_BYTES], between[-_TAIL_BYTES:]
    if begin < end:
        pieces, length = body[begin:end].split(tail), -len(head)
        last = pieces.pop()
        texts = [piece[:length] for piece in pieces]
        texts.append(last)
        if between.join(texts) == body[begin:end]:
            return [body[: begin - len(between)], *texts, body[end + len(between) :]]
    return body.split(between)
