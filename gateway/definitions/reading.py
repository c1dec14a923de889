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

from penstock.gateway.dialects.loose_json import lenient
from penstock.gateway.model.definitions import Kind

LISTS: Final[dict[str, tuple[Kind, str, str]]] = {
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


class _Result(msgspec.Struct):
    tools: msgspec.Raw = msgspec.Raw()
    prompts: msgspec.Raw = msgspec.Raw()
    resources: msgspec.Raw = msgspec.Raw()
    resourceTemplates: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()


class _Answer(msgspec.Struct):
    result: _Result | None = None


_answer = lenient(_Answer)


class Unreadable(Exception):
    """An answer that different readers may understand differently, or not at all; the message says why."""


class Item(NamedTuple):
    """A definition: its text and fingerprint."""

    fingerprint: str
    text: str
    """Its canonical JSON."""


class Listed(NamedTuple):
    """The definitions on one page of a list."""

    kind: Kind
    items: dict[str, Item]
    """The definitions by name."""
    more: str | None
    """The cursor of the next page; None on the last one."""


class Change(NamedTuple):
    """A difference between two lists, or between a list and the approved one."""

    what: Literal["new", "changed", "removed"]
    name: str


class Held(NamedTuple):
    """An answer that contains approved definitions only."""

    answer: bytes
    """The bytes of the answer; the very same object if nothing differed."""
    changes: list[Change]
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


def fingerprints(items: Mapping[str, Item]) -> dict[str, str]:
    """The fingerprints of definitions, by name."""
    return {name: item.fingerprint for name, item in items.items()}


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    """The differences between two lists, by name."""
    found = [Change("removed", name) for name in before.keys() - after.keys()]
    found += [Change("new", name) for name in after.keys() - before.keys()]
    found += [Change("changed", name) for name in before.keys() & after.keys() if before[name] != after[name]]
    return sorted(found, key=lambda change: (change.name, change.what))


def lists(answer: bytes) -> str | None:
    """A request that the answer could be to, found by the list in it; None for an answer without a list."""
    result = _answer(answer).result or _Result()
    found = (method for method, (_, field, _) in LISTS.items() if bytes(getattr(result, field)))
    return next(found, None)


def read(method: str, answer: bytes) -> Listed | None:
    """The definitions in an answer; None for an error, which has none. Raises `Unreadable`."""
    document = _document(answer)
    result = document.get("result")
    if result is None and "error" in document:
        return None
    kind, field, _ = LISTS[method]
    found = _items(method, _object(result, "result"), field)
    return Listed(kind, {name: item for name, item, _ in found}, _more(result))


def held(method: str, answer: bytes, approved: Mapping[str, Item]) -> Held | None:
    """An answer in which every definition is the approved one: changed ones get the approved text, new ones are left
    out. Definitions that the server has no more are left out too: calling them would fail. None for an error. Raises
    `Unreadable`."""
    document = _document(answer)
    result = document.get("result")
    if result is None and "error" in document:
        return None
    _, field, _ = LISTS[method]
    result, served, different = _object(result, "result"), list[Any](), list[Change]()
    for name, item, value in _items(method, result, field):
        known = approved.get(name)
        if known is None:
            different.append(Change("new", name))
        elif known.fingerprint != item.fingerprint:
            different.append(Change("changed", name))
            served.append(json.loads(known.text))
        else:
            served.append(value)
    if not different:
        return Held(answer, [])
    if field != _INSTRUCTIONS:
        result[field] = served
    elif served:
        result[field] = served[0]
    else:
        del result[field]
    return Held(json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode(), different)


def asked_for(method: str, request: bytes) -> str | None:
    """The tool, prompt or resource that a request names; None without a name. Raises `Unreadable`."""
    document = _document(request)
    name = _object(document.get("params"), "params").get("uri" if method == "resources/read" else "name")
    return name if isinstance(name, str) else None


def cursor_of(request: bytes) -> str | None:
    """The cursor of the page that a request asks for; None for the first page, or if the request cannot be read."""
    try:
        cursor = _object(_document(request).get("params"), "params").get("cursor")
    except Unreadable:
        return None
    return cursor if isinstance(cursor, str) else None


def _document(answer: bytes) -> dict[str, Any]:
    if len(answer) > LARGEST:
        raise Unreadable(f"it has {len(answer):,} bytes; at most {LARGEST:,} are read")
    try:
        return _object(json.loads(answer.decode(), object_pairs_hook=_once, parse_constant=_constant), "the answer")
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not UTF-8: byte {error.start + 1}") from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is not JSON that everybody reads alike: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice in an object")
    return made


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unreadable(f"{what} is no object")
    return cast("dict[str, Any]", value)


def _more(result: Any) -> str | None:
    """The cursor of the next page. A cursor that is no string counts as none."""
    cursor = result.get("nextCursor")
    return cursor if isinstance(cursor, str) else None


def _items(method: str, result: dict[str, Any], field: str) -> Iterable[tuple[str, Item, Any]]:
    """(name, definition, value in the answer) of each definition."""
    value = result.get(field)
    if field == _INSTRUCTIONS:
        if value is None:
            return []
        if not isinstance(value, str):
            raise Unreadable("its instructions are no text")
        return [("", _item(value), value)]
    if not isinstance(value, list):
        raise Unreadable(f"result.{field} is no list")
    found = [(_name(one, method, place), _item(one), one) for place, one in enumerate(cast("list[Any]", value))]
    if len({name for name, _, _ in found}) < len(found):
        names = [name for name, _, _ in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise Unreadable(f"{twice!r} stands twice in result.{field}")
    return found


def _item(value: Any) -> Item:
    try:
        text = canonical(value)
    except ValueError as error:
        raise Unreadable(f"a number in it is too large: {error}") from None
    return Item(fingerprint(text), text)


def _name(value: Any, method: str, place: int) -> str:
    _, field, key = LISTS[method]
    name = _object(value, f"result.{field}[{place}]").get(key)
    if not isinstance(name, str) or not name:
        raise Unreadable(f"result.{field}[{place}].{key} is no text")
    if not name.isascii() and any("\ud800" <= one <= "\udfff" for one in name):
        raise Unreadable(f"result.{field}[{place}].{key} has half a surrogate pair")
    return name
