"""Watches and changes of answers that have not come yet, by the ids of their requests.

An answer may come as a document, in the stream of its exchange, or in a later stream of its session, and a server may
send it again there. So the interests of an exchange are those of its session, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import orjson

from penstock.gateway.wire.dialects.mcp import JsonRpcMessage

ResponseObserver = Callable[[bytes], None]
"""Receives an answer as the JSON that the server has sent. It is kept with its session, so it must hold no record."""


class TransformResult(NamedTuple):
    """A changed answer, and the attributes that describe the change on the span of the exchange that brought it."""

    answer: bytes
    attributes: dict[str, str]


ResponseTransform = Callable[[bytes], "bytes | TransformResult"]
"""Returns the answer for the client; raises `Refusal` if the client gets an error in its place."""
_KEPT: Final = 1000
"""Most answers of one session that are watched or changed, the newest: a server may repeat them in a later stream."""


@dataclass(slots=True)
class ResponseHandler:
    """The watches and changes of the answer to one request."""

    observers: list[ResponseObserver] = field(default_factory=list[ResponseObserver])
    transforms: list[ResponseTransform] = field(default_factory=list[ResponseTransform])


class ResponseHandlers:
    """Watches and changes of answers, by the ids of their requests."""

    __slots__ = ("_by_id", "default_transforms")

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, ResponseHandler] | None = None
        """None while there are none, as in most sessions, of which there may be very many."""
        self.default_transforms: list[ResponseTransform] = []
        """Changes of all other answers in this exchange: to requests of before a restart of the gateway, or without an
        entry here."""

    def __bool__(self) -> bool:
        return bool(self._by_id or self.default_transforms)

    def handler_of(self, id: bytes) -> ResponseHandler:
        """The entry of a request, which may be new."""
        if self._by_id is None:
            self._by_id = OrderedDict()
        return self._by_id.setdefault(_loose(id), ResponseHandler())

    def observers_of(self, one: JsonRpcMessage) -> Sequence[ResponseObserver]:
        """The watches of a server's message. An unreadable message may be any answer: it gets those of the newest
        request."""
        if not self._by_id:
            return ()
        if one.kind == "unreadable" and one.raw.strip():
            return next((found.observers for found in reversed(self._by_id.values()) if found.observers), ())
        found = self._by_id.get(_loose(one.id)) if one.kind == "answer" else None
        return () if found is None else found.observers

    def transforms_of(self, id: bytes) -> Sequence[ResponseTransform]:
        """The changes of the answer to a request."""
        found = self._by_id.get(_loose(id)) if self._by_id else None
        return () if found is None else found.transforms

    def merge(self, others: ResponseHandlers) -> None:
        """Adds the entries of one exchange."""
        if not others._by_id:
            return
        mine = self._by_id = self._by_id or OrderedDict()
        mine.update(others._by_id)
        while len(mine) > _KEPT:
            mine.popitem(last=False)


def _loose(id: bytes) -> str:
    """An id as the loosest client compares it: SDKs take `"1"` and `1.0` for an answer to `1`."""
    try:
        value = orjson.loads(id)
    except ValueError:
        return id.decode("latin-1")
    text = value.strip() if isinstance(value, str) else id.decode()
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else repr(number)
