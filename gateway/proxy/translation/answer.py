"""The interface of answers in an agent's own format, whole or event by event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import orjson

from penstock.gateway.dialects.loose_json import Json
from penstock.gateway.proxy.translation.chat_pieces import Answer, Piece


class AnswerConverter(Protocol):
    """One answer for its agent. Either `whole` is called, or the others in their order."""

    def whole(self, answer: Answer, pieces: list[Piece]) -> Json:
        """A plain answer."""
        ...

    def begin(self, answer: Answer) -> list[Json]:
        """The first events of a stream."""
        ...

    def tell(self, piece: Piece) -> list[Json]:
        """What a piece adds."""
        ...

    def end(self, answer: Answer) -> list[Json]:
        """The last ones."""
        ...

    def broken(self, message: str) -> list[Json]:
        """The last ones of an answer that will not be completed."""
        ...


def written(events: Iterable[Json]) -> bytes:
    """Events as they go over the wire, each under the name of its type."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)
