"""The interface of answers in an agent's own format, whole or event by event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import orjson

from penstock.gateway.dialects.loose_json import Json
from penstock.gateway.proxy.translation.chat_pieces import Answer, Piece


class AnswerConverter(Protocol):
    """Writes one answer for its agent. Either `whole` is called, or the other methods in their order."""

    def whole(self, answer: Answer, pieces: list[Piece]) -> Json:
        """Return the plain answer."""
        ...

    def begin(self, answer: Answer) -> list[Json]:
        """Return the first events of a stream."""
        ...

    def tell(self, piece: Piece) -> list[Json]:
        """Return the events that a piece adds."""
        ...

    def end(self, answer: Answer) -> list[Json]:
        """Return the last events of a complete answer."""
        ...

    def broken(self, message: str) -> list[Json]:
        """Return the last events of an answer that will not be completed."""
        ...


def written(events: Iterable[Json]) -> bytes:
    """Events as they go over the wire, each under the name of its type."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)
