"""What a session still owes: requests whose answer comes in another exchange, or never.

Up to revision 2025-11-25 a server may end the stream of a request before it has answered; the client then opens
another stream and gets the answer there. In the older HTTP with SSE every answer comes that way. And the server asks
too (sampling, elicitation, roots): the client's answer is a POST of its own. A `Session` keeps both kinds until the
answer passes. It is found by the id that the server gave it; without one, nothing can come in another exchange.

Everything here happens in the event loop. Nothing is on the tape twice: what is kept here is handed to the recorder
once, by `Kept.end`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import sha256
from time import monotonic
from typing import Any, Final, Protocol, TypeVar

from penstock.gateway.mcp.interests import Interests

OPEN: Final = 100_000
"""Sessions that are remembered, the newest; of more, the oldest are forgotten."""
PATIENCE_S: Final = 3600.0
"""Seconds for which an answer may still come in another exchange."""
OWED: Final = 1000
"""Requests of one side that a session keeps, the newest; of more, the oldest are given up."""
OWED_BYTES: Final = 64 << 20
"""Bytes of them."""
UNWANTED: Final = 1000
"""Requests of one session that are known to be cancelled, the newest."""
EARLY: Final = 8
"""Answers of one session that nobody waits for yet, the newest."""
EARLY_BYTES: Final = 8 << 20
"""Bytes of them."""
PASSED: Final = 256
"""Messages of one session by which those are told that a server says again, the newest."""
_LONG: Final = 128
"""Bytes of an id that is kept as it is."""


class Kept(Protocol):
    """A request without its answer."""

    @property
    def weight(self) -> int:
        """Bytes that it holds in memory."""
        ...

    def answered(self, answer: bytes, now: float) -> None:
        """It came, in another exchange: the request goes to the tape as answered."""
        ...

    def given_up(self) -> None:
        """It will not come: the request goes to the tape as it is."""
        ...


_Owed = dict[bytes, tuple[Kept, float]]
T = TypeVar("T")
_NOTHING: Final[dict[Any, Any]] = {}
"""Stands for all that a session does not keep: there may be very many. Nothing is ever put into it."""


class Session:
    """One session of one server."""

    __slots__ = ("_asked", "_asking", "_early", "_passed", "_unwanted", "interests", "rollout")

    def __init__(self, rollout: str) -> None:
        self.rollout = rollout
        """The rollout of the call that opened it; that of later calls that name none."""
        self.interests = Interests()
        """What is done with the answers to its requests."""
        self._asked: _Owed = _NOTHING
        """Requests of the client, by id, and when their exchanges ended."""
        self._asking: _Owed = _NOTHING
        """Requests of the server, by id, and since when."""
        self._early: dict[bytes, bytes] = _NOTHING
        """Answers that came before the exchanges of their requests had ended, by id."""
        self._unwanted: dict[bytes, None] = _NOTHING
        """Requests that the client does not want any more, by id."""
        self._passed: dict[tuple[str, int], None] = _NOTHING
        """What the server has said in numbered events: the number and the hash of the message."""

    def cancel(self, id: bytes) -> None:
        """The client does not want the answer to a request any more."""
        self._unwanted = _newest(self._unwanted, id, UNWANTED)

    def unwanted(self, ids: Iterable[bytes]) -> bool:
        """Whether the client has cancelled one of these requests."""
        return bool(self._unwanted) and not self._unwanted.keys().isdisjoint(ids)

    def passed(self, event: str, raw: bytes) -> bool:
        """Whether the server has said this before, in an event of this number; from now on it has."""
        key = event, hash(raw)
        known = key in self._passed
        self._passed = _newest(self._passed, key, PASSED)
        return known

    def keep(self, id: bytes, request: Kept) -> None:
        """Keeps a request of the client whose exchange has ended without the answer, unless that has come already."""
        if (early := self._early.pop(id, None)) is not None:
            request.answered(early, monotonic())
        else:
            self._asked = self._replace(self._asked, id, request)

    def asks(self, id: bytes, request: Kept) -> None:
        """Keeps a request of the server."""
        self._asking = self._replace(self._asking, id, request)

    @staticmethod
    def _replace(kept: _Owed, id: bytes, request: Kept) -> _Owed:
        kept = kept or {}
        if (before := kept.pop(id, None)) is not None:
            before[0].given_up()
        kept[id] = request, monotonic()
        while len(kept) > 1 and (len(kept) > OWED or sum(one.weight for one, _ in kept.values()) > OWED_BYTES):
            kept.pop(next(iter(kept)))[0].given_up()
        return kept

    def server_answers(self, id: bytes, answer: bytes) -> bool:
        """An answer of the server passes; False if nobody waits for it here."""
        return self._settle(self._asked, id, answer)

    def answers_early(self, id: bytes, answer: bytes) -> None:
        """An answer passes for which nobody waits yet: in HTTP with SSE a server may give it before it says that it has
        taken the message which asks."""
        self._early = self._early or {}
        self._early[id] = answer
        while len(self._early) > EARLY or sum(map(len, self._early.values())) > EARLY_BYTES:
            self._early.pop(next(iter(self._early)))

    def client_answers(self, id: bytes, answer: bytes) -> bool:
        """An answer of the client passes; False if the server has not asked."""
        return self._settle(self._asking, id, answer)

    @staticmethod
    def _settle(kept: _Owed, id: bytes, answer: bytes) -> bool:
        found = kept.pop(id, None)
        if found is not None:
            found[0].answered(answer, monotonic())
        return found is not None

    def withdrawn(self, id: bytes, by_client: bool) -> Kept | None:
        """A request that its sender has cancelled: it is kept no longer."""
        found = (self._asked if by_client else self._asking).pop(id, None)
        return None if found is None else found[0]

    def give_up(self, before: float) -> None:
        """Lets go of what has been kept since before that moment; seconds of the monotonic clock."""
        for kept in (self._asked, self._asking):
            for id in [id for id, (_, since) in kept.items() if since <= before]:
                kept.pop(id)[0].given_up()

    @property
    def owes(self) -> bool:
        """Whether anything is kept."""
        return bool(self._asked or self._asking)


class Sessions:
    """All sessions of all servers, by server and the id that it gave."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[str, bytes], Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def find(self, server: str, id: bytes) -> Session | None:
        """A session that is known."""
        return self._open.get(_key(server, id))

    def open(self, server: str, id: bytes, rollout: str) -> Session:
        """The session of that id; a new one of this rollout if it was not known, as after a restart."""
        key = _key(server, id)
        session = self._open.get(key)
        if session is None:
            session = self._open[key] = Session(rollout)
            if len(self._open) > OPEN:
                _, oldest = self._open.popitem(last=False)
                oldest.give_up(monotonic())
        else:
            self._open.move_to_end(key)
        return session

    def end(self, server: str, id: bytes) -> None:
        """The session is over: the client has ended it, or the server does not know it."""
        session = self._open.pop(_key(server, id), None)
        if session is not None:
            session.give_up(monotonic())

    def sweep(self, now: float) -> None:
        """Gives up what has been kept for too long."""
        for session in self._owing():
            session.give_up(now - PATIENCE_S)

    def close(self) -> None:
        """The gateway stops: what is kept goes to the tape as it is."""
        for session in self._owing():
            session.give_up(monotonic())

    def _owing(self) -> Iterator[Session]:
        return iter([session for session in self._open.values() if session.owes])


def _key(server: str, id: bytes) -> tuple[str, bytes]:
    """A client may send ids of any length, so those that no server gives are not kept themselves."""
    return server, id if len(id) <= _LONG else sha256(id).digest()


def _newest(kept: dict[T, None], key: T, limit: int) -> dict[T, None]:
    """Adds to what is remembered, and forgets the oldest of more than that."""
    kept = kept or {}
    kept.pop(key, None)
    kept[key] = None
    if len(kept) > limit:
        del kept[next(iter(kept))]
    return kept
