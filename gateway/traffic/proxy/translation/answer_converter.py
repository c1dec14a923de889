"""The interface of answers in an agent's own format, whole or event by event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import orjson

from penstock.gateway.traffic.proxy.translation.chat_pieces import AnswerPiece, ChatAnswer
from penstock.gateway.wire.dialects.loose_json import Json


class AnswerConverter(Protocol):
    """Writes one answer for its agent. Either `whole` is called, or the other methods in their order."""

    def whole(self, answer: ChatAnswer, pieces: list[AnswerPiece]) -> Json:
        """Return the plain answer."""
        ...

    def begin(self, answer: ChatAnswer) -> list[Json]:
        """Return the first events of a stream."""
        ...

    def feed(self, piece: AnswerPiece) -> list[Json]:
        """Return the events that a piece adds."""
        ...

    def end(self, answer: ChatAnswer) -> list[Json]:
        """Return the last events of a complete answer."""
        ...

    def broken(self, message: str) -> list[Json]:
        """Return the last events of an answer that will not be completed."""
        ...


def encode_events(events: Iterable[Json]) -> bytes:
    """Events as they go over the wire, each under the name of its type."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)
