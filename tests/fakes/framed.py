"""What a client gets of the reads of a link to an upstream, whose answers are passed on by some way of framing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.rewriting import Framing


class Client:
    """Passes a real link's reads on."""

    head_only = False

    def __init__(self, framing: Callable[[UpstreamConnection], Framing | None]) -> None:
        self.got: list[bytes] = []
        self._framing = framing
        self._way: Framing | None = None

    def on_answer(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        self._way = self._framing(connection)
        self.got.append(head + raw if self._way is None else self._way.begin(connection, head, raw))
        connection.pieces = []

    def on_data(self, connection: UpstreamConnection, raw: bytes) -> None:
        self.got.append(raw if self._way is None else self._way.go_on(connection, raw))
        connection.pieces = []

    def on_broken(self, connection: UpstreamConnection, reason: str) -> None:
        assert self._way is not None, reason
        self.got.append(self._way.broken())


def received(
    framing: Callable[[UpstreamConnection], Framing | None], reads: Sequence[bytes], lost: bool = False
) -> list[bytes]:
    """What the client has got of each read, and of the end of a link that is lost."""
    owner: Any = SimpleNamespace(name="u", connections=0, put_back=_nothing, forget=_nothing)
    connection, client = UpstreamConnection(owner), Client(framing)
    connection.connection_made(cast(Any, SimpleNamespace(is_closing=bool, write=_nothing)))
    connection.send(cast(Any, client), b"", b"")
    for read in reads:
        connection.data_received(read)
    if lost:
        connection.connection_lost(ConnectionError())
    return client.got


def _nothing(_: object) -> None:
    """Nobody is there."""
