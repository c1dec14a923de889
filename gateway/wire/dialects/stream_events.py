"""All events of a stream as structs, decoded at once, for a span's summary.

A summary that read fewer events than a Turn could contradict it. So it reads all of them, but decodes only the fields
that it needs, and makes no Python call for an event: where each event is a line of data and a blank line, which is how
nearly all servers write them, the decoder gets the data of all as one JSON array. All other streams (data on several
lines, a field of another type, an error that only its event's name tells) are read one by one with `chunks`, as a Turn
reads it, and fitted into the same structs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import NoneType
from typing import Any, Final, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from penstock.gateway.wire.dialects.loose_json import MOST_OBJECTS, UNREADABLE, Json, chunks, is_bulky, loads, obj, objs
from penstock.gateway.wire.dialects.sse import BOM, TAIL

S = TypeVar("S", bound=msgspec.Struct)
_DATA: Final = re.compile(rb"\ndata(?:: ?(.+)\n(?=\n))?")
"""Matches a line of data. Its group is empty, which is no JSON, unless a blank line follows."""
_ERROR: Final = re.compile(rb"\nevent: ?error[ \t]*\n")
_DONE: Final = b"[DONE]"
_TEXT: Final = re.compile(rb'"(?:content|text|thinking|reasoning\w*)": ?"([^"\\\0-\x1f]*)"')
_CALLED: Final = re.compile(rb"(?i)call|tool|function")
_ODD: Final = re.compile(rb'["\\\0-\x1f]')
"""Matches what may not stand within one text, or makes it one that some readers refuse."""
FEW: Final = 8
"""Streams of fewer events are read in full."""
_SLICE: Final = 1 << 20
"""Bytes that are decoded at a time: nothing else runs meanwhile."""


def distinct_events(body: bytes) -> bytes:
    """A stream in which events that follow each other, and differ in one text of the answer only, are one: most of a
    long stream is such events, and what they say beside the text is said by one of them too. The same object where
    there are few of them. Of events with tool calls all stay."""
    blank = b"\r\n\r\n" if b"\r\n\r\n" in body[-TAIL:] else b"\n\n"
    begin = body.rfind(blank, 0, len(body) // 2)
    end = body.find(blank, begin + len(blank))
    like = body[begin + len(blank) : end]
    if begin < 0 or end < 0 or len(body) > _SLICE or _CALLED.search(like) or (said := _TEXT.search(like)) is None:
        return body
    between = like[said.end(1) :] + blank + like[: said.start(1)]
    first, *texts = body.split(between)
    if len(texts) < FEW:
        return body
    kept, last = [first], texts.pop()
    for text in texts if _ODD.search(b" ".join(texts)) else (b"",):
        if _ODD.search(text):
            kept.append(text)
        elif kept[-1] or len(kept) == 1:
            kept.append(b"")
    return between.join([*kept, last])


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
