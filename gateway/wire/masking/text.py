"""A text and its mapping to the bytes that it was written with, through all encodings around it.

A part of a text is masked in these bytes: each escape becomes as many asterisks as it has characters. So lengths stay
the same, and JSON stays JSON.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, Final, Protocol

from penstock.gateway.model.codes import install_hint
from penstock.gateway.model.toml import ConfigError
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


# Regular expressions of users, with limited time. The engine is RE2: its time grows linearly with the text.
#
# Finding every match in a text can still take quadratic time, so it stops at a deadline, in seconds of CPU. RE2 has
# neither look-around nor back-references; its classes `\d`, `\w` and `\b` are those of ASCII. It comes with the extra
# `masking`.

_BASE_S: Final = 0.25
_PER_BYTE_S: Final = 0.25e-6
"""Seconds of CPU that all rules together may take for a body: a hundred times what usual ones take."""
_SHORT: Final = 256
"""Bytes of a text up to which the clock is not read, which would take longer than the search."""
_SAMPLES: Final = (b"", b"a", b"1", b" ", b"a b", b"-1 a.", b"\n")
_EDGES: Final = re.compile(r"\^|\$|\\[AzZ]")
EXTRA: Final = f"masking rules with a pattern need google-re2: {install_hint('masking')}"


class PatternTimeout(Exception):
    """The pattern takes too long for this body."""


class CpuBudget:
    """The CPU time that patterns may take for one body."""

    def __init__(self, size: int) -> None:
        self.seconds = _BASE_S + size * _PER_BYTE_S
        self._spent = 0.0

    def spend(self, seconds: float) -> None:
        """Raises `PatternTimeout` if the time is over."""
        self._spent += seconds
        if self._spent > self.seconds:
            raise PatternTimeout(f"took longer than {self.seconds * 1000:.0f} ms")


class MaskingPattern:
    """A regular expression, ready for use."""

    def __init__(self, written: str) -> None:
        """Raises `ValueError` if it cannot be used, and `ConfigError` if the engine is not installed."""
        self._compiled = _compiled(written)
        self.at_edges = _EDGES.search(written.replace("[^", "[")) is not None
        """True if it may match by the beginning or end of its text."""
        for sample in _SAMPLES:
            found = self._compiled.search(sample)
            if found is not None and found.start() == found.end():
                raise ValueError(f"{written!r} matches the empty string: say what must be there, as with + for *")

    def occurs_in(self, text: bytes, clock: CpuBudget) -> bool:
        """True if it matches anywhere; raises `PatternTimeout`."""
        return next(self.find(text, clock), None) is not None

    def find(self, text: bytes, clock: CpuBudget) -> Iterator[tuple[int, int]]:
        """The places of its matches; raises `PatternTimeout`."""
        at, size, search, now = 0, len(text), self._compiled.search, time.thread_time
        while at <= size:
            if size > _SHORT:
                began = now()
                found = search(text, at)
                clock.spend(now() - began)
            else:
                found = search(text, at)
            if found is None:
                return
            start, end = found.span()
            if end > start:
                yield start, end
            at = max(end, at + 1)


def join_patterns(written: Iterable[str]) -> MaskingPattern | None:
    """A pattern that matches if one of several does; None if they are too many for one."""
    try:
        return MaskingPattern("|".join(f"(?:{one})" for one in written))
    except ValueError:
        return None


def _compiled(written: str) -> Any:
    try:
        re2: Any = import_module("re2")
    except ImportError:
        raise ConfigError(EXTRA) from None
    options = re2.Options()
    options.never_capture, options.log_errors = True, False
    try:
        return re2.compile(written.encode(), options)
    except re2.error as error:
        said: Any = error.args[0]
        why = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
        syntax = "see github.com/google/re2/wiki/Syntax"
        raise ValueError(f"{written!r} is no regular expression of RE2 ({why}): {syntax}") from None
