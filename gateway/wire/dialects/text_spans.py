"""The places of texts in a request: the bytes of JSON string literals, so that one can be changed and nothing else.

A dialect says which strings are system texts or tool descriptions (`TextPointer`: raw bytes as msgspec slices them
out, and the path to them); `texts` makes sure that they can be read. Most bodies pass as they are, so that nothing is
decoded and no offset looked for before something is written (`spliced`). Then a literal that occurs only once in the
body is found by a search; one that occurs several times, or one of many, is found by walking the JSON, which is slower.

Where an object has a key twice, the last one counts, as for JSON parsers. A body that cannot be read has no places: it
passes untouched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import orjson

from penstock.gateway.model.resource import UnreadReason
from penstock.gateway.wire.dialects.json_scan import Path, locate
from penstock.gateway.wire.dialects.loose_json import UNREADABLE, RequestFields, base_fields, is_readable, repaired
from penstock.gateway.wire.dialects.parts import TEXT

Role: TypeAlias = Literal["system", "developer", "tool"]

SYSTEM = ("system", "developer")
FEW = 8
"""Most literals that are searched for one by one; more are found in one walk."""
_ENOUGH = 256
"""Bytes of a literal that are enough to tell it from other text."""
_QUOTE = ord('"')
_text = msgspec.json.Decoder(str).decode


@dataclass(frozen=True, slots=True)
class TextLocation:
    """A text of a request and its place."""

    literal: bytes
    """The text as it is written, quotes included: valid JSON in UTF-8."""
    path: Path
    """The keys and indexes that lead to the text."""
    role: Role
    """The role of its message; `tool` for a description."""
    index: int
    """Its number among the texts of the request, from 0."""
    name: str | None = None
    """The tool that the text describes."""

    @property
    def text(self) -> str:
        """The decoded text; decoded at each access."""
        return decoded(self.literal)


class TextPointer(NamedTuple):
    """A string that a dialect points at."""

    raw: msgspec.Raw
    path: Path
    role: Role
    name: str | None = None


TextPointers: TypeAlias = "tuple[Iterable[TextPointer], RequestFields | None]"
"""The strings that a dialect points at in a request, and the other fields that it has read."""


class RequestTexts(NamedTuple):
    """The texts of a request."""

    places: list[TextLocation]
    """The texts in the order of the wire format; none if the body cannot be read."""
    asked: RequestFields | None = None
    """The other fields that were read on the way."""
    unread: UnreadReason | None = None
    """Why the body cannot be read; None if it can."""


class TextBlock(msgspec.Struct):
    """A part of a message's content."""

    type: Any = None
    text: msgspec.Raw = msgspec.Raw()


class MessageFields(msgspec.Struct, gc=False):
    """A message, of which only the system texts are read. There are hundreds, without cycles."""

    role: Any = None
    content: msgspec.Raw = msgspec.Raw()


class ToolDescription(msgspec.Struct):
    """A tool, or the object that holds its name and description."""

    name: Any = None
    description: msgspec.Raw = msgspec.Raw()


class FlatToolFields(msgspec.Struct):
    """The tools of an API that writes them without an envelope."""

    tools: list[ToolDescription] | None = None


_blocks = msgspec.json.Decoder(list[TextBlock]).decode
_offers = msgspec.json.Decoder(FlatToolFields).decode


def message_pointers(items: Iterable[MessageFields] | None, key: str) -> Iterator[TextPointer]:
    """Point at the system and developer texts in a list of messages under a key of the request."""
    for at, item in enumerate(items or ()):
        if item.role in SYSTEM:
            yield from content_pointers(item.content, (key, at, "content"), item.role)


def content_pointers(content: msgspec.Raw, path: Path, role: Role) -> Iterator[TextPointer]:
    """Point at the texts of a content: a string, or a list of typed blocks."""
    if bytes(memoryview(content)[:1]) != b"[":
        yield from text_pointers(content, path, role)
        return
    for at, block in enumerate(_blocks(content)):
        if isinstance(block.type, str) and block.type in TEXT:
            yield from text_pointers(block.text, (*path, at, "text"), role)


def text_pointers(raw: msgspec.Raw, path: Path, role: Role) -> Iterator[TextPointer]:
    """Point at a string that is not empty."""
    if _says(raw):
        yield TextPointer(raw, path, role)


def tool_pointers(tool: ToolDescription | None, path: Path) -> Iterator[TextPointer]:
    """Point at the description of a tool that has a name."""
    if tool is not None and isinstance(tool.name, str) and _says(tool.description):
        yield TextPointer(tool.description, (*path, "description"), "tool", tool.name)


def flat_tool_pointers(request: bytes) -> Iterator[TextPointer]:
    """Point at the descriptions of tools that are written without an envelope."""
    for at, tool in enumerate(_offers(request).tools or ()):
        yield from tool_pointers(tool, ("tools", at))


def _says(raw: msgspec.Raw) -> bool:
    """True for a string that is not empty."""
    view = memoryview(raw)
    return len(view) > 2 and view[0] == _QUOTE


def texts(body: bytes, find: Callable[[bytes], TextPointers]) -> RequestTexts:
    """The texts that `find` points at in a body, in its order."""
    try:
        found, asked = _found(body, find)
        places = [TextLocation(_utf8(raw), it.path, it.role, at, it.name) for at, (raw, it) in enumerate(found)]
        return RequestTexts(places, asked and base_fields(asked))
    except UNREADABLE:
        return RequestTexts([], unread=unreadable_reason(body))


def unreadable_reason(body: bytes) -> UnreadReason:
    """Why a body cannot be read."""
    try:
        said = body.decode("utf-8-sig")
    except UnicodeDecodeError:
        return "utf8" if body.lstrip()[:1] in (b"{", b"[") else "encoding"
    try:
        if is_readable(body) or not isinstance(json.loads(said), dict):
            return "shape"
    except RecursionError:
        return "depth"
    except ValueError:
        return "json"
    return "depth"


def _found(
    body: bytes, find: Callable[[bytes], TextPointers]
) -> tuple[list[tuple[bytes, TextPointer]], RequestFields | None]:
    """The literals as they stand in the body, and the other fields that were read."""
    try:
        pointed, asked = find(body)
        return [(bytes(it.raw), it) for it in pointed], asked
    except UNREADABLE:
        return repaired(lambda made: _located(body, made, find), body)


def _located(
    body: bytes, made: bytes, find: Callable[[bytes], TextPointers]
) -> tuple[list[tuple[bytes, TextPointer]], RequestFields | None]:
    """The same as `_found`, through a copy of the body that can be read."""
    pointed, asked = find(made)
    found = list(pointed)
    where = _spans(made, [(bytes(it.raw), it.path) for it in found])
    return [(body[start:end], it) for (start, end), it in zip(where, found, strict=True)], asked


def _utf8(literal: bytes) -> bytes:
    """The literal itself; raises ValueError where it is not UTF-8, the one thing in it that msgspec does not check."""
    if not literal.isascii():
        _ = literal.decode()
    return literal


def spans(body: bytes, places: Iterable[TextLocation]) -> list[tuple[int, int]]:
    """The offsets of places in their body, in bytes: that of the opening quote and that after the closing one. Raises
    `ValueError` where a place is not in the body."""
    return _spans(body, [(place.literal, place.path) for place in places])


def _spans(body: bytes, literals: list[tuple[bytes, Path]]) -> list[tuple[int, int]]:
    found = [_only(body, raw) for raw, _ in literals] if len(literals) <= FEW else [None]
    if None not in found:
        return [span for span in found if span is not None]
    tree: dict[str | int, Any] = {}
    for _, path in literals:
        branch = tree
        for step in path:
            branch = branch.setdefault(step, {})
    places = locate(body, tree)
    if not places.keys() >= {path for _, path in literals}:
        raise ValueError("a text does not stand where it was found")
    return [places[path] for _, path in literals]


def _only(body: bytes, raw: bytes) -> tuple[int, int] | None:
    """The offsets of a literal; None if it, or its beginning, occurs more than once."""
    start = body.find(raw[:_ENOUGH])  # Preparing the search for a long literal takes longer than it.
    return (start, start + len(raw)) if body.find(raw[:_ENOUGH], start + 1) < 0 else None


def decoded(literal: bytes) -> str:
    """The text of a literal; half a surrogate pair stays as it is."""
    try:
        return _text(literal)
    except UNREADABLE:
        said: str = json.loads(literal)
        return said


def encoded(text: str) -> bytes:
    """A text as a JSON string with no more escapes than JSON requires, and one for each half surrogate pair."""
    try:
        return orjson.dumps(text)  # A fifth of msgspec's time; for decoding msgspec is the faster one.
    except orjson.JSONEncodeError:
        return json.dumps(text, ensure_ascii=False).encode("utf-8", "backslashreplace")


def spliced(body: bytes, literals: Iterable[tuple[TextLocation, bytes]]) -> bytes:
    """The body with new literals in some of its places; every other byte is unchanged. Raises as `spans` does."""
    new = list(literals)
    pieces: list[bytes | memoryview] = []
    view, at = memoryview(body), 0
    where = spans(body, [place for place, _ in new])
    for (start, end), (_, literal) in sorted(zip(where, new, strict=True), key=lambda it: it[0]):
        pieces += [view[at:start], literal]
        at = end
    return b"".join([*pieces, view[at:]])
