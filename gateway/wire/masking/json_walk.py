"""Finds every value in JSON, with its path and its place in the bytes. Pure, iterative, linear.

Several values may follow each other, as in JSON lines. JSON that was cut off is read as far as it goes; other malformed
JSON is refused, and so is JSON with very many deeply nested values. A value that is nested deeper than any API writes
is found as a whole. A duplicate key is found twice. Numbers are kept as they are written.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, TypeAlias

from penstock.gateway.wire.dialects.json_scan import value_end
from penstock.gateway.wire.masking.paths import Path
from penstock.gateway.wire.masking.text import plain

Kind: TypeAlias = Literal["key", "text", "integer", "other", "container", "deep"]
DEEPEST: Final = 200
"""Most levels of lists and objects."""
_TOKEN: Final = re.compile(
    rb'[ \t\r\n\x1e]*+(?:("[^"\\]*+(?:\\.[^"\\]*+)*+")|("[^"\\]*+(?:\\.[^"\\]*+)*+\\?\Z)'
    rb"|(-?\d++(?![\w.+-]))|(-?\d++(?:\.\d++)?(?:[eE][+-]?\d++)?(?![\w.+-])|-?\d++(?:\.\d*+)?(?:[eE][+-]?\d*+)?\Z"
    rb"|true|false|null|-?Infinity|NaN)|([\[\]{},:]))",
    re.DOTALL,
)
_REST: Final = re.compile(rb"[ \t\r\n\x1e]*+(?:\Z|(?:-|tr?u?|fa?l?s?|nu?l?)\Z)")
"""White space, or the beginning of a word that was cut off."""
_BEGINS: Final = re.compile(rb'(?:\xef\xbb\xbf)?[ \t\r\n\x1e]*+[\[{"]').match
_VALUE, _KEY, _COLON, _COMMA = range(4)
STEPS_PER_BYTE: Final = 8
"""Most path steps for each byte, of all paths together, or more in short JSON: deeply nested JSON with a value at every
other byte would take much memory."""
_STEPS: Final = 1 << 16


class BodyFormatError(Exception):
    """The bytes are no JSON; the text says why."""


class JsonNode(NamedTuple):
    """A value or a key, and its place."""

    path: Path
    """For a key the path of its value."""
    kind: Kind
    start: int
    """For texts and keys the place behind the opening quote."""
    end: int


class JsonWalker:
    """One walk through some JSON."""

    def __init__(self, data: bytes, containers: bool = False) -> None:
        """`containers`: True to find lists and objects, too."""
        self._data, self._containers = data, containers
        self._documents: list[list[JsonNode]] = []
        self._found: list[JsonNode] = []
        self._path: list[str | int] = []
        self._opened: list[int] = []
        """The beginnings of open lists (positive) and objects (negative); offsets count from 1."""
        self._expected, self._may_close = _VALUE, False
        self._steps = max(len(data) * STEPS_PER_BYTE, _STEPS)

    def documents(self) -> list[list[JsonNode]]:
        """The values and keys of each document, in order; raises `BodyFormatError`."""
        data, at, match = self._data, 3 if self._data.startswith(b"\xef\xbb\xbf") else 0, _TOKEN.match
        while (token := match(data, at)) is not None:
            kind, at = token.lastindex or 0, token.end()
            if kind == 5:
                at = self._mark(data[at - 1], at)
            elif self._expected == _KEY and kind <= 2:
                self._key(token.start(kind) + 1, at - (kind == 1))
            elif self._expected == _VALUE:
                self._value(kind, token.start(kind), at)
            else:
                raise BodyFormatError(f"it is no JSON at byte {at}")
        if _REST.match(data, at) is None:
            raise BodyFormatError(f"it is no JSON at byte {at}")
        while self._opened:
            self._close(len(data))
        if self._found:
            self._documents.append(self._found)
        return self._documents

    def _here(self) -> Path:
        self._steps -= len(self._path)
        if self._steps < 0:
            raise BodyFormatError("it has too much that is nested deep")
        return tuple(self._path)

    def _key(self, start: int, end: int) -> None:
        self._path[-1] = plain(self._data[start:end]).decode("utf-8", "replace")
        self._found.append(JsonNode(self._here(), "key", start, end))
        self._expected, self._may_close = _COLON, False

    def _value(self, kind: int, start: int, end: int) -> None:
        path = self._here()
        if kind <= 2:
            self._found.append(JsonNode(path, "text", start + 1, end - (kind == 1)))
        else:
            self._found.append(JsonNode(path, "integer" if kind == 3 else "other", start, end))
        self._ended()

    def _deep(self, start: int) -> int:
        """Finds a list or object that is nested too deep; returns its end."""
        try:
            end = value_end(self._data, start)
        except ValueError:
            end = len(self._data)  # It was cut off.
        self._found.append(JsonNode(self._here(), "deep", start, end))
        self._ended()
        return end

    def _mark(self, mark: int, end: int) -> int:
        """Handles a bracket, colon or comma; returns the place to continue."""
        if mark in b"[{" and self._expected == _VALUE:
            if len(self._opened) >= DEEPEST:
                return self._deep(end - 1)
            self._opened.append(end if mark == 0x5B else -end)
            self._path.append(0 if mark == 0x5B else "")
            self._expected, self._may_close = (_VALUE if mark == 0x5B else _KEY), True
        elif mark in b"]}" and self._opened and (self._expected == _COMMA or self._may_close):
            if (self._opened[-1] > 0) != (mark == 0x5D):
                raise BodyFormatError(f"it is no JSON at byte {end}")
            self._close(end)
        elif mark == 0x3A and self._expected == _COLON:
            self._expected = _VALUE
        elif mark == 0x2C and self._expected == _COMMA:
            inner = self._path[-1]
            self._expected, self._may_close = _KEY, False
            if isinstance(inner, int):
                self._path[-1], self._expected = inner + 1, _VALUE
        else:
            raise BodyFormatError(f"it is no JSON at byte {end}")
        return end

    def _close(self, end: int) -> None:
        start = abs(self._opened.pop()) - 1
        _ = self._path.pop()
        if self._containers:
            self._found.append(JsonNode(self._here(), "container", start, end))
        self._ended()

    def _ended(self) -> None:
        """Called at the end of a value."""
        self._may_close = False
        if self._opened:
            self._expected = _COMMA
        else:
            self._documents.append(self._found)
            self._found, self._expected = [], _VALUE


def walk(data: bytes, containers: bool = False) -> list[list[JsonNode]]:
    """The values and keys of each JSON document in some bytes; raises `BodyFormatError`."""
    return JsonWalker(data, containers).documents()


def looks_like_json(data: bytes) -> bool:
    """True if the bytes begin like a list, an object or a string."""
    return _BEGINS(data) is not None
