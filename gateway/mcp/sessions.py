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
from collections.abc import Iterator
from time import monotonic
from typing import Final, Protocol

from penstock.gateway.mcp.interests import Interests

OPEN: Final = 100_000
"""Sessions that are remembered, the newest; of more, the oldest are forgotten."""
PATIENCE_S: Final = 3600.0
"""Seconds for which an answer may still come in another exchange."""


class Kept(Protocol):
    """A request without its answer."""

    def answered(self, answer: bytes, now: float) -> None:
        """It came, in another exchange: the request goes to the tape as answered."""
        ...

    def given_up(self) -> None:
        """It will not come: the request goes to the tape as it is."""
        ...


class Session:
    """One session of one server."""

    __slots__ = ("_asked", "_asking", "cancelled", "interests", "rollout")

    def __init__(self, rollout: str) -> None:
        self.rollout = rollout
        """The rollout of the call that opened it; that of later calls that name none."""
        self.cancelled: set[bytes] = set()
        """Requests under way that the client does not want any more, by id."""
        self.interests = Interests()
        """What is done with the answers to its requests."""
        self._asked: dict[bytes, tuple[Kept, float]] = {}
        """Requests of the client, by id, and when their exchanges ended."""
        self._asking: dict[bytes, tuple[Kept, float]] = {}
        """Requests of the server, by id, and since when."""

    def keep(self, id: bytes, request: Kept) -> None:
        """Keeps a request of the client whose exchange has ended without the answer."""
        self._replace(self._asked, id, request)

    def asks(self, id: bytes, request: Kept) -> None:
        """Keeps a request of the server."""
        self._replace(self._asking, id, request)

    @staticmethod
    def _replace(kept: dict[bytes, tuple[Kept, float]], id: bytes, request: Kept) -> None:
        if (before := kept.pop(id, None)) is not None:
            before[0].given_up()
        kept[id] = request, monotonic()

    def server_answers(self, id: bytes, answer: bytes) -> bool:
        """An answer of the server passes; False if nobody waits for it here."""
        return self._settle(self._asked, id, answer)

    def client_answers(self, id: bytes, answer: bytes) -> bool:
        """An answer of the client passes; False if the server has not asked."""
        return self._settle(self._asking, id, answer)

    @staticmethod
    def _settle(kept: dict[bytes, tuple[Kept, float]], id: bytes, answer: bytes) -> bool:
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

    def find(self, server: str, id: bytes) -> Session | None:
        """A session that is known."""
        return self._open.get((server, id))

    def open(self, server: str, id: bytes, rollout: str) -> Session:
        """The session of that id; a new one of this rollout if it was not known, as after a restart."""
        key = server, id
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
        session = self._open.pop((server, id), None)
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
