"""A text and its mapping to the bytes that it was written with, through all encodings around it.

A part of a text is masked in these bytes: each escape becomes as many asterisks as it has characters. So lengths stay
the same, and JSON stays JSON.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, Protocol

from penstock.gateway.wire.dialects.json_scan import ESCAPE, unescaped

_PERCENT: Final = re.compile(rb"%[0-9a-fA-F]{2}|\+")
STAR: Final = b"*"


class MaskableText(Protocol):
    """Bytes of UTF-8 that can be masked."""

    data: bytes

    def write(self, start: int, end: int, new: bytes | None = None) -> bool:
        """Replaces a part by asterisks, or by other bytes of the same length. True if that changed anything."""
        ...


class BodyText:
    """The bytes of a body."""

    def __init__(self, body: bytes) -> None:
        self.data, self._body, self._buffer, self._changed = body, body, bytearray(body), False

    def read_as(self, body: bytes) -> None:
        """Replaces the text, but not the body, by other bytes of the same length."""
        self.data = body

    def write(self, start: int, end: int, new: bytes | None = None) -> bool:
        new = STAR * (end - start) if new is None else new
        changed = bytes(self._buffer[start:end]) != new
        self._buffer[start:end] = new
        self._changed = self._changed or changed
        return changed

    @property
    def masked(self) -> bytes:
        """The body with all changes; the same object if there are none."""
        return bytes(self._buffer) if self._changed else self._body


class TextSlice:
    """A part of a text that is written without escapes."""

    def __init__(self, outer: MaskableText, start: int, end: int) -> None:
        self.data, self._outer, self._start = outer.data[start:end], outer, start

    def write(self, start: int, end: int, new: bytes | None = None) -> bool:
        return self._outer.write(self._start + start, self._start + end, new)


class EscapedText:
    """A part of a text that is written with escapes."""

    def __init__(self, outer: MaskableText, start: int, end: int, percent: bool = False) -> None:
        self._outer = outer
        self.data, self._ours, self._theirs = _decoded(outer.data, start, end, percent)

    def write(self, start: int, end: int, new: bytes | None = None) -> bool:
        first, last = self._at(start)[0], self._at(end - 1)[1]
        return self._outer.write(first, last, new if new is not None and last - first == len(new) else None)

    def _at(self, at: int) -> tuple[int, int]:
        """The place outside of the byte at an offset of the text."""
        index = bisect_right(self._ours, at) - 1
        begun, escaped = self._theirs[index]
        if escaped:
            return begun, self._theirs[index + 1][0]
        return begun + at - self._ours[index], begun + at - self._ours[index] + 1


class JoinedText:
    """Texts one behind the other."""

    def __init__(self, parts: Sequence[MaskableText], between: bytes = b"") -> None:
        self.data = between.join([part.data for part in parts])
        self._parts, self._begins = parts, [0]
        for part in parts[:-1]:
            self._begins.append(self._begins[-1] + len(part.data) + len(between))

    def write(self, start: int, end: int, new: bytes | None = None) -> bool:
        changed, index = False, max(bisect_right(self._begins, start) - 1, 0)
        while index < len(self._parts) and self._begins[index] < end:
            begin, part = self._begins[index], self._parts[index]
            first, last = max(start - begin, 0), min(end - begin, len(part.data))
            if first < last:
                piece = None if new is None else new[begin + first - start : begin + last - start]
                changed = part.write(first, last, piece) or changed
            index += 1
        return changed


def literal(outer: MaskableText, start: int, end: int) -> MaskableText:
    """The text of a JSON string; `start` and `end` are those between its quotes."""
    return EscapedText(outer, start, end) if outer.data.find(b"\\", start, end) >= 0 else TextSlice(outer, start, end)


def _decoded(data: bytes, start: int, end: int, percent: bool) -> tuple[bytes, list[int], list[tuple[int, bool]]]:
    """(the text, the beginnings of its runs and escapes in it, the beginning of each outside and True if it is an
    escape)"""
    pieces, ours, theirs = list[bytes](), list[int](), list[tuple[int, bool]]()
    size, at = 0, start

    def add(piece: bytes, begun: int, escaped: bool) -> None:
        nonlocal size
        pieces.append(piece)
        ours.append(size)
        theirs.append((begun, escaped))
        size += len(piece)

    for found in (_PERCENT if percent else ESCAPE).finditer(data, start, end):
        if found.start() > at:
            add(data[at : found.start()], at, False)
        at = found.end()
        add(_sent(found[0]) if percent else unescaped(found[0]), found.start(), True)
    if at < end:
        add(data[at:end], at, False)
    theirs.append((end, False))
    return b"".join(pieces), ours, theirs


def _sent(escape: bytes) -> bytes:
    return b" " if escape == b"+" else bytes([int(escape[1:], 16)])
