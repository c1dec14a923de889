"""Reads the lists of a server, and restores the approved definitions in them. Pure.

A definition (of a tool, a prompt, a resource) is known by the SHA-256 of its canonical JSON: keys sorted, no spaces,
ASCII only. A list is known by the names and fingerprints in it, in any order. Its pages are parts of one list, and each
page can be compared with the approved list without the others.

An answer is read strictly, because two readers might take different texts for that of a tool: a duplicate key, an
invalid number or bytes that are not UTF-8 make it unreadable. Numbers keep their digits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec

from penstock.gateway.model.tools import DefinitionKind
from penstock.gateway.wire.dialects.loose_json import AmbiguousJsonError, lenient, unambiguous

LISTS: Final[dict[str, tuple[DefinitionKind, str, str]]] = {
    "tools/list": ("tools", "tools", "name"),
    "prompts/list": ("prompts", "prompts", "name"),
    "resources/list": ("resources", "resources", "uri"),
    "resources/templates/list": ("templates", "resourceTemplates", "uriTemplate"),
    "initialize": ("instructions", "instructions", ""),
    "server/discover": ("instructions", "instructions", ""),
}
"""Requests whose answers contain definitions: their kind, the field of the result, and the field with the name."""
LARGEST: Final = 16 << 20
"""Maximum number of bytes of an answer that is read."""
_INSTRUCTIONS: Final = "instructions"


class _ListResult(msgspec.Struct):
    tools: msgspec.Raw = msgspec.Raw()
    prompts: msgspec.Raw = msgspec.Raw()
    resources: msgspec.Raw = msgspec.Raw()
    resourceTemplates: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()


class _ListAnswer(msgspec.Struct):
    result: _ListResult | None = None


_answer = lenient(_ListAnswer)


class UnreadableMessage(Exception):
    """An answer that different readers may understand differently, or not at all; the message says why."""


class Definition(NamedTuple):
    """A definition: its text and fingerprint."""

    fingerprint: str
    text: str
    """Its canonical JSON."""


class DefinitionPage(NamedTuple):
    """The definitions on one page of a list."""

    kind: DefinitionKind
    items: dict[str, Definition]
    """The definitions by name."""
    more: str | None
    """The cursor of the next page; None on the last one."""


class DefinitionChange(NamedTuple):
    """A difference between two lists, or between a list and the approved one."""

    what: Literal["new", "changed", "removed"]
    name: str


class ApprovedAnswer(NamedTuple):
    """An answer that contains approved definitions only."""

    answer: bytes
    """The bytes of the answer; the very same object if nothing differed."""
    changes: list[DefinitionChange]
    """The definitions in which the server's own answer differs."""


def canonical(value: Any) -> str:
    """JSON text that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def fingerprint(text: str) -> str:
    """SHA-256 of a text; hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def list_fingerprint(items: Mapping[str, str]) -> str:
    """The fingerprint of a list from those of its definitions, in any order."""
    return fingerprint(canonical(dict(items)))


def fingerprints(items: Mapping[str, Definition]) -> dict[str, str]:
    """The fingerprints of definitions, by name."""
    return {name: item.fingerprint for name, item in items.items()}


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[DefinitionChange]:
    """The differences between two lists, by name."""
    found = [DefinitionChange("removed", name) for name in before.keys() - after.keys()]
    found += [DefinitionChange("new", name) for name in after.keys() - before.keys()]
    found += [DefinitionChange("changed", name) for name in before.keys() & after.keys() if before[name] != after[name]]
    return sorted(found, key=lambda change: (change.name, change.what))


def method_of_answer(answer: bytes) -> str | None:
    """A request that the answer could be to, found by the list in it; None for an answer without a list."""
    result = _answer(answer).result or _ListResult()
    found = (method for method, (_, field, _) in LISTS.items() if bytes(getattr(result, field)))
    return next(found, None)


def read_page(method: str, answer: bytes) -> DefinitionPage | None:
    """The definitions in an answer; None for an error, which has none. Raises `UnreadableMessage`."""
    document = _document(answer)
    result = document.get("result")
    if result is None and "error" in document:
        return None
    kind, field, _ = LISTS[method]
    found = _items(method, _object(result, "result"), field)
    return DefinitionPage(kind, {name: item for name, item, _ in found}, _more(result))


def restrict_to_approved(method: str, answer: bytes, approved: Mapping[str, Definition]) -> ApprovedAnswer | None:
    """An answer in which every definition is the approved one: changed ones get the approved text, new ones are left
    out. Definitions that the server has no more are left out too: calling them would fail. None for an error. Raises
    `UnreadableMessage`."""
    document = _document(answer)
    result = document.get("result")
    if result is None and "error" in document:
        return None
    _, field, _ = LISTS[method]
    result, served, different = _object(result, "result"), list[Any](), list[DefinitionChange]()
    for name, item, value in _items(method, result, field):
        known = approved.get(name)
        if known is None:
            different.append(DefinitionChange("new", name))
        elif known.fingerprint != item.fingerprint:
            different.append(DefinitionChange("changed", name))
            served.append(json.loads(known.text))
        else:
            served.append(value)
    if not different:
        return ApprovedAnswer(answer, [])
    if field != _INSTRUCTIONS:
        result[field] = served
    elif served:
        result[field] = served[0]
    else:
        del result[field]
    return ApprovedAnswer(json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode(), different)


def requested_name(method: str, request: bytes) -> str | None:
    """The tool, prompt or resource that a request names; None without a name. Raises `UnreadableMessage`."""
    document = _document(request)
    name = _object(document.get("params"), "params").get("uri" if method == "resources/read" else "name")
    return name if isinstance(name, str) else None


def cursor_of(request: bytes) -> str | None:
    """The cursor of the page that a request asks for; None for the first page, or if the request cannot be read."""
    try:
        cursor = _object(_document(request).get("params"), "params").get("cursor")
    except UnreadableMessage:
        return None
    return cursor if isinstance(cursor, str) else None


def _document(answer: bytes) -> dict[str, Any]:
    if len(answer) > LARGEST:
        raise UnreadableMessage(f"it has {len(answer):,} bytes; at most {LARGEST:,} are read")
    try:
        return _object(unambiguous(answer), "the answer")
    except AmbiguousJsonError as ambiguous:
        raise UnreadableMessage(str(ambiguous)) from None


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnreadableMessage(f"{what} is no object")
    return cast("dict[str, Any]", value)


def _more(result: Any) -> str | None:
    """The cursor of the next page. A cursor that is no string counts as none."""
    cursor = result.get("nextCursor")
    return cursor if isinstance(cursor, str) else None


def _items(method: str, result: dict[str, Any], field: str) -> Iterable[tuple[str, Definition, Any]]:
    """(name, definition, value in the answer) of each definition."""
    value = result.get(field)
    if field == _INSTRUCTIONS:
        if value is None:
            return []
        if not isinstance(value, str):
            raise UnreadableMessage("its instructions are no text")
        return [("", _item(value), value)]
    if not isinstance(value, list):
        raise UnreadableMessage(f"result.{field} is no list")
    found = [(_name(one, method, place), _item(one), one) for place, one in enumerate(cast("list[Any]", value))]
    if len({name for name, _, _ in found}) < len(found):
        names = [name for name, _, _ in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise UnreadableMessage(f"{twice!r} stands twice in result.{field}")
    return found


def _item(value: Any) -> Definition:
    try:
        text = canonical(value)
    except ValueError as error:
        raise UnreadableMessage(f"a number in it is too large: {error}") from None
    return Definition(fingerprint(text), text)


def _name(value: Any, method: str, place: int) -> str:
    _, field, key = LISTS[method]
    name = _object(value, f"result.{field}[{place}]").get(key)
    if not isinstance(name, str) or not name:
        raise UnreadableMessage(f"result.{field}[{place}].{key} is no text")
    if not name.isascii() and any("\ud800" <= one <= "\udfff" for one in name):
        raise UnreadableMessage(f"result.{field}[{place}].{key} has half a surrogate pair")
    return name
