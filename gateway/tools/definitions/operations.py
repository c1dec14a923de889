"""Versions of the definitions that servers list, as operations inside a write transaction.

A server has one record with its versions, and one record for each definition that a version still has, under its
fingerprint: unchanged definitions are kept once.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

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
from penstock.gateway.tools.definitions.list_answer import (
    Definition,
    DefinitionChange,
    changes,
    fingerprints,
    list_fingerprint,
)

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


# Reads the definitions of servers from the tape: each read is one short transaction.

_log = logging.getLogger("penstock.mcp")


class DefinitionReader:
    """Reads the definitions on a tape."""

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
