"""Finds the rollout of a call without an address: a request that continues a conversation belongs to its rollout.

Agents resend the whole conversation with every call. A request whose first items are all items of an earlier request,
followed by the answer to it, continues that one. Items are compared by their content, not by how their JSON is written.
Every beginning of a conversation has a number (`fingerprints.Story`), so the longest known one is found at once.

Answers tell equal beginnings apart. An answer is read only when there are two to tell apart, and not on the event loop.
If the answers are equal too, the connection decides, then whose last answer has not been continued yet, then the
client's address, then who has waited longest. That is certain if the connection, or the address, has never carried
another of these conversations. Otherwise the rollout is marked: its calls may belong to another agent that has done
exactly the same.

State is kept in memory as digests, within bounds: the longest untouched conversations are dropped first, and of equal
openings the oldest. After a restart a conversation goes on as a new rollout. Of several workers the first keeps them
for all (`calls.joining`, `server.conversing`).
"""

from __future__ import annotations

import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from penstock.gateway.calls.fingerprints import Story, number_of
from penstock.gateway.http.client_connection import Hints

_REMEMBERED: Final = 20_000
_EQUAL: Final = 64
_CONTINUED: Final = 64
_NEAR: Final = 16
"""Items at the end; the new ones most often begin among these."""
UNREAD_BYTES: Final = 16 << 20
"""Bytes of answers that are kept unread."""


def new_rollout() -> str:
    """A fresh name that sorts by time. It is no secret: random bytes of the system would cost more than everything else
    that opening a rollout takes.
    """
    return f"i-{time.time_ns() // 1_000_000:011x}-{random.getrandbits(32):08x}"


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The unread answer to a call."""

    body: Callable[[], bytes]
    """Puts it together, without content encoding."""
    stream: bool
    weight: int
    """Bytes that this holds in memory."""
    replies: Callable[[bytes, bool], list[bytes]]
    """Reads the body: the fingerprint sources of its items."""

    def said(self) -> array[int]:
        """Reads it: its items."""
        return array("q", map(number_of, self.replies(self.body(), self.stream)))


class Readable(Protocol):
    """As `Answer`, wherever it is."""

    @property
    def weight(self) -> int: ...
    def said(self) -> array[int]: ...


class Ended(msgspec.Struct, eq=False, gc=False):
    """The end of a conversation: a call that was answered, in one rollout."""

    rollout: str
    hints: Hints
    alone: bool
    """Whether all calls of its rollout so far came on this connection."""
    answer: Readable | None
    """Its answer until it is read; None also when it is so old that it was dropped."""
    said: array[int] | None = None
    """The items of its answer; None until it is read."""
    continued: tuple[int, ...] = ()
    """The conversations that have continued it; of very many the newest."""

    def settle(self) -> None:
        """Reads the answer, unless that was done."""
        answer = self.answer
        if answer is not None:
            self.said = answer.said()
            self.answer = None


class Found(msgspec.Struct, gc=False):
    """The rollout of a call."""

    rollout: str | None = None
    """None: the call opens a new one."""
    ambiguous: bool = False
    """Whether the call could belong to another rollout as well."""
    after: Ended | None = None
    """The end of the conversation that it continues."""
    unread: tuple[Ended, ...] = ()
    """What must be read before this can be decided; then ask again."""
    number: int = 0
    """What the worker that keeps the conversations calls it, where that is another one."""


class Conversations:
    """Which rollout recent conversations belong to. On the loop only. Not kept over a restart: after it, the first call
    of a client without an address opens a new rollout.
    """

    def __init__(self, remembered: int = _REMEMBERED, unread_bytes: int = UNREAD_BYTES) -> None:
        self._remembered = remembered
        self._unread_bytes = unread_bytes
        self._open: OrderedDict[int, list[Ended]] = OrderedDict()
        self._unread: OrderedDict[Ended, int] = OrderedDict()
        """Whose answers nobody had to read yet, and what they weigh."""
        self._weight = 0
        self._responses: OrderedDict[str, str] = OrderedDict()

    def find(self, story: Story, hints: Hints) -> Found:
        """The rollout that this conversation continues."""
        beginnings, near = story.beginnings, max(1, len(story.beginnings) - _NEAR)
        for length in range(len(beginnings) - 1, near - 1, -1):
            if beginnings[length - 1] in self._open:
                return _choose(self._open[beginnings[length - 1]], story, length, hints)
        # With tens of thousands of items this holds no other call up.
        before = beginnings[: near - 1]
        longest = next(filter(self._open.__contains__, reversed(before)), None)
        if longest is None:
            return Found()
        return _choose(self._open[longest], story, before.index(longest) + 1, hints)

    def follow(self, found: Found, story: Story, hints: Hints, rollout: str) -> None:
        """Notes that the call was given this rollout."""
        if found.after is not None:
            found.after.continued = (*found.after.continued[1 - _CONTINUED :], story.key)
            hints.mixed = hints.mixed or hints.last not in (None, rollout)
        hints.last = rollout

    def remember(self, key: int, found: Found, hints: Hints, rollout: str, answer: Readable) -> list[Ended]:
        """Notes that a conversation of the rollout (`Story.key`) was answered. Returns other ends of the same
        conversation, whose answers must be read now.
        """
        alone = found.after is None or (found.after.alone and found.after.hints is hints)
        ended = Ended(rollout, hints, alone, answer)
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

    def undo(self, found: Found, key: int) -> None:
        """Takes back a call that failed: it has not continued its conversation."""
        if found.after is not None and key in found.after.continued:
            at = found.after.continued.index(key)
            found.after.continued = found.after.continued[:at] + found.after.continued[at + 1 :]

    def _keep(self, ended: Ended, weight: int) -> None:
        self._unread[ended] = weight
        self._weight += weight
        while self._weight > self._unread_bytes:
            for forgotten in self._take([next(iter(self._unread))]):
                forgotten.answer = None

    def _drop(self, some: list[Ended]) -> None:
        """Nobody can continue these any more: nor need their answers be kept."""
        self._take([ended for ended in some if ended in self._unread])

    def _take(self, some: list[Ended]) -> list[Ended]:
        for ended in some:
            self._weight -= self._unread.pop(ended)
        return some

    def find_response(self, response_id: str) -> str | None:
        """The rollout of a `previous_response_id`."""
        return self._responses.get(response_id)

    def remember_response(self, response_id: str, rollout: str) -> None:
        """The response with this id belongs to the rollout."""
        self._responses[response_id] = rollout
        while len(self._responses) > self._remembered:
            self._responses.popitem(last=False)


def _choose(candidates: list[Ended], story: Story, length: int, hints: Hints) -> Found:
    """Chooses which of these equal conversations the call continues."""
    if len(candidates) == 1 or len({it.rollout for it in candidates}) == 1:
        return Found(candidates[-1].rollout, after=candidates[-1])
    if unread := tuple(it for it in candidates if it.answer is not None):
        return Found(unread=unread)
    possible = _possible(candidates, story.items[length:])
    if not possible:
        # The answer was edited, or did not come through this gateway.
        own = [it for it in candidates if _owns(hints, it)]
        return Found(own[0].rollout, after=own[0]) if len(own) == 1 else Found(ambiguous=True)
    chosen = min(possible, key=lambda it: _rank(it, story.key, hints))
    others = [it for it in possible if it.rollout != chosen.rollout]
    return Found(chosen.rollout, bool(others) and not _certain(chosen, others, hints), chosen)


def _possible(candidates: list[Ended], rest: array[int]) -> list[Ended]:
    """Ends whose answer is the next item. One whose answer was dropped counts too, unless another matches and it was
    continued.
    """
    same = [it for it in candidates if it.said and rest[: len(it.said)] == it.said]
    return same + [it for it in candidates if it.said is None and not (same and it.continued)]


def _rank(one: Ended, key: int, hints: Hints) -> tuple[bool, ...]:
    """The end with the smallest rank is chosen, of equal ones the first. An end that this very conversation has
    continued already comes last: two agents say the same more often than one agent says it twice.
    """
    return (
        key in one.continued,
        one.hints is not hints,
        bool(one.continued),
        one.hints.peer != hints.peer,
        one.said is None,
    )


def _owns(hints: Hints, one: Ended) -> bool:
    """Whether the connection and the rollout have been used only with each other."""
    return one.hints is hints and one.alone and hints.last == one.rollout and not hints.mixed


def _certain(chosen: Ended, others: list[Ended], hints: Hints) -> bool:
    """Whether it can be none of the others."""
    if chosen.continued or any(it.hints is hints for it in others):
        return False
    return _owns(hints, chosen) or (
        chosen.hints.peer == hints.peer and all(it.hints.peer != hints.peer for it in others)
    )
