"""Offsets of values in JSON, and copies of JSON that decoders refuse although clients and servers write it. Pure,
iterative.

`members`, `elements` and `value_end` walk through a text in steps of well below a millisecond each, however deep it is
nested. The text between brackets is not checked.

msgspec and orjson refuse half a surrogate pair, a byte order mark, bytes that are no UTF-8, `NaN`, `Infinity`, numbers
beyond a double and more than about a thousand levels. Other parsers take them, and so do engines. `readable` and
`shallow` make a copy that can be read and is as long as the text, so an offset in the copy is valid in the text as
well.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Final

BOM: Final = b"\xef\xbb\xbf"
DEEPEST: Final = 100
"""Most levels of nesting that are read. pydantic takes about 200 and orjson writes 254, a Turn around the value
included."""
MOST_LEVELS: Final = 20_000
"""A text with more levels is not read: each takes a microsecond, in which nothing else runs."""
_STEP: Final = 64 << 10
_STRING: Final = rb'"(?:[^"\\]++|\\.)*+"'
_BLANK: Final = re.compile(rb"[ \t\n\r]*")
_SCALAR: Final = re.compile(rb"[^ \t\n\r,\]}]+")
_TEXT: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_FLAT: Final = re.compile(rb'(?:[^"{}\[\]]++|%b)*+' % _STRING, re.DOTALL)
"""Matches the text before the next bracket; ends early at a string that is longer than the step."""
_BRACKET: Final = re.compile(rb'(?:[^"{}\[\]]++|%b)*+([{}\[\]])' % _STRING, re.DOTALL)
_OPEN: Final = (b"{", b"[")
_HALVES: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
"""Half a surrogate pair as bytes, which valid UTF-8 never has."""
_SURROGATE: Final = re.compile(
    rb"\\u(?:[dD][89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?+|[dD][c-fC-F][0-9a-fA-F]{2})"
)
_LARGE: Final = re.compile(rb"[0-9](?:[0-9]{199}|[eE]\+?[0-9]{3})")
_USUAL: Final = re.compile(
    rb'(?:[^"NI0-9-]++|%b|-?[0-9]{1,200}+(?:\.[0-9]++)?+(?:[eE](?:\+?[0-9]{1,2}+|-[0-9]++))?+(?![0-9.eE]))*+' % _STRING,
    re.DOTALL,
)
_NUMBER: Final = re.compile(rb"-?(?:Infinity|[0-9]++(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+)|NaN")


# -- where values stand -----------------------------------------------------------------------------------------------


def members(body: bytes, at: int = 0) -> Iterator[tuple[str, int, int]]:
    """(name, start of the value, end of the value) of each member of the object at an offset. Raises `ValueError` where
    there is no object."""
    at = _expect(body, at or _begin(body), b"{")
    while body[(at := _blank(body, at)) : at + 1] == b'"':
        end = _string(body, at + 1)
        name = _name(body[at:end])
        at = _blank(body, _expect(body, end, b":"))
        end = value_end(body, at)
        yield name, at, end
        at = _blank(body, end)
        if body[at : at + 1] != b",":
            break
        at += 1
    _ = _expect(body, at, b"}")


def elements(body: bytes, at: int = 0) -> Iterator[tuple[int, int]]:
    """(start, end) of each element of the list at an offset. Raises `ValueError` where there is no list."""
    at = _blank(body, _expect(body, at or _begin(body), b"["))
    while body[at : at + 1] != b"]":
        end = value_end(body, at)
        yield at, end
        at = _blank(body, end)
        if body[at : at + 1] == b",":
            at = _blank(body, at + 1)
        elif body[at : at + 1] != b"]":
            raise ValueError(f"no comma at {at}")


def value_end(body: bytes, at: int) -> int:
    """The end of the value that begins at an offset. Raises `ValueError`."""
    first = body[at : at + 1]
    if first == b'"':
        return _string(body, at + 1)
    if first not in (b"{", b"["):
        found = _SCALAR.match(body, at, at + _STEP)
        if found is None:
            raise ValueError(f"no value at {at}")
        return found.end()
    depth = 0
    for mark, end in _brackets(body, at):
        depth += 1 if mark in b"{[" else -1
        if not depth:
            return end
        if depth > MOST_LEVELS:
            raise _too_deep()
    raise ValueError("it ends early")


def _brackets(body: bytes, at: int) -> Iterator[tuple[int, int]]:
    """(bracket, its end) of each bracket from an offset on. Raises `ValueError` for a string without end."""
    while True:
        found = _FLAT.match(body, at, at + _STEP)
        at = at if found is None else found.end()
        if at >= len(body):
            return
        mark, at = body[at], at + 1
        if mark == 0x22:
            at = _string(body, at)
        elif mark in b"{}[]":
            yield mark, at
        else:
            at -= 1  # The step ended here.


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MOST_LEVELS:,} levels")


def _begin(body: bytes) -> int:
    return len(BOM) if body.startswith(BOM) else 0


def _name(literal: bytes) -> str:
    if b"\\" not in literal and literal.isascii():
        return literal[1:-1].decode()
    return str(json.loads(readable(literal)))


def _blank(body: bytes, at: int) -> int:
    found = _BLANK.match(body, at)
    return at if found is None else found.end()


def _expect(body: bytes, at: int, mark: bytes) -> int:
    at = _blank(body, at)
    if body[at : at + 1] != mark:
        raise ValueError(f"no {mark.decode()} at {at}")
    return at + 1


def _string(body: bytes, at: int) -> int:
    """The end of the string whose first character after the quote is at this offset; raises `ValueError` where it has
    none."""
    while at < len(body):
        quote = body.find(b'"', at, at + _STEP)
        end = min(at + _STEP, len(body)) if quote < 0 else quote
        if body.find(b"\\", at, end) < 0:
            at = end
        elif (found := _TEXT.match(body, at, at + _STEP)) is not None:
            at = found.end()
        if body[at : at + 1] == b'"':
            return at + 1
        if at + 1 == len(body):
            break
    raise ValueError("a string does not end")


# -- what decoders refuse ---------------------------------------------------------------------------------------------


def replace_invalid_characters(body: bytes) -> bytes:
    """The text at the same length, with U+FFFD for half surrogate pairs and bytes that are no UTF-8, and without a byte
    order mark; the same object where it has none of these."""
    return _whole(_utf8(b"   " + body[len(BOM) :] if body.startswith(BOM) else body))


def readable(body: bytes) -> bytes:
    """The text at the same length, as decoders take it; the same object where nothing in it is unusual. Characters that
    cannot be written become U+FFFD, and `NaN` and `Infinity` become empty lists, which no reader takes for a number."""
    body = replace_invalid_characters(body)
    return finite(body) if b"NaN" in body or b"Infinity" in body else body


def _utf8(body: bytes) -> bytes:
    try:
        if not body.isascii():
            _ = body.decode()
        return body
    except UnicodeDecodeError:
        return replace_surrogate_bytes(body).decode("utf-8", "surrogateescape").encode("utf-8", "replace")


def replace_surrogate_bytes(body: bytes) -> bytes:
    """A text at the same length, without half surrogate pairs that are written as bytes."""
    return _HALVES.sub("\ufffd".encode(), body)


def _whole(body: bytes) -> bytes:
    """The text with U+FFFD for escapes of half a surrogate pair."""
    made: bytearray | None = None
    for found in _SURROGATE.finditer(body):
        begin = at = found.start()
        while at and body[at - 1] == 0x5C:
            at -= 1
        # After an odd number of backslashes, this one belongs to the escape of a backslash.
        if ((begin - at) % 2 == 0) == (found[1] is None):
            made = made or bytearray(body)
            made[found.end() - 6 : found.end()] = b"\\ufffd"
    return body if made is None else bytes(made)


def finite(body: bytes) -> bytes:
    """The text at the same length, with `NaN`, `Infinity` and numbers beyond a double replaced, such a number by a very
    large one. The text is unchanged from the point where it is no JSON."""
    pieces, done, at = list[bytes](), 0, 0
    while (usual := _USUAL.match(body, at)) is not None and (found := _NUMBER.match(body, usual.end())) is not None:
        at = found.end()
        if (new := _instead(found[0])) is not None:
            pieces += (body[done : found.start()], new)
            done = at
    return b"".join([*pieces, body[done:]]) if pieces else body


def has_large_numbers(body: bytes) -> bool:
    """True if a number in the text may be beyond a double."""
    return _LARGE.search(body) is not None


def _instead(number: bytes) -> bytes | None:
    """A replacement of the same length; None for a number that stays."""
    if number[-1:] in b"Ny":
        return b"[" + b"]".rjust(len(number) - 1)
    sign = b"-" if number.startswith(b"-") else b""
    return sign + b"1e" + b"308".rjust(len(number) - len(sign) - 2, b"0") if math.isinf(float(number)) else None


def shallow(body: bytes) -> bytes:
    """The text at the same length, without values nested deeper than `DEEPEST` levels: lists and objects of the next
    level are empty; the same object where there are none. Raises `ValueError` beyond `MOST_LEVELS`."""
    made: bytearray | None = None
    depth = begun = 0
    for found in _BRACKET.finditer(body):
        if found[1] in _OPEN:
            depth += 1
            if depth == DEEPEST + 1:
                begun = found.end()
            elif depth > MOST_LEVELS:
                raise _too_deep()
        else:
            if depth == DEEPEST + 1:
                end, made = found.end() - 1, made or bytearray(body)
                made[begun:end] = b" " * (end - begun)
            depth -= 1
    return body if made is None else bytes(made)
