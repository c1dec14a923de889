"""What is done with answers that have not come yet, by the ids of their requests.

An answer may come as a document, in the stream of its exchange, or in a later stream of its session, and a server may
send it again there. So the interests of an exchange are those of its session, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import orjson

from penstock.gateway.dialects.mcp import Sent

Watch = Callable[[bytes], None]
"""Takes an answer, as the JSON that the server has sent. It is kept with its session: it holds no record."""


class Noted(NamedTuple):
    """A changed answer, and what is said of that on the span of the exchange that brought it."""

    answer: bytes
    attributes: dict[str, str]


Change = Callable[[bytes], "bytes | Noted"]
"""What the client gets of an answer; raises `Refusal` where it gets an error in its place."""
_KEPT: Final = 1000
"""Answers of one session that are watched or changed, the newest: a server may repeat them in a later stream."""


@dataclass(slots=True)
class Interest:
    """What is done with the answer to one request."""

    watches: list[Watch] = field(default_factory=list[Watch])
    changes: list[Change] = field(default_factory=list[Change])


class Interests:
    """What is done with answers, by the ids of their requests."""

    __slots__ = ("_by_id", "unasked")

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Interest] | None = None
        """None while there are none, as in most of very many sessions."""
        self.unasked: list[Change] = []
        """Changes of all other answers that pass in this exchange: to requests that nobody remembers, because the
        gateway was started in between, or that nothing is done with."""

    def __bool__(self) -> bool:
        return bool(self._by_id or self.unasked)

    def of(self, id: bytes) -> Interest:
        """That of a request, which may be new."""
        if self._by_id is None:
            self._by_id = OrderedDict()
        return self._by_id.setdefault(_loose(id), Interest())

    def heard(self, one: Sent) -> Sequence[Watch]:
        """Those of a message of the server. One that cannot be read may be any answer: it is for the newest."""
        if not self._by_id:
            return ()
        if one.kind == "unreadable" and one.raw.strip():
            return next((found.watches for found in reversed(self._by_id.values()) if found.watches), ())
        found = self._by_id.get(_loose(one.id)) if one.kind == "answer" else None
        return () if found is None else found.watches

    def changes(self, id: bytes) -> Sequence[Change]:
        """Those of the answer to a request."""
        found = self._by_id.get(_loose(id)) if self._by_id else None
        return () if found is None else found.changes

    def add(self, others: Interests) -> None:
        """Takes those of one exchange."""
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
