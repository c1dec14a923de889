"""Finds the rollout of a call without an address: a request that continues a conversation belongs to its rollout.

Agents resend the whole conversation with every call. A request whose first items are all items of an earlier request,
followed by the answer to it, continues that one. Items are compared by their content, not by how their JSON is written.
Every beginning of a conversation has a number (`fingerprints.ConversationFingerprint`), so the longest known one is
found at once.

Answers distinguish equal beginnings. An answer is read only if two must be distinguished, and not on the event loop. If
the answers are equal too, the choice falls on the same connection, then on a conversation whose last answer has not
been continued yet, then on the same client address, then on the one that has waited longest. The choice is certain if
the connection, or the address, has never carried another of these conversations. Otherwise the rollout is marked: its
calls may belong to another agent that has done exactly the same.

State is kept in memory as digests, within bounds: the longest untouched conversations are dropped first, and of equal
openings the oldest. After a restart a conversation goes on as a new rollout. With several workers the leader keeps them
for all (`calls.conversation_matcher`, `process.worker_peers`).
"""

from __future__ import annotations

import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from penstock.gateway.traffic.calls.fingerprints import ConversationFingerprint, number_of
from penstock.gateway.wire.http.client_connection import ConnectionHints

_REMEMBERED: Final = 20_000
_EQUAL: Final = 64
_CONTINUED: Final = 64
_NEAR: Final = 16
"""Number of items at the end that are searched first: the new ones most often begin there."""
UNREAD_BYTES: Final = 16 << 20
"""Most bytes of answers that are kept unread."""


def new_rollout() -> str:
    """Return a fresh rollout id that sorts by time. It is no secret: random bytes of the system would cost more than
    all other work of opening a rollout."""
    return f"i-{time.time_ns() // 1_000_000:011x}-{random.getrandbits(32):08x}"


class UnreadAnswer(msgspec.Struct, frozen=True, gc=False):
    """The unread answer to a call."""

    body: Callable[[], bytes]
    """Returns the body, without content encoding."""
    stream: bool
    weight: int
    """Bytes that this holds in memory."""
    replies: Callable[[bytes, bool], list[bytes]]
    """Reads the body: the fingerprint sources of its items."""

    def said(self) -> array[int]:
        """Read it and return its items."""
        return array("q", map(number_of, self.replies(self.body(), self.stream)))


class ReadableAnswer(Protocol):
    """The interface of `UnreadAnswer`, for an answer in any worker."""

    @property
    def weight(self) -> int: ...
    def said(self) -> array[int]: ...


class ConversationEnd(msgspec.Struct, eq=False, gc=False):
    """The end of a conversation: a call that was answered, in one rollout."""

    rollout: str
    hints: ConnectionHints
    alone: bool
    """True if all calls of its rollout so far came on this connection."""
    answer: ReadableAnswer | None
    """Its answer until it is read; None also if it was dropped for its age."""
    said: array[int] | None = None
    """The items of its answer; None until it is read."""
    continued: tuple[int, ...] = ()
    """Keys of the conversations that have continued it, at most the newest 64."""

    def settle(self) -> None:
        """Read the answer, unless that was done."""
        answer = self.answer
        if answer is not None:
            self.said = answer.said()
            self.answer = None


class ConversationMatch(msgspec.Struct, eq=False, gc=False):
    """The rollout of a call."""

    rollout: str | None = None
    """None: the call opens a new one."""
    ambiguous: bool = False
    """True if the call could belong to another rollout as well."""
    after: ConversationEnd | None = None
    """The end of the conversation that it continues."""
    unread: tuple[ConversationEnd, ...] = ()
    """Ends whose answers must be read before the rollout can be found; then search again."""
    number: int = 0
    """Its number at the leader, if the leader keeps the conversations for this worker."""


class ConversationIndex:
    """The rollouts of recent conversations. On the loop only. Not kept over a restart: after it, the first call of a
    client without an address opens a new rollout."""

    def __init__(self, remembered: int = _REMEMBERED, unread_bytes: int = UNREAD_BYTES) -> None:
        self._remembered = remembered
        self._unread_bytes = unread_bytes
        self._open: OrderedDict[int, list[ConversationEnd]] = OrderedDict()
        self._unread: OrderedDict[ConversationEnd, int] = OrderedDict()
        """Ends with unread answers, and the bytes of each answer."""
        self._weight = 0
        self._responses: OrderedDict[str, str] = OrderedDict()

    def find(self, story: ConversationFingerprint, hints: ConnectionHints) -> ConversationMatch:
        """The rollout that this conversation continues."""
        beginnings, near = story.beginnings, max(1, len(story.beginnings) - _NEAR)
        for length in range(len(beginnings) - 1, near - 1, -1):
            if beginnings[length - 1] in self._open:
                return _choose(self._open[beginnings[length - 1]], story, length, hints)
        # Fast even with tens of thousands of items, so that no other call waits.
        before = beginnings[: near - 1]
        longest = next(filter(self._open.__contains__, reversed(before)), None)
        if longest is None:
            return ConversationMatch()
        return _choose(self._open[longest], story, before.index(longest) + 1, hints)

    def follow(
        self, found: ConversationMatch, story: ConversationFingerprint, hints: ConnectionHints, rollout: str
    ) -> None:
        """Note that the call was given this rollout."""
        if found.after is not None:
            found.after.continued = (*found.after.continued[1 - _CONTINUED :], story.key)
            hints.mixed = hints.mixed or hints.last not in (None, rollout)
        hints.last = rollout

    def remember(
        self, key: int, found: ConversationMatch, hints: ConnectionHints, rollout: str, answer: ReadableAnswer
    ) -> list[ConversationEnd]:
        """Note that a conversation of the rollout (`ConversationFingerprint.key`) was answered. Returns other ends of
        the same conversation, whose answers must be read now."""
        alone = found.after is None or (found.after.alone and found.after.hints is hints)
        ended = ConversationEnd(rollout, hints, alone, answer)
        self._keep(ended, answer.weight)
        candidates = self._open.get(key)
        if candidates is None:
            self._open[key] = [ended]
            if len(self._open) > self._remembered:
                self._drop(self._open.popitem(last=False)[1])
            return []
        candidates.append(ended)
        self._drop(candidates[:-_EQUAL])
        del candidates[:-_EQUAL]
        self._open.move_to_end(key)
        if len({it.rollout for it in candidates}) == 1:
            return []
        return self._take([it for it in candidates if it in self._unread])

    def undo(self, found: ConversationMatch, key: int) -> None:
        """Take back a call that failed: it has not continued its conversation."""
        if found.after is not None and key in found.after.continued:
            at = found.after.continued.index(key)
            found.after.continued = found.after.continued[:at] + found.after.continued[at + 1 :]

    def _keep(self, ended: ConversationEnd, weight: int) -> None:
        self._unread[ended] = weight
        self._weight += weight
        while self._weight > self._unread_bytes:
            for forgotten in self._take([next(iter(self._unread))]):
                forgotten.answer = None

    def _drop(self, some: list[ConversationEnd]) -> None:
        """Drop the answers of ends that no request can continue any more."""
        self._take([ended for ended in some if ended in self._unread])

    def _take(self, some: list[ConversationEnd]) -> list[ConversationEnd]:
        for ended in some:
            self._weight -= self._unread.pop(ended)
        return some

    def find_response(self, response_id: str) -> str | None:
        """The rollout of a `previous_response_id`; None if it is not known."""
        return self._responses.get(response_id)

    def remember_response(self, response_id: str, rollout: str) -> None:
        """Note that the response with this id belongs to the rollout."""
        self._responses[response_id] = rollout
        while len(self._responses) > self._remembered:
            self._responses.popitem(last=False)


def _choose(
    candidates: list[ConversationEnd], story: ConversationFingerprint, length: int, hints: ConnectionHints
) -> ConversationMatch:
    """Choose the one of these equal conversations that the call continues."""
    if len(candidates) == 1 or len({it.rollout for it in candidates}) == 1:
        return ConversationMatch(candidates[-1].rollout, after=candidates[-1])
    if unread := tuple(it for it in candidates if it.answer is not None):
        return ConversationMatch(unread=unread)
    possible = _possible(candidates, story.items[length:])
    if not possible:
        # The answer was edited, or did not come through this gateway.
        own = [it for it in candidates if _owns(hints, it)]
        return ConversationMatch(own[0].rollout, after=own[0]) if len(own) == 1 else ConversationMatch(ambiguous=True)
    chosen = min(possible, key=lambda it: _rank(it, story.key, hints))
    others = [it for it in possible if it.rollout != chosen.rollout]
    return ConversationMatch(chosen.rollout, bool(others) and not _certain(chosen, others, hints), chosen)


def _possible(candidates: list[ConversationEnd], rest: array[int]) -> list[ConversationEnd]:
    """Ends whose answer is the next item. An end whose answer was dropped counts too, unless another matches and it was
    continued."""
    same = [it for it in candidates if it.said and rest[: len(it.said)] == it.said]
    return same + [it for it in candidates if it.said is None and not (same and it.continued)]


def _rank(one: ConversationEnd, key: int, hints: ConnectionHints) -> tuple[bool, ...]:
    """The end with the smallest rank is chosen, of equal ones the first. An end that this very conversation has
    continued already comes last: two agents that say the same are more common than one agent that says it twice."""
    return (
        key in one.continued,
        one.hints is not hints,
        bool(one.continued),
        one.hints.peer != hints.peer,
        one.said is None,
    )


def _owns(hints: ConnectionHints, one: ConversationEnd) -> bool:
    """True if the connection and the rollout have been used only with each other."""
    return one.hints is hints and one.alone and hints.last == one.rollout and not hints.mixed


def _certain(chosen: ConversationEnd, others: list[ConversationEnd], hints: ConnectionHints) -> bool:
    """True if the call can belong to none of the others."""
    if chosen.continued or any(it.hints is hints for it in others):
        return False
    return _owns(hints, chosen) or (
        chosen.hints.peer == hints.peer and all(it.hints.peer != hints.peer for it in others)
    )
