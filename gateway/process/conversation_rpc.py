"""Conversations of several workers: the first keeps them for all (`calls.conversation_matcher`), the others ask it.

An answer stays with the worker that has passed it on. The first one asks for its content where only that tells equal
conversations apart. Stories are numbers that all workers of a gateway make alike (`process.workers` gives them one seed
for hashes).
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from random import getrandbits
from typing import Any, Final

import msgspec

from penstock.gateway.process.leader_rpc import PATIENCE_S, LeaderClient
from penstock.gateway.process.worker_link import Handler, LinkLostError, WorkerLink
from penstock.gateway.traffic.calls.conversation_matcher import ConversationMatcher, read_answers
from penstock.gateway.traffic.calls.conversations import UNREAD_BYTES, ConversationMatch, UnreadAnswer
from penstock.gateway.traffic.calls.fingerprints import ConversationFingerprint
from penstock.gateway.wire.http.client_connection import ConnectionHints

_CONNECTIONS: Final = 20_000
"""Connections of each worker whose conversations the first one remembers."""
_UNDER_WAY: Final = 20_000
"""Calls of each worker that were found and have not ended; the end of a call is never reported if its client has
left."""
_NUMBERS: Final = "q"


class ConversationQuery(msgspec.Struct):
    """The facts of a call that the first worker is asked about."""

    connection: int
    """Number of its connection, given by the worker that asks."""
    peer: str
    last: str | None
    """As in `ConnectionHints`."""
    beginnings: bytes
    items: bytes
    previous: str | None
    answers: bool


class CallCompletion(msgspec.Struct):
    """The facts of a call that was answered."""

    number: int
    key: int | None
    connection: int
    peer: str
    rollout: str
    answer: int
    weight: int
    response: str | None


@dataclass(slots=True)
class _PeerState:
    """The first worker's memory of a worker that asks."""

    hints: OrderedDict[int, ConnectionHints] = field(default_factory=OrderedDict[int, ConnectionHints])
    """Hints of recent connections, by number."""
    under_way: dict[int, ConversationMatch] = field(default_factory=dict[int, ConversationMatch])
    """Calls that were found and have not ended, by number."""

    def of(self, connection: int, peer: str) -> ConnectionHints:
        """Return the hints of a connection."""
        hints = self.hints.setdefault(connection, ConnectionHints(peer))
        self.hints.move_to_end(connection)
        if len(self.hints) > _CONNECTIONS:
            self.hints.popitem(last=False)
        return hints

    def begin(self, number: int, found: ConversationMatch) -> None:
        """Remember a call that was found."""
        self.under_way[number] = found
        if len(self.under_way) > _UNDER_WAY:
            del self.under_way[next(iter(self.under_way))]


class _RemoteAnswer:
    """The answer to a call of another worker; it is fetched on the thread that reads answers."""

    def __init__(self, link: WorkerLink, number: int, weight: int) -> None:
        self._link, self._number, self.weight = link, number, weight
        self._loop = asyncio.get_running_loop()

    def said(self) -> array[int]:
        """Return the content of the answer; raises `LookupError` where it is not known any more."""
        asking = asyncio.run_coroutine_threadsafe(_fetch_answer(self._link, self._number), self._loop)
        said = asking.result(PATIENCE_S)
        if said is None:
            raise LookupError("the answer was dropped, or its worker has died")
        return array(_NUMBERS, said)


async def _fetch_answer(link: WorkerLink, number: int) -> bytes | None:
    try:
        return await link.request("said", number)
    except (LinkLostError, RuntimeError):
        return None


class ConversationServer:
    """The first worker's end: keeps the conversations and answers the others."""

    def __init__(self, joining: ConversationMatcher) -> None:
        self._joining = joining
        # Numbers begin at random, so that they are not those of an earlier first worker.
        self._numbers = count(1 + getrandbits(48))

    def handlers(self, link: WorkerLink) -> Mapping[str, Handler]:
        """Return the handlers for requests of another worker by this link."""
        worker = _PeerState()

        async def find(said: Any) -> tuple[str | None, bool, int]:
            return await self._find(worker, msgspec.convert(said, ConversationQuery))

        def remember(said: Any) -> None:
            self._remember(worker, link, msgspec.convert(said, CallCompletion))

        def undo(number: int, key: int | None) -> None:
            found = worker.under_way.pop(number, None)
            if found is not None and key is not None:
                self._joining.conversations.undo(found, key)

        return {"find": find, "remember": remember, "undo": undo}

    async def _find(self, worker: _PeerState, asked: ConversationQuery) -> tuple[str | None, bool, int]:
        hints = worker.of(asked.connection, asked.peer)
        hints.last = asked.last
        story = ConversationFingerprint(array(_NUMBERS, asked.items), array(_NUMBERS, asked.beginnings))
        while True:
            found = self._joining.find(story, asked.previous, asked.answers, hints)
            if not found.unread:
                break
            unread = found.unread
            await self._joining.on_thread(lambda: read_answers(unread))  # noqa: B023 - it is done before the next one
        number = 0
        if asked.answers:
            number = next(self._numbers)
            worker.begin(number, found)
        return found.rollout, found.ambiguous, number

    def _remember(self, worker: _PeerState, link: WorkerLink, said: CallCompletion) -> None:
        # An earlier first worker may have found it, and has died since.
        found = worker.under_way.pop(said.number, None) or ConversationMatch()
        hints = worker.of(said.connection, said.peer)
        answer = _RemoteAnswer(link, said.answer, said.weight)
        self._joining.remember_answer(found, said.key, hints, said.rollout, answer, said.response)


class ConversationClient:
    """Another worker's end: implements `calls.conversation_matcher.Elsewhere`."""

    def __init__(self, member: LeaderClient) -> None:
        self._member = member
        self._connections, self._numbers = count(1), count(1)
        self._answers: OrderedDict[int, UnreadAnswer] = OrderedDict()
        self._weight = 0

    async def find(
        self, story: ConversationFingerprint, previous: str | None, answers: bool, hints: ConnectionHints
    ) -> ConversationMatch:
        """Find the conversation of a call as `ConversationMatcher.found` does; without a rollout where the first
        worker does not answer."""
        beginnings, items = story.beginnings.tobytes(), story.items.tobytes()
        hints.number = hints.number or next(self._connections)
        asked = ConversationQuery(hints.number, hints.peer, hints.last, beginnings, items, previous, answers)
        found = await self._member.request("find", asked)
        if found is None:
            return ConversationMatch()
        rollout, ambiguous, number = found
        return ConversationMatch(rollout, ambiguous, number=number)

    def remember(
        self,
        found: ConversationMatch,
        key: int | None,
        hints: ConnectionHints,
        rollout: str,
        answer: UnreadAnswer,
        response: str | None,
    ) -> None:
        """Report an answered call as `ConversationMatcher.remember_answer` does."""
        number = next(self._numbers)
        if key is not None:
            self._answers[number] = answer
            self._weight += answer.weight
            # The first worker keeps as many of all workers together.
            while self._weight > UNREAD_BYTES:
                self._weight -= self._answers.popitem(last=False)[1].weight
        ended = CallCompletion(found.number, key, hints.number, hints.peer, rollout, number, answer.weight, response)
        self._member.notify("remember", ended)

    def undo(self, found: ConversationMatch, key: int | None) -> None:
        self._member.notify("undo", found.number, key)

    async def said(self, number: int) -> bytes | None:
        """Return the content of an answer, for the first worker; None where it was dropped."""
        answer = self._answers.pop(number, None)
        if answer is None:
            return None
        self._weight -= answer.weight
        return (await asyncio.to_thread(answer.said)).tobytes()
