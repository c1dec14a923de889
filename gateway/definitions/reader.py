"""Reading what servers say of themselves: each read is one short transaction."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from penstock.gateway.definitions.operations import server_key, text_key
from penstock.gateway.definitions.reading import Item
from penstock.gateway.model.definitions import ServerDefinitions
from penstock.gateway.store.reader import Reader


class DefinitionReader:
    """Definitions of a tape."""

    def __init__(self, tape: Reader) -> None:
        self._tape = tape

    def servers(self) -> list[ServerDefinitions]:
        """All servers, by name."""
        with self._tape.view() as view:
            stored = [record for key, record in view.scan("definitions") if key[-1:] == b"\0" and key.count(b"\0") == 1]
        return [ServerDefinitions.model_validate_json(record) for record in stored]

    def server(self, name: str) -> ServerDefinitions | None:
        """One server."""
        with self._tape.view() as view:
            stored = view.get("definitions", server_key(name))
        return None if stored is None else ServerDefinitions.model_validate_json(stored)

    def texts(self, server: str, fingerprints: Iterable[str]) -> dict[str, str]:
        """Definitions by their fingerprints."""
        with self._tape.view() as view:
            stored = {one: view.get("definitions", text_key(server, one)) for one in fingerprints}
        return {one: unpacked(text) for one, text in stored.items() if text is not None}

    def items(self, server: ServerDefinitions, version: int | None) -> dict[str, Item]:
        """The definitions of a version, by name."""
        found = server.version(version)
        if found is None:
            return {}
        texts = self.texts(server.server, found.items.values())
        return {name: Item(one, texts[one]) for name, one in found.items.items() if one in texts}


def unpacked(record: bytes) -> str:
    """A definition from its record. Raises `ValueError` for one that cannot be read."""
    try:
        return zlib.decompress(record).decode()
    except zlib.error as error:
        raise ValueError(f"a definition cannot be unpacked: {error}") from None
