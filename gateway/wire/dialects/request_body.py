"""The body of a request as bytes: its conversation cut into items, its texts found, its model and the fields of its
form, each of which can be changed and nothing else. Pure.

A dialect says which strings are system texts or tool descriptions (`TextPointer`: raw bytes as msgspec slices them
out, and the path to them); `texts` makes sure that they can be read. Most bodies pass as they are, so that nothing is
decoded and no offset looked for before something is written (`spliced`). Then a literal that occurs only once in the
body is found by a search; one that occurs several times, or one of many, is found by walking the JSON, which is slower.

Where an object has a key twice, the last one counts, as for JSON parsers. A body that cannot be read has no places: it
passes untouched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote_plus, unquote_to_bytes

import msgspec
import orjson

from penstock.gateway.model.resource import UnreadReason
from penstock.gateway.wire.dialects.json_scan import LEAF, KeyTree, Path, elements, locate, members
from penstock.gateway.wire.dialects.loose_json import (
    UNREADABLE,
    RequestFields,
    arr,
    base_fields,
    fields_from_members,
    is_bulky,
    is_readable,
    loads,
    peek,
    repaired,
    valid_utf8,
)
from penstock.gateway.wire.dialects.parts import TEXT

# -- texts -------------------------------------------------------------------------------------------------------------

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
    """The text of a literal. The escape of half a surrogate pair stays as it is; bytes that are no UTF-8 become what
    other readers take them for (`valid_utf8`)."""
    try:
        return _text(literal)
    except UNREADABLE:
        said: str = json.loads(valid_utf8(literal))
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


# -- the model ---------------------------------------------------------------------------------------------------------

_MODEL: Final[KeyTree] = {"model": LEAF}


def replace_model(body: bytes, name: str, form_type: str = "") -> bytes:
    """The body with its top-level model name replaced; of several, the last one, which counts. Unchanged if it names
    none. `form_type`: its content type if it is a form."""
    if form_type:
        return replaced_field(body, form_type, "model", name)
    try:
        start, end = locate(body, _MODEL).get(("model",), (0, 0))
    except UNREADABLE:
        return body
    if body[start : start + 1] != b'"' or loads(body[start:end]) == name:
        return body
    return b"%b%b%b" % (body[:start], msgspec.json.encode(name), body[end:])


# -- items: the raw JSON of each, cut out without making objects of them -----------------------------------------------

# A request of common size is cut by msgspec in one pass, which also reads the fields that the summary needs. msgspec
# does not let other threads run meanwhile, so a request larger than `LARGE` is cut by `skim`, in a thread: it walks
# through the body in steps of well below a millisecond each, at a tenth of the speed.

LARGE: Final = 256 << 10
"""Bytes of a request above which msgspec would delay other calls."""
ANSWER_TYPE_SUFFIXES: Final = ("_call_output", "_approval_response", "tool_search_output")
"""Ends of the types of those items by which a client answers the model, where items have types."""
MOST_ITEMS: Final = 1 << 16
"""Most items of a conversation, and most members of a request, that are read of a large request."""
COMPACTED: Final = "compaction "
"""Begins the name of a compaction: items which have one in place of an earlier part are the whole conversation."""
T = TypeVar("T")
RequestMembers = dict[str, "msgspec.Raw | list[msgspec.Raw]"]
"""Members of a request by name: raw JSON, or for a list, the raw JSON of its items."""


class ConversationItems(NamedTuple):
    """The items of a request's conversation."""

    asked: RequestFields | None
    """The fields that the summary needs; None where nothing was read."""
    raw: list[msgspec.Raw]
    """The items as JSON objects, oldest first. They hold the whole request in memory."""
    previous: str | None = None
    """The name of the answer that the items continue (`Dialect.continuation_names`), where they are not the whole
    conversation, or begin with a compaction (`COMPACTED`)."""


def cutter(kind: type[RequestFields]) -> Callable[[bytes], tuple[RequestFields, RequestMembers]]:
    """Return a function that reads requests. `kind` extends `RequestFields` by a field for each member that belongs to
    the conversation, of type `msgspec.Raw`, a list of it, or a type that msgspec can write again."""
    decode = msgspec.json.Decoder(kind).decode
    wanted = frozenset(kind.__struct_fields__)
    names = tuple(wanted - set(RequestFields.__struct_fields__))

    def cut(body: bytes) -> tuple[RequestFields, RequestMembers]:
        if len(body) > LARGE:
            return _skimmed(body, wanted)
        try:
            asked = decode(body)
        except UNREADABLE:
            try:
                asked = repaired(decode, body)
            except UNREADABLE:
                return peek(body), {}
            # The items are taken as they stand in the body, so that the body can become a stem.
            return base_fields(asked), _skimmed(body, wanted)[1]
        values: RequestMembers = {}
        for name in names:
            if value := getattr(asked, name):
                values[name] = _raw(value)
        return base_fields(asked), values

    return cut


def _raw(value: Any) -> msgspec.Raw | list[msgspec.Raw]:
    if isinstance(value, list):
        return arr(value)
    return value if isinstance(value, msgspec.Raw) else msgspec.Raw(msgspec.json.encode(value))


def member_json(value: msgspec.Raw | list[msgspec.Raw] | None) -> bytes:
    """A member as JSON; empty where there is none."""
    if isinstance(value, list):
        return b"[" + b",".join(map(bytes, value)) + b"]"
    return b"" if value is None else bytes(value)


def _skimmed(body: bytes, names: frozenset[str]) -> tuple[RequestFields, RequestMembers]:
    try:
        found = skim(body, names)
    except ValueError:
        return peek(body), {}
    return fields_from_members(
        {name: member_json(found.pop(name)) for name in RequestFields.__struct_fields__ if name in found}
    ), found


def skim(body: bytes, names: frozenset[str]) -> RequestMembers:
    """The members of a JSON object that have these names; raises `ValueError` where the body is no object. The text
    between its brackets is not checked."""
    if is_bulky(body):
        raise ValueError("it holds more than is read")
    found: RequestMembers = {}
    view = memoryview(body)
    for name, at, end in _bounded(members(body)):
        if name in names:
            listed = body[at] == 0x5B
            cut = [msgspec.Raw(view[a:b]) for a, b in (_bounded(elements(body, at)) if listed else [(at, end)])]
            found[name] = cut if listed else cut[0]
    return found


def _bounded(parts: Iterator[T]) -> Iterator[T]:
    """Limit parts to `MOST_ITEMS`, since the same thread reads the next requests; raises `ValueError` beyond."""
    for number, part in enumerate(parts):
        if number == MOST_ITEMS:
            raise ValueError(f"it holds more than {MOST_ITEMS} items")
        yield part


# -- forms: `multipart/form-data`, with which files are sent, and `application/x-www-form-urlencoded` ------------------

# Only the fields' places are looked for, in one search for the boundary: a file of 100 MB takes some 10 to 50 ms. A
# form that names a field twice with different values, or cannot be read, has no certain value: servers differ.

MULTIPART: Final = "multipart/form-data"
URLENCODED: Final = "application/x-www-form-urlencoded"
UNCLEAR: Final = ("unclear",)
"""Stands for a value that is uncertain: a form names the field twice, or cannot be read."""
_BOUNDARY: Final = re.compile(r';\s*boundary\s*=\s*(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_FIRST_LINE: Final = re.compile(rb'(?:\r?\n)?--([^\r\n"]{1,200}?)[ \t]*\r?\n')
_DISPOSITION: Final = re.compile(rb"(?:^|\n)content-disposition:([^\r\n]*)", re.IGNORECASE)
_TYPE: Final = re.compile(rb"(?:^|\n)content-type:[ \t]*([^\r\n;]*)", re.IGNORECASE)


def _parameter(name: bytes) -> re.Pattern[bytes]:
    """Matches a parameter of a part. What is in the quotes of another one is none."""
    other = rb'(?:[^";]|"(?:[^"\\]|\\.)*"|;(?!\s*%b\s*=))*' % name
    return re.compile(other + rb';\s*%b\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))' % name, re.IGNORECASE)


_NAME: Final = _parameter(b"name")
_FILE: Final = _parameter(rb"filename\*?")
_AFTER: Final = re.compile(rb"(--)|[ \t]*\r?\n")
_HEADERS_END: Final = re.compile(rb"\r?\n\r?\n|\A\r?\n")
_HEADERS: Final = 16 << 10
_PARTS: Final = 1000
_LONGEST: Final = 1 << 20
"""Most bytes of an urlencoded form, and of a field, that are read."""
_READ: Final = ("model", "n")


class FormField(NamedTuple):
    """A field, and the offsets of its value."""

    name: str
    start: int
    end: int
    kind: str = ""
    """The content type of a part, in lower case and without parameters; empty if it has none."""
    file: str | None = None
    """The name of the file that a part is; None if it is none."""


def is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() in (MULTIPART, URLENCODED)


def form_type(body: bytes) -> str | None:
    """The content type of a body that is a form with files, by its first line; None for any other body."""
    found = _FIRST_LINE.match(body)
    return None if found is None else f'{MULTIPART}; boundary="{found[1].decode("latin-1")}"'


def peek_form(body: bytes, content_type: str) -> RequestFields:
    """Read from a form the fields that the summary needs."""
    said: dict[str, Any] = {}
    try:
        for one in form_fields(body, content_type):
            if one.name in _READ:
                value = _value(body, one, content_type)
                said[one.name] = value if said.get(one.name, value) == value else UNCLEAR
    except ValueError:
        return RequestFields(model=UNCLEAR)
    return RequestFields(**said)


def replaced_field(body: bytes, content_type: str, name: str, value: str) -> bytes:
    """A form with another value of a field and every other byte unchanged; the same form if it has no such field."""
    new = quote_plus(value).encode() if _is_urlencoded(content_type) else value.encode()
    pieces, view, done = list[bytes | memoryview](), memoryview(body), 0
    try:
        for one in form_fields(body, content_type):
            if one.name == name:
                pieces += (view[done : one.start], new)
                done = one.end
    except ValueError:
        return body
    return b"".join([*pieces, view[done:]]) if pieces else body


def form_fields(body: bytes, content_type: str) -> Iterator[FormField]:
    """The fields of a form, files among them; raises `ValueError` if the body is no form."""
    return _pairs(body) if _is_urlencoded(content_type) else _parts(body, content_type)


def _is_urlencoded(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == URLENCODED


def _pairs(body: bytes) -> Iterator[FormField]:
    if len(body) > _LONGEST or body.count(b"&") > _PARTS:
        raise ValueError("the form is too long to be read")
    if body.lstrip()[:1] == b"{":
        raise ValueError("it is JSON, and some servers read it as that")
    at = 0
    for pair in body.split(b"&"):
        name, _, _ = pair.partition(b"=")
        yield FormField(_plus(name), min(at + len(name) + 1, at + len(pair)), at + len(pair))
        at += len(pair) + 1


def _parts(body: bytes, content_type: str) -> Iterator[FormField]:
    found = {one[1] or one[2] for one in _BOUNDARY.finditer(content_type)}
    if len(found) != 1:
        raise ValueError("its content type has no boundary, or several")
    mark = b"--" + found.pop().encode("latin-1")
    at = 0 if body.startswith(mark) else _next(body, mark, 0)[1]
    for _ in range(_PARTS):
        after = _AFTER.match(body, at + len(mark))
        if after is None:
            raise ValueError("a part does not begin")
        if after[1]:
            return
        head = _HEADERS_END.search(body, after.end() - 1, after.end() + _HEADERS)
        if head is None:
            raise ValueError("the headers of a part do not end")
        end, at = _next(body, mark, head.end())
        yield _field(body[after.end() : head.start()], head.end(), end)
    raise ValueError("it has too many parts")


def _next(body: bytes, mark: bytes, at: int) -> tuple[int, int]:
    """(end of a part, offset of the boundary behind it); raises `ValueError` where there is none."""
    while (found := body.find(b"\n" + mark, max(at - 1, 0))) >= 0:
        if _AFTER.match(body, found + 1 + len(mark)) is not None:
            return max(at, found - (body[found - 1 : found] == b"\r")), found + 1
        at = found + 2
    raise ValueError("the form ends early")


def _field(head: bytes, start: int, end: int) -> FormField:
    disposition, kind = _DISPOSITION.search(head), _TYPE.search(head)
    said = b"" if disposition is None else disposition[1]
    name, file = _NAME.match(said), _FILE.match(said)
    if name is None and b'"' in said:
        raise ValueError("the name of a part cannot be read")
    told = "" if kind is None else kind[1].decode("latin-1").strip().lower()
    return FormField(_unquoted(name) or "", start, end, told, _unquoted(file))


def _unquoted(found: re.Match[bytes] | None) -> str | None:
    if found is None:
        return None
    said = found[2] if found[1] is None else re.sub(rb"\\(.)", rb"\1", found[1])
    return said.decode("utf-8", "replace")


def _value(body: bytes, one: FormField, content_type: str) -> Any:
    said = body[one.start : one.end]
    if len(said) > _LONGEST:
        return UNCLEAR
    return _plus(said) if _is_urlencoded(content_type) else said.decode("utf-8", "replace")


def _plus(said: bytes) -> str:
    return unquote_to_bytes(said.replace(b"+", b" ")).decode("utf-8", "replace")
