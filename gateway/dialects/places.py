"""Where texts stand in a request: the bytes of JSON string literals, so that one can be changed and nothing else.

A dialect says which strings are system texts or tool descriptions (`Quoted`: raw bytes as msgspec slices them out,
and the path to them). `located` finds their offsets. A literal that stands only once in the body is there; one that
stands several times, or one of many, is walked to, which is slower. Where a key stands twice in an object the last
one counts, as it does for JSON parsers. A body that cannot be read has no places: it passes untouched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from gateway.dialects.parts import TEXT
from gateway.dialects.wire import UNREADABLE

Role: TypeAlias = Literal["system", "developer", "tool"]
Path: TypeAlias = tuple[str | int, ...]
Tree: TypeAlias = dict[str | int, "Tree"]

SYSTEM = ("system", "developer")
FEW = 8
"""Literals that are searched for one by one; more are walked to in one pass."""
_ENOUGH = 256
"""Bytes of a literal that tell it from other text."""
_QUOTE = ord('"')
_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_scan = json.JSONDecoder().raw_decode
_text = msgspec.json.Decoder(str).decode


@dataclass(frozen=True, slots=True)
class Place:
    """A text of a request and where it stands."""

    start: int
    """Offset of the literal's opening quote in the body; bytes."""
    end: int
    """Offset behind its closing quote; bytes."""
    text: str
    """What the literal says."""
    role: Role
    """Whose text it is."""
    index: int
    """Its number among those found, from 0."""
    name: str | None = None
    """The tool that it describes."""


class Quoted(NamedTuple):
    """A string that a dialect points at."""

    raw: msgspec.Raw
    path: Path
    role: Role
    name: str | None = None


class Block(msgspec.Struct):
    """A part of a message's content."""

    type: Any = None
    text: msgspec.Raw = msgspec.Raw()


class Item(msgspec.Struct):
    """A message, of which only system texts are looked into."""

    role: Any = None
    content: msgspec.Raw = msgspec.Raw()


class Described(msgspec.Struct):
    """A tool, or what holds its name and description."""

    name: Any = None
    description: msgspec.Raw = msgspec.Raw()


class Offers(msgspec.Struct):
    """The tools of an API that writes them without an envelope."""

    tools: list[Described] | None = None


_blocks = msgspec.json.Decoder(list[Block]).decode
_offers = msgspec.json.Decoder(Offers).decode


def quoted_items(items: Iterable[Item] | None, key: str) -> Iterator[Quoted]:
    """The system and developer texts of a list of messages under a key of the request."""
    for at, item in enumerate(items or ()):
        if item.role in SYSTEM:
            yield from quoted_content(item.content, (key, at, "content"), item.role)


def quoted_content(content: msgspec.Raw, path: Path, role: Role) -> Iterator[Quoted]:
    """The texts of a content: a string, or a list of typed blocks."""
    if bytes(memoryview(content)[:1]) != b"[":
        yield from quoted_text(content, path, role)
        return
    for at, block in enumerate(_blocks(content)):
        if block.type in TEXT:
            yield from quoted_text(block.text, (*path, at, "text"), role)


def quoted_text(raw: msgspec.Raw, path: Path, role: Role) -> Iterator[Quoted]:
    """A string that is not empty."""
    if _says(raw):
        yield Quoted(raw, path, role)


def quoted_tool(tool: Described | None, path: Path) -> Iterator[Quoted]:
    """The description of a tool that has a name."""
    if tool is not None and isinstance(tool.name, str) and _says(tool.description):
        yield Quoted(tool.description, (*path, "description"), "tool", tool.name)


def quoted_tools(request: bytes) -> Iterator[Quoted]:
    """The descriptions of tools that are written without an envelope."""
    for at, tool in enumerate(_offers(request).tools or ()):
        yield from quoted_tool(tool, ("tools", at))


def _says(raw: msgspec.Raw) -> bool:
    """Whether it is a string, and not an empty one."""
    view = memoryview(raw)
    return len(view) > 2 and view[0] == _QUOTE


def located(body: bytes, find: Callable[[bytes], Iterable[Quoted]]) -> list[Place]:
    """The places of what `find` finds in a body, in its order."""
    try:
        body_read, found = _found(body, find)
        spans = _spans(body_read, found)
        return [
            Place(start, end, decoded(body[start:end]), it.role, index, it.name)
            for index, ((start, end), it) in enumerate(zip(spans, found, strict=True))
        ]
    except UNREADABLE:
        return []


def _found(body: bytes, find: Callable[[bytes], Iterable[Quoted]]) -> tuple[bytes, list[Quoted]]:
    """The literals, and the bytes that they were found in."""
    try:
        return body, list(find(body))
    except UNREADABLE:
        # Half a surrogate pair is JSON that JavaScript writes and msgspec refuses: it looks at as many other bytes.
        covered = _SURROGATE.sub(rb"\\ufffd", body)
        if covered == body:
            raise
        return covered, list(find(covered))


def _spans(body: bytes, found: list[Quoted]) -> list[tuple[int, int]]:
    spans = [_only(body, bytes(it.raw)) for it in found] if len(found) <= FEW else [None]
    if None not in spans:
        return [span for span in spans if span is not None]
    tree: Tree = {}
    for literal in found:
        branch = tree
        for step in literal.path:
            branch = branch.setdefault(step, {})
    walked: dict[Path, tuple[int, int]] = {}
    _walk(body.decode("latin-1"), 0, tree, (), walked)  # One character a byte: offsets are the same in both.
    return [walked[literal.path] for literal in found]


def _only(body: bytes, raw: bytes) -> tuple[int, int] | None:
    """Where a literal stands; None if it, or what it begins with, stands in more places than one."""
    start = body.find(raw[:_ENOUGH])  # Preparing the search for a long one takes longer than the search.
    return (start, start + len(raw)) if body.find(raw[:_ENOUGH], start + 1) < 0 else None


def _walk(body: str, at: int, tree: Tree, path: Path, found: dict[Path, tuple[int, int]]) -> int:
    """Notes the spans of a tree's leaves in the value at an offset; the offset behind that value. ValueError on bytes
    that are no JSON."""
    start = _past(body, at)
    if not tree or body[start] not in "{[":
        end = _scan(body, start)[1]
        found[path] = (start, end)
        return end
    at, count = _past(body, start + 1), 0
    while body[at] not in "}]":
        key: str | int = count
        if body[start] == "{":
            key, at = _scan(body, at)
            at = _past(body, at) + 1
        at = _past(body, _walk(body, at, tree.get(key, {}), (*path, key), found))
        at, count = (_past(body, at + 1) if body[at] == "," else at), count + 1
    return at + 1


def _past(body: str, at: int) -> int:
    """The offset behind white space."""
    space = _SPACE.match(body, at)
    return at if space is None else space.end()


def decoded(literal: bytes) -> str:
    """What a literal says; half a surrogate pair stays half a pair."""
    try:
        return _text(literal)
    except UNREADABLE:
        said: str = json.loads(literal)
        return said


def encoded(text: str) -> bytes:
    """A text as a JSON string with no more escapes than JSON asks for, and one for each half of a surrogate pair."""
    try:
        return msgspec.json.encode(text)
    except ValueError:
        return json.dumps(text, ensure_ascii=False).encode("utf-8", "backslashreplace")


def spliced(body: bytes, texts: Iterable[tuple[Place, str]]) -> bytes:
    """The body with new texts in some of its places; everything else is as it was, byte for byte."""
    pieces: list[bytes | memoryview] = []
    view, at = memoryview(body), 0
    for place, text in sorted(texts, key=lambda it: it[0].start):
        pieces += [view[at : place.start], encoded(text)]
        at = place.end
    return b"".join([*pieces, view[at:]])
