"""Finds byte ranges of values in a JSON text, so that some can be replaced and every other byte stays. Pure.

`find` walks along a tree of keys. Values that are not in the tree are skipped by the standard library's scanner, which
is C and linear, and which refuses JSON that is nested too deep. The bytes are read as Latin-1, one character a byte, so
that offsets are the same in both; JSON's own characters are ASCII. A key that occurs twice is found twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, cast

from penstock.gateway.wire.dialects.loose_json import UNREADABLE, repaired

KeyTree: TypeAlias = Mapping[str, "KeyTree"]
"""Keys to look for in an object, each with the tree below it; an empty tree (`LEAF`) stands for the value itself."""

LEAF: Final[KeyTree] = {}
_WS = r"[ \t\n\r]*"
_KEY = r'"([^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*)"' + _WS + ":" + _WS
_FIRST = re.compile(rf"\{{{_WS}(?:{_KEY}|\}})")
"""The beginning of an object up to its first value, or an object without members."""
_MEMBER = re.compile(_WS + rf"(?:,{_WS}{_KEY}|\}})")
"""The text between a value and the next one, or the end of the object."""
_NEXT = re.compile(_WS + r"([,\]])" + _WS)
_OPEN = re.compile(r"\[" + _WS)
_START, _END = re.compile(_WS + r"(?=\{)"), re.compile(_WS + r"\Z")
_scan: Callable[[str, int], tuple[Any, int]] = cast(Any, json.JSONDecoder()).scan_once
"""The C function below `raw_decode`: (value, offset behind it). StopIteration where no value begins."""


class JsonRange(NamedTuple):
    """A value and its place in the text."""

    path: tuple[str, ...]
    """The keys that lead to it."""
    start: int
    """Offset of its first byte."""
    end: int
    """Offset behind its last one."""
    value: Any
    """The parsed value; the characters of its strings are bytes."""


def find(body: bytes, tree: KeyTree) -> list[JsonRange]:
    """The values at the tree's leaves, in the order of the bytes. A list above a leaf is searched object by object.
    Raises one of `wire.UNREADABLE` unless the body is one JSON object and nothing else."""
    try:
        return _found(body, tree)
    except UNREADABLE:
        return repaired(lambda made: _found(made, tree), body)


def _found(body: bytes, tree: KeyTree) -> list[JsonRange]:
    text, found = body.decode("latin-1"), list[JsonRange]()
    start = _START.match(text)
    try:
        if start is not None and _END.match(text, _object(text, start.end(), tree, (), found)):
            return found
    except StopIteration:
        pass
    raise ValueError("not one JSON object")


def _object(text: str, at: int, tree: KeyTree, path: tuple[str, ...], found: list[JsonRange]) -> int:
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


def _array(text: str, at: int, tree: KeyTree, path: tuple[str, ...], found: list[JsonRange]) -> int:
    """Walk through the objects of the list at an offset; return the offset behind it."""
    at, more = _opened(text, at)
    while more:
        inside = text.startswith("{", at)
        at, more = _next(text, _object(text, at, tree, path, found) if inside else _scan(text, at)[1])
    return at


def _value(text: str, at: int, tree: KeyTree, path: tuple[str, ...], found: list[JsonRange]) -> int:
    """Note the value at an offset, or walk through it; return the offset behind it."""
    if tree and text.startswith("{", at):
        return _object(text, at, tree, path, found)
    if tree and text.startswith("[", at):
        return _array(text, at, tree, path, found)
    value, end = _scan(text, at)
    if tree is LEAF:
        found.append(JsonRange(path, at, end, value))
    return end


def _opened(text: str, at: int) -> tuple[int, bool]:
    """(offset behind the bracket of a list, whether anything follows before the closing one)."""
    match = _OPEN.match(text, at)
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
