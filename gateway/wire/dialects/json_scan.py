"""The places of values in JSON bytes, and the paths that people write for them. Pure.

Three walks, because no one of them can do the work of another at its price:

* `find` and `locate` follow a tree of keys. They skip values by the standard library's scanner, which is C, checks the
  text and is five to seven times as fast as the next walk. It makes objects of what it skips, in one step.
* `members`, `elements` and `value_end` go through one list or object in steps of well below a millisecond each, in
  which other threads wait, and make no objects. The text between brackets is not checked.
* `walk` notes every value with its path, and reads JSON that was cut off, and JSON lines.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import takewhile
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from penstock.gateway.wire.dialects.loose_json import (
    BOM,
    MOST_LEVELS,
    STRING,
    UNREADABLE,
    is_bulky,
    repaired,
    too_deep,
    valid_utf8,
)  # fmt: skip

Path: TypeAlias = tuple[str | int, ...]
"""Keys and indexes that lead to a value."""
ESCAPE: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]", re.DOTALL
)
_SHORT: Final = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def plain(raw: bytes) -> bytes:
    """The text that is written between the quotes of a JSON string, in UTF-8 that may hold half surrogate pairs."""
    return ESCAPE.sub(lambda it: unescaped(it[0]), raw) if b"\\" in raw else raw


def unescaped(escape: bytes) -> bytes:
    """The character that an escape stands for."""
    kind = escape[1:2]
    if kind != b"u":
        return _SHORT.get(kind, kind)
    units = [int(one, 16) for one in escape.split(b"\\u")[1:]]
    if len(units) == 2:
        return chr(0x10000 + ((units[0] - 0xD800) << 10) + units[1] - 0xDC00).encode()
    return chr(units[0]).encode("utf-8", "surrogatepass")


def _name(raw: bytes) -> str:
    return (raw if raw.isascii() and b"\\" not in raw else valid_utf8(plain(raw))).decode()


# -- one list or object ------------------------------------------------------------------------------------------------

_STEP: Final = 64 << 10
_BLANK: Final = re.compile(rb"[ \t\n\r]*")
_SCALAR: Final = re.compile(rb"[^ \t\n\r,\]}]+")
_TEXT: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_FLAT: Final = re.compile(rb'(?:[^"{}\[\]]++|%b)*+' % STRING, re.DOTALL)
"""Matches the text before the next bracket; ends early at a string that is longer than the step."""
_OPEN: Final = (b"{", b"[")


def members(body: bytes, at: int = 0) -> Iterator[tuple[str, int, int]]:
    """(name, start of the value, end of the value) of each member of the object at an offset. Raises `ValueError` where
    there is no object."""
    at = _expect(body, at or _begin(body), b"{")
    while body[(at := _blank(body, at)) : at + 1] == b'"':
        end = _string(body, at + 1)
        name = _name(body[at + 1 : end - 1])
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
            raise too_deep()
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


def _begin(body: bytes) -> int:
    return len(BOM) if body.startswith(BOM) else 0


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


# -- values at the ends of a tree --------------------------------------------------------------------------------------

KeyTree: TypeAlias = Mapping[str | int, "KeyTree"]
"""Keys of an object and indexes of a list to look for, each with the tree below it; an empty tree (`LEAF`) stands for
the value itself. Keys, which are ASCII, are also looked for in each object of a list, whose index is then no part of
the path."""
LEAF: Final[KeyTree] = {}
_WS = r"[ \t\n\r]*"
_KEY = r'"([^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*)"' + _WS + ":" + _WS
_FIRST = re.compile(rf"\{{{_WS}(?:{_KEY}|\}})")
"""The beginning of an object up to its first value, or an object without members."""
_MEMBER = re.compile(_WS + rf"(?:,{_WS}{_KEY}|\}})")
"""The text between a value and the next one, or the end of the object."""
_NEXT = re.compile(_WS + r"([,\]])" + _WS)
_LIST = re.compile(r"\[" + _WS)
_START, _END = re.compile(_WS + r"(?=\{)"), re.compile(_WS + r"\Z")
# The bytes are read as Latin-1, one character a byte, so that offsets are the same in both.
_scan: Callable[[str, int], tuple[Any, int]] = cast(Any, json.JSONDecoder()).scan_once
"""The C function below `raw_decode`: (value, offset behind it). StopIteration where no value begins."""
_LARGE: Final = 1 << 20
"""Bytes of a body above which values that nobody wants are skipped, not decoded: an image would be copied."""


class JsonRange(NamedTuple):
    """A value and its place in the text."""

    path: Path
    """The keys and indexes of the tree that lead to it."""
    start: int
    """Offset of its first byte."""
    end: int
    """Offset behind its last one."""
    value: Any
    """The parsed value; the characters of its strings are bytes."""


def find(body: bytes, tree: KeyTree) -> list[JsonRange]:
    """The values at the tree's leaves, in the order of the bytes. A key that occurs twice is found twice. Raises one of
    `UNREADABLE` unless the body is one JSON object and nothing else."""
    try:
        return _found(body, tree)
    except UNREADABLE:
        return repaired(lambda made: _found(made, tree), body)


def locate(body: bytes, tree: KeyTree) -> dict[Path, tuple[int, int]]:
    """The places of the values that `find` finds, by their paths; of a key that occurs twice, the last one. A large
    body is not checked."""
    if len(body) > _LARGE or is_bulky(body):
        return dict(_skimmed(body, _begin(body), tree, ()))
    return {one.path: one[1:3] for one in find(body, tree)}


def _skimmed(body: bytes, at: int, tree: KeyTree, path: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    listed = body[at : at + 1] == b"["
    for key, start, end in (
        ((number, *place) for number, place in enumerate(elements(body, at))) if listed else members(body, at)
    ):
        below, there = tree.get(key), (*path, key)
        if below is None and listed and body[start : start + 1] == b"{":
            below, there = tree, path
        if below and body[start : start + 1] in _OPEN:
            yield from _skimmed(body, start, below, there)
        elif below is not None and not below:
            yield there, (start, end)


def _found(body: bytes, tree: KeyTree) -> list[JsonRange]:
    text, found = body.decode("latin-1"), list[JsonRange]()
    start = _START.match(text)
    try:
        if start is not None and _END.match(text, _object(text, start.end(), tree, (), found)):
            return found
    except StopIteration:
        pass
    raise ValueError("not one JSON object")


def _object(text: str, at: int, tree: KeyTree, path: Path, found: list[JsonRange]) -> int:
    """Walk through the object at an offset; return the offset behind it."""
    member = _FIRST.match(text, at)
    while member is not None and (key := member[1]) is not None:
        at = member.end()
        if "\\" in key:
            key = _scan(f'"{key}"', 0)[0]
        below = tree.get(key)
        # Unwanted members are skipped right here: most are, and a call for each would be most of the cost.
        at = _scan(text, at)[1] if below is None else _value(text, at, below, (*path, key), found)
        member = _MEMBER.match(text, at)
    if member is None:
        raise ValueError("a key or a comma is missing")
    return member.end()


def _array(text: str, at: int, tree: KeyTree, path: Path, found: list[JsonRange]) -> int:
    """Walk through the list at an offset; return the offset behind it."""
    number, keys = 0, any(isinstance(key, str) for key in tree)
    at, more = _opened(text, at)
    while more:
        below = tree.get(number)
        if below is not None:
            at = _value(text, at, below, (*path, number), found)
        elif keys and text.startswith("{", at):
            at = _object(text, at, tree, path, found)
        else:
            at = _scan(text, at)[1]
        at, more = _next(text, at)
        number += 1
    return at


def _value(text: str, at: int, tree: KeyTree, path: Path, found: list[JsonRange]) -> int:
    """Note the value at an offset, or walk through it; return the offset behind it."""
    if tree and text.startswith("{", at):
        return _object(text, at, tree, path, found)
    if tree and text.startswith("[", at):
        return _array(text, at, tree, path, found)
    value, end = _scan(text, at)
    if not tree:
        found.append(JsonRange(path, at, end, value))
    return end


def _opened(text: str, at: int) -> tuple[int, bool]:
    """(offset behind the bracket of a list, whether anything follows before the closing one)."""
    match = _LIST.match(text, at)
    at = at if match is None else match.end()
    return (at + 1, False) if text.startswith("]", at) else (at, True)


def _next(text: str, at: int) -> tuple[int, bool]:
    """(offset of what comes after a comma, True), or (offset behind the closing bracket, False)."""
    match = _NEXT.match(text, at)
    if match is None:
        raise ValueError("a comma is missing")
    return match.end(), match[1] == ","


def splice(body: bytes, ranges: Iterable[JsonRange], value: bytes) -> bytes:
    """The body with these ranges, which are in order, replaced by `value`; every other byte is unchanged."""
    pieces: list[bytes | memoryview] = []
    view, at = memoryview(body), 0
    for one in ranges:
        pieces += (view[at : one.start], value)
        at = one.end
    return b"".join([*pieces, view[at:]])


# -- every value -------------------------------------------------------------------------------------------------------

Kind: TypeAlias = Literal["key", "text", "integer", "other", "container", "deep"]
MOST_OPEN: Final = 200
"""Most levels of lists and objects."""
_TOKEN: Final = re.compile(
    rb'[ \t\r\n\x1e]*+(?:("[^"\\]*+(?:\\.[^"\\]*+)*+")|("[^"\\]*+(?:\\.[^"\\]*+)*+\\?\Z)'
    rb"|(-?\d++(?![\w.+-]))|(-?\d++(?:\.\d++)?(?:[eE][+-]?\d++)?(?![\w.+-])|-?\d++(?:\.\d*+)?(?:[eE][+-]?\d*+)?\Z"
    rb"|true|false|null|-?Infinity|NaN)|([\[\]{},:]))",
    re.DOTALL,
)
_REST: Final = re.compile(rb"[ \t\r\n\x1e]*+(?:\Z|(?:-|tr?u?|fa?l?s?|nu?l?)\Z)")
"""White space, or the beginning of a word that was cut off."""
_BEGINS_JSON: Final = re.compile(rb'(?:\xef\xbb\xbf)?[ \t\r\n\x1e]*+[\[{"]').match
_VALUE, _KEY_NEXT, _COLON, _COMMA = range(4)
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
            elif self._expected == _KEY_NEXT and kind <= 2:
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
        self._path[-1] = _name(self._data[start:end])
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
            if len(self._opened) >= MOST_OPEN:
                return self._deep(end - 1)
            self._opened.append(end if mark == 0x5B else -end)
            self._path.append(0 if mark == 0x5B else "")
            self._expected, self._may_close = (_VALUE if mark == 0x5B else _KEY_NEXT), True
        elif mark in b"]}" and self._opened and (self._expected == _COMMA or self._may_close):
            if (self._opened[-1] > 0) != (mark == 0x5D):
                raise BodyFormatError(f"it is no JSON at byte {end}")
            self._close(end)
        elif mark == 0x3A and self._expected == _COLON:
            self._expected = _VALUE
        elif mark == 0x2C and self._expected == _COMMA:
            inner = self._path[-1]
            self._expected, self._may_close = _KEY_NEXT, False
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
    """The values and keys of each JSON document in some bytes, in linear time. JSON that was cut off is read as far as
    it goes. A value that is nested deeper than `MOST_OPEN` levels is found as a whole, a duplicate key twice. Raises
    `BodyFormatError` for other malformed JSON, and for very many deeply nested values."""
    return JsonWalker(data, containers).documents()


def looks_like_json(data: bytes) -> bool:
    """True if the bytes begin like a list, an object or a string."""
    return _BEGINS_JSON(data) is not None


# -- paths that people write, such as `messages[*].metadata.email` (docs/paths.md) -------------------------------------

# Masking rules follow them through bytes, policies through the values of a call. `*` is any member, `[*]` any element,
# `[0]` the first one, `**` any depth, also none. A name with other characters is written `["a.b"]`.

EVERYTHING: Final = "**"
"""The path of the whole value."""
_NAME: Final = r"[^.\[\]\"*\\\s]+"
_PATH_STEP: Final = re.compile(
    r"""(?P<dot>\.?)(?:(?P<deep>\*\*)|(?P<any>\*)|\[(?:(?P<each>\*)|(?P<index>\d{1,9})|"(?P<quoted>(?:[^"\\]|\\.)*)")\]"""
    rf"|(?P<name>{_NAME}))"
)
_INDEX: Final = re.compile(r"[0-9]{1,9}")
_PLAIN_NAME: Final = re.compile(rf"(?!.*/){_NAME}")
Step: TypeAlias = tuple[str, str]
"""The kind of a step, and its name or index."""


class NextSteps(NamedTuple):
    """The members and elements that paths may lead to next, from some place."""

    names: tuple[str, ...]
    indexes: tuple[int, ...]
    any_member: bool
    any_element: bool


class JsonPaths:
    """Some paths, ready for use. The steps of all paths are the bits of a number, in which those are set that come
    next. So each step into a value takes a few operations, whatever the paths are."""

    def __init__(self, written: Iterable[str]) -> None:
        self.written = tuple(written)
        every = [parse_path(path) for path in self.written]
        self._said: defaultdict[str | int, int] = defaultdict(int)
        self._kinds: defaultdict[str, int] = defaultdict(int)
        self._next: dict[int, NextSteps] = {}
        self.end = begins = 0
        bit = 1
        for steps in every:
            begins |= bit
            for kind, said in steps:
                if kind in ("name", "quoted", "index"):
                    self._said[int(said) if kind == "index" else said] |= bit
                else:
                    self._kinds[kind] |= bit
                bit <<= 1
            self.end |= bit
            bit <<= 1
        self.begin = self.behind_stem = self._skipping(begins)
        alone = every[0] if len(every) == 1 else []
        self.stem = tuple(said for _, said in takewhile(lambda step: step[0] in ("name", "quoted"), alone))
        """The names before any other step, where there is one path."""
        for name in self.stem:
            self.behind_stem = self.into(self.behind_stem, name)
        self._last: tuple[Path, int] = (), self.begin
        """The last query: other values of the same list or object have the same beginning."""
        names = [_last_name(steps) for steps in every]
        self.names: tuple[bytes | None, ...] = tuple(names)
        """The last name of each path, None for a path without one: in a text without any of them no path leads
        anywhere."""
        known = b"|".join([re.escape(name) for name in names if name is not None])
        self._quoted = None if None in names else re.compile(rb"[\"'](?:%b)\\*+[\"']" % known)

    def lead_to(self, path: Path) -> bool:
        """True if one of the paths leads to a value, or to a container of it."""
        return bool(self._at(path) & self.end)

    def quoted_below(self, path: Path, text: bytes) -> bool:
        """True if one of the paths may lead into a text that should be JSON and is malformed: the text has the path's
        last name in quotes."""
        return self._at(path) != 0 and (self._quoted is None or self._quoted.search(text) is not None)

    def into(self, bits: int, step: str | int) -> int:
        """The steps that come next behind a member or an element. Those of `begin` come first, and a path has ended
        where one of `end` is among them."""
        kinds = self._kinds
        met = kinds["any"] | self._said.get(step, 0) | (kinds["each"] if isinstance(step, int) else 0)
        return self._skipping((bits & met) << 1 | bits & kinds["deep"])

    def next_steps(self, bits: int) -> NextSteps:
        """The members and elements that these steps name."""
        found = self._next.get(bits)
        if found is None:
            said = [name for name, there in self._said.items() if there & bits]
            wide = bool((self._kinds["any"] | self._kinds["deep"]) & bits)
            found = self._next[bits] = NextSteps(
                tuple(name for name in said if isinstance(name, str)),
                tuple(index for index in said if isinstance(index, int)),
                wide,
                wide or bool(self._kinds["each"] & bits),
            )
        return found

    def _at(self, path: Path) -> int:
        """The steps that come next after a path."""
        outer, bits = self._last
        if outer != path[:-1]:
            outer, bits = path[:-1], self.begin
            for step in outer:
                bits = self.into(bits, step) | bits & self.end
            self._last = outer, bits
        # A path leads to everything below its end, too.
        return self.into(bits, path[-1]) | bits & self.end if path else bits

    def _skipping(self, bits: int) -> int:
        """Adds the steps after `**`, which may match no step at all."""
        while (more := bits | (bits & self._kinds["deep"]) << 1) != bits:
            bits = more
        return bits


@lru_cache(maxsize=1024)
def compiled_paths(*written: str) -> JsonPaths:
    """The `JsonPaths` of some paths, kept: redactions ask for the same ones again."""
    return JsonPaths(written)


def parse_path(path: str) -> list[Step]:
    """The steps of a path; raises `ValueError`."""
    if not path or path.startswith("/"):
        raise ValueError(f"{path!r} is a JSON pointer and no path: write {_of_pointer(path)}{_note_of(path)}")
    steps, at = list[Step](), 0
    while at < len(path):
        found = _PATH_STEP.match(path, at)
        bracket = found is not None and path[found.end("dot")] == "["
        if found is None or bool(found["dot"]) == (bracket or not steps):
            raise ValueError(f"{path!r} is no path at {path[at:]!r}: write messages[*].content, or **.email, "
                             'and ["a b"] for a name with other characters')  # fmt: skip
        kind = found.lastgroup or ""
        steps.append((kind, re.sub(r"\\(.)", r"\1", found[kind]) if kind == "quoted" else found[kind]))
        at = found.end()
    if steps[-1][0] == "deep" and len(steps) > 1:
        raise ValueError(f"{path!r} ends with **, but a path leads to everything below it: leave .** out")
    return steps


def _of_pointer(pointer: str) -> str:
    """The path that says what a JSON pointer (RFC 6901) says."""
    made = ""
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if _INDEX.fullmatch(part):
            made += f"[{part}]"
        elif part == "*" or _PLAIN_NAME.fullmatch(name):
            made += f".{name}"
        else:
            quoted = re.sub(r'(["\\])', r"\\\1", name)
            made += f'["{quoted}"]'
    return made.removeprefix(".") or EVERYTHING


def _note_of(pointer: str) -> str:
    """The note on a number in a pointer: it is an element of a list, or the name of a member. Empty without one."""
    number = next(filter(_INDEX.fullmatch, pointer.split("/")), None)
    return "" if number is None else f', or ["{number}"] for [{number}] where that is the name of a member'


def _last_name(steps: list[Step]) -> bytes | None:
    return next((said.encode() for kind, said in reversed(steps) if kind in ("name", "quoted")), None)
