"""Reads the definitions of servers from the tape: each read is one short transaction."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable

from penstock.gateway.model.definitions import ServerDefinitions
from penstock.gateway.tape.store.directory import DamagedRecordError
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tools.definitions.list_answer import Definition
from penstock.gateway.tools.definitions.operations import read_server, server_key, text_key

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
