"""The definitions that servers list, as versions: read, fingerprinted, restored where approved, and kept on the tape.

A definition (of a tool, a prompt, a resource) is known by the SHA-256 of its canonical JSON: keys sorted, no spaces,
ASCII only. A list is known by the names and fingerprints in it, in any order. Its pages are parts of one list, and each
page can be compared with the approved list without the others.

An answer is read strictly, because two readers might take different texts for that of a tool: a duplicate key, an
invalid number or bytes that are not UTF-8 make it unreadable. Numbers keep their digits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec

from penstock.gateway.model.base import Mode, Origin, parse_record
from penstock.gateway.model.foreign_text import visible_name
from penstock.gateway.model.tools import (
    Approval,
    ApproveRequest,
    DefinitionKind,
    DefinitionVersion,
    ServerDefinitions,
)
from penstock.gateway.tape.store import audit_log, keys
from penstock.gateway.tape.store.directory import DamagedRecordError
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction
from penstock.gateway.wire.dialects.loose_json import AmbiguousJsonError, lenient, unambiguous

_log = logging.getLogger("penstock.mcp")
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


# -- versions on the tape, as operations inside a write transaction ---------------------------------------------------
#
# A server has one record with its versions, and one record for each definition that a version still has, under its
# fingerprint: unchanged definitions are kept once.

MOST_VERSIONS: Final = 50
"""Maximum number of versions of a server that are kept; those that are served or approved always are."""
MOST_APPROVALS: Final = 1000
CHANGED: Final = "mcp_definitions_changed"
"""Name of the event on the rollout in which a change was first seen."""
_NAMED: Final = 20
"""Maximum number of changes that an event names; `_LONGEST`: maximum length of a name."""
_LONGEST: Final = 100


class AttemptRef(NamedTuple):
    """The attempt in which a list was requested."""

    rollout: str
    attempt: str
    origin: Origin = "header"
    mode: Mode = "online"


class Sighting(NamedTuple):
    """A whole list that a server has sent."""

    server: str
    kind: DefinitionKind
    items: Mapping[str, Definition]
    whose: AttemptRef
    accepted: bool
    """Whether new content is approved at once, because changes only cause warnings."""


class SightingResult(NamedTuple):
    """The result of a sighting."""

    known: ServerDefinitions
    version: int | None
    """The version that was listed; None for a first list that is empty, which proves nothing."""
    changes: list[DefinitionChange]
    """The differences from the version before, if this one is new."""


class DefinitionOperations:
    """Operations on definitions in one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._tape = transaction

    def record_sighting(self, sighting: Sighting, now: int) -> SightingResult:
        """Keeps a list that a server has sent. The first version is approved: there is nothing to compare it with."""
        known, kind = self._known(sighting.server), sighting.kind
        found = fingerprints(sighting.items)
        wanted = list_fingerprint(found)
        version = next((one for one in known.of(kind) if one.fingerprint == wanted), None)
        if version is None and not found and not known.of(kind):
            return SightingResult(known, None, [])
        different = list[DefinitionChange]()
        if version is None:
            before = known.version(known.newest.get(kind))
            different = [] if before is None else changes(before.items, found)
            version = self._add(known, sighting, found, wanted, now)
        version.last_seen_ns = max(now, version.last_seen_ns)
        known.newest[kind] = version.version
        if sighting.accepted or kind not in known.pinned:
            known.pinned[kind] = version.version
        self._shed(known)
        self._write(known)
        if different:
            self._note(sighting, version, different, now)
        return SightingResult(known, version.version, different)

    def _add(
        self, known: ServerDefinitions, sighting: Sighting, found: dict[str, str], wanted: str, now: int
    ) -> DefinitionVersion:
        known.given += 1
        made = DefinitionVersion(
            version=known.given,
            kind=sighting.kind,
            fingerprint=wanted,
            first_seen_ns=now,
            last_seen_ns=now,
            rollout=sighting.whose.rollout,
            items=found,
        )
        known.versions.append(made)
        for item in sighting.items.values():
            key = text_key(sighting.server, item.fingerprint)
            if self._tape.get("definitions", key) is None:
                self._tape.put("definitions", key, zlib.compress(self._tape.secrets.hide(item.text.encode())))
        return made

    def _shed(self, known: ServerDefinitions) -> None:
        """Deletes the oldest of very many versions, with the definitions that only they had."""
        needed = {*known.pinned.values(), *known.newest.values()}
        spare = [one for one in known.versions if one.version not in needed]
        gone = spare[: max(0, len(known.versions) - MOST_VERSIONS)]
        if not gone:
            return
        known.versions = [one for one in known.versions if one not in gone]
        kept = {name for one in known.versions for name in one.items.values()}
        for one in {name for old in gone for name in old.items.values()} - kept:
            self._tape.delete("definitions", text_key(known.server, one))

    def _note(
        self, sighting: Sighting, version: DefinitionVersion, different: list[DefinitionChange], now: int
    ) -> None:
        """Records an event on the rollout in which the change was seen."""
        entry = SpanEntry(*sighting.whose, kind="event", name=CHANGED, method="", status="ok")
        entry.start_ns = entry.end_ns = now
        entry.attributes = {
            "penstock.mcp.server": sighting.server,
            "penstock.mcp.list": sighting.kind,
            "penstock.mcp.version": version.version,
            "penstock.mcp.changes": self._tape.secrets.text(describe_changes(different)),
        }
        self._tape.record(entry, 0)

    def approve(self, server: str, asked: ApproveRequest, now: int) -> ServerDefinitions:
        """Approves a version, or the newest of every list. Raises `OperationRefusedError`."""
        known = self._known(server)
        if not known.versions:
            message = f"server {server!r} has not listed anything yet: there is nothing to approve"
            raise OperationRefusedError("not_found", message, "server", server)
        who, why = map(self._tape.secrets.text, (asked.who, asked.why))
        changed: list[str] = []
        numbers = [asked.version] if asked.version is not None else list(known.newest.values())
        for number in numbers:
            version = known.version(number)
            if version is None:
                has = ", ".join(str(one.version) for one in known.versions[-20:])
                raise OperationRefusedError(
                    "not_found", f"server {server!r} has no version {number}; it has {has}", "version"
                )
            before = known.pinned.get(version.kind)
            if before == number:
                continue
            known.pinned[version.kind] = version.version
            changed.append(f"{version.kind} {version.version}")
            known.approvals.append(
                Approval(
                    at_ns=now,
                    person=who,
                    kind=version.kind,
                    version=version.version,
                    before=before,
                    note=why,
                )
            )
        known.approvals = known.approvals[-MOST_APPROVALS:]
        self._write(known)
        if changed:
            audit_log.write(self._tape, asked, "approve_definitions", f"{server} {', '.join(changed)}", now)
        return known

    def _known(self, server: str) -> ServerDefinitions:
        stored = self._tape.get("definitions", server_key(server))
        return ServerDefinitions(server=server) if stored is None else read_server(server, stored)

    def _write(self, known: ServerDefinitions) -> None:
        self._tape.put("definitions", server_key(known.server), known.model_dump_json().encode())


def describe_changes(different: list[DefinitionChange]) -> str:
    """Changes in a sentence: `changed search, new delete_all`."""
    said = ", ".join(
        " ".join(filter(None, (one.what, visible_name(one.name[:_LONGEST])))) for one in different[:_NAMED]
    )
    return said + (f" and {len(different) - _NAMED} more" if len(different) > _NAMED else "")


def read_server(server: str, record: bytes) -> ServerDefinitions:
    """A server's definitions from its record. Raises `DamagedRecordError`."""
    if (found := parse_record(ServerDefinitions, record)) is None:
        raise DamagedRecordError(f"what server {server!r} has listed cannot be read; run `penstock check`")
    return found


def server_key(server: str) -> bytes:
    """The key of the record with a server's versions."""
    return keys.rollout_key(server)


def text_key(server: str, fingerprint: str) -> bytes:
    """The key of the record of a definition."""
    return keys.rollout_key(server) + bytes.fromhex(fingerprint)


class DefinitionReader:
    """Reads the definitions on a tape: each read is one short transaction."""

    def __init__(self, tape: StoreReader) -> None:
        self._tape = tape

    def servers(self) -> list[ServerDefinitions]:
        """All servers whose records can be read, by name; the others are logged."""
        with self._tape.view() as view:
            stored = {key[:-1]: it for key, it in view.scan("definitions") if key.find(b"\0") == len(key) - 1}
        found: list[ServerDefinitions] = []
        for name, record in stored.items():
            try:
                found.append(read_server(name.decode("ascii", "replace"), record))
            except DamagedRecordError as error:
                _log.error("%s", error)
        return found

    def server(self, name: str) -> ServerDefinitions | None:
        """A server's definitions; None if it has never listed any. Raises `DamagedRecordError`."""
        with self._tape.view() as view:
            stored = view.get("definitions", server_key(name))
        return None if stored is None else read_server(name, stored)

    def texts(self, server: str, fingerprints: Iterable[str]) -> dict[str, str]:
        """Definitions by their fingerprints; those that cannot be read are left out."""
        with self._tape.view() as view:
            stored = {one: view.get("definitions", text_key(server, one)) for one in fingerprints}
        found: dict[str, str] = {}
        for one, text in stored.items():
            try:
                found |= {} if text is None else {one: unpacked(text)}
            except ValueError as error:
                _log.error("server %s: %s; run `penstock check`", server, error)
        return found

    def items(self, server: ServerDefinitions, version: int | None) -> dict[str, Definition]:
        """The definitions of a version, by name."""
        found = server.version(version)
        if found is None:
            return {}
        texts = self.texts(server.server, found.items.values())
        return {name: Definition(one, texts[one]) for name, one in found.items.items() if one in texts}


def unpacked(record: bytes) -> str:
    """The text of a definition from its record. Raises `ValueError` for one that cannot be read."""
    try:
        return zlib.decompress(record).decode()
    except zlib.error as error:
        raise ValueError(f"a definition cannot be unpacked: {error}") from None
