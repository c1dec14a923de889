"""Rollouts of clients that say nothing: a request that continues a conversation belongs where the conversation began.

Agents resend the whole conversation with every call. A request whose first items are all of an earlier request,
followed by the answer to it, continues that one. An item is known by its raw bytes when it comes again, and only when
it is new is it read: what counts is what it says, not how its JSON is written (clients move cache markers from turn to
turn). What comes before every item is known by a sum (`Story`), so that the longest known beginning is found at once.

Equal beginnings are told apart by the answers they got. An answer is read when there are two to tell apart, never
before, and not on the loop. Where the answers are equal too, the connection decides, then whose last answer has not
been continued yet, then the client's address, then who waits longest. That is certain where the connection, or the
address, has never had to do with anybody else's conversation; otherwise the rollout is marked: its calls may be
somebody else's, who has done exactly the same.

State lives in memory, as digests, bounded: the longest untouched conversations are forgotten first, and of equal
openings the oldest. After a restart a conversation goes on as a new rollout.
"""

from __future__ import annotations

import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from operator import mul
from typing import Final, TypeAlias

from msgspec import Raw

_REMEMBERED: Final = 20_000
_EQUAL: Final = 64
_ITEMS: Final = 1 << 17
"""Items that are known by their raw bytes."""
_LARGE: Final = 256 << 10
"""Bytes of an item above which it is not read: it must come again as it was."""
_LATEST_BYTES: Final = 32 << 20
"""Of the requests whose items the next ones are compared with."""
_LONG: Final = 8
"""Items from which this is worth it."""
_OPENING: Final = 2
"""Items by which an agent's task is known."""
_UNREAD_BYTES: Final = 32 << 20
"""Of answers that nobody had to read yet."""


Source: TypeAlias = Callable[[bytes], bytes]
"""What an item says; nothing of one that does not count."""


def new_rollout() -> str:
    """A fresh name that sorts by time."""
    return f"i-{time.time_ns() // 1_000_000:011x}-{secrets.token_hex(4)}"


@dataclass(slots=True, eq=False)
class Way:
    """A connection, as far as it tells whose calls come on it."""

    peer: str = ""
    """The client's address."""
    last: str | None = None
    """The implicit rollout of its last call."""
    mixed: bool = False
    """Whether conversations were seen to take turns on it: it belongs to a pool."""


@dataclass(slots=True, frozen=True)
class Story:
    """A conversation: a number for each item, and one for each beginning, the first item alone first."""

    items: list[int]
    beginnings: list[int]

    @property
    def key(self) -> int:
        """What stands for it as a whole."""
        return self.beginnings[-1]


EMPTY: Final = Story([], [])


@dataclass(slots=True, frozen=True)
class Answer:
    """The answer to a call, not looked at yet."""

    body: Callable[[], bytes]
    """Puts it together, without content encoding."""
    stream: bool
    weight: int
    """Bytes that this holds in memory."""
    replies: Callable[[bytes, bool], list[bytes]]
    """Reads the body: the fingerprint sources of its items."""


class Fingerprints:
    """Items and what they say as numbers."""

    def __init__(self, latest_bytes: int = _LATEST_BYTES) -> None:
        self._known: dict[str, dict[int, int]] = {}
        """By dialect: what an item says, by the hash of its raw bytes."""
        self._weights: list[int] = []
        self._latest: OrderedDict[tuple[int, ...], tuple[list[Raw], Story, int]] = OrderedDict()
        """The newest long conversation of each opening, its story, and the bytes that it holds."""
        self._latest_bytes = latest_bytes
        self._held = 0

    def story(self, kind: str, items: list[Raw], source: Source, size: int) -> Story:
        """The conversation of these items of a dialect. Most begin with one that was here before: comparing them costs
        a fraction of reading them. `size`: bytes of the request. On the loop only."""
        if len(items) < _LONG:
            return self.read(kind, items, source)
        opening = (*(hash(bytes(item)) for item in items[:_OPENING]), hash(kind))
        before, story, held = self._latest.pop(opening, ([], EMPTY, 0))
        if items[: len(before)] != before:
            before, story = [], EMPTY
        story = self._went_on(story, self._numbers(kind, items[len(before) :], source))
        self._held += size - held
        self._latest[opening] = items, story, size
        while self._held > self._latest_bytes:
            self._held -= self._latest.popitem(last=False)[1][2]
        return story

    def read(self, kind: str, items: list[Raw], source: Source) -> Story:
        """The same, on any thread."""
        return self._went_on(EMPTY, self._numbers(kind, items, source))

    def _went_on(self, story: Story, new: list[int]) -> Story:
        first, last = len(story.items), len(story.items) + len(new)
        while len(self._weights) < last:
            self._weights.append(random.getrandbits(64))
        # With weights that nobody knows, different beginnings have equal sums once in 2**64.
        sums = accumulate(map(mul, new, self._weights[first:last]), initial=story.beginnings[-1] if first else 0)
        next(sums)
        return Story(story.items + new, [*story.beginnings, *sums])

    def _numbers(self, kind: str, items: list[Raw], source: Source) -> list[int]:
        known = self._known.setdefault(kind, {})
        if len(known) > _ITEMS:
            known.clear()
        hashes = [hash(bytes(item)) if len(memoryview(item)) <= _LARGE else 0 for item in items]
        found = [known.get(it) if it else None for it in hashes]
        if None in found:
            found = [self._number(known, *each, source) for each in zip(found, hashes, items, strict=True)]
        return [it for it in found if it]

    def _number(self, known: dict[int, int], found: int | None, hashed: int, item: Raw, source: Source) -> int:
        """0 of an item that does not count."""
        if found is not None:
            return found
        if not hashed:
            return _number(bytes(item))
        said = source(bytes(item))
        known[hashed] = number = _number(said) if said else 0
        return number


def _number(source: bytes) -> int:
    """Never 0. A large one is hashed by what lets other threads run meanwhile."""
    if len(source) > _LARGE:
        return int.from_bytes(blake2b(source, digest_size=8).digest()) or 1
    return hash(source) or 1


@dataclass(slots=True, eq=False)
class Ended:
    """A call that was answered: the end of a conversation, as far as one rollout has brought it."""

    rollout: str
    way: Way
    alone: bool
    """Whether all calls of its rollout so far came this way."""
    answer: Answer | None
    """Its answer, as long as that was not read; None too when it was so long ago that nobody can read it."""
    said: list[int] | None = None
    """The items of its answer; None where it was not read."""
    continued: list[int] = field(default_factory=list[int])
    """The conversations that have continued it."""

    def settle(self) -> None:
        """Reads the answer, where that is still to be done."""
        answer = self.answer
        if answer is not None:
            self.said = [_number(source) for source in answer.replies(answer.body(), answer.stream)]
            self.answer = None


@dataclass(slots=True)
class Found:
    """Whose call it is."""

    rollout: str | None = None
    """None: it opens a new one."""
    ambiguous: bool = False
    """Whether it could be another's as well."""
    after: Ended | None = None
    """What it continues."""
    unread: list[Ended] = field(default_factory=list[Ended])
    """What must be read before this can be told; then ask again."""


class Conversations:
    """Which rollout the conversations of late belong to. On the loop only.

    Not kept over a restart: the first call after it of a client that says nothing opens a new rollout.
    """

    def __init__(self, remembered: int = _REMEMBERED, unread_bytes: int = _UNREAD_BYTES) -> None:
        self._remembered = remembered
        self._unread_bytes = unread_bytes
        self._open: OrderedDict[int, list[Ended]] = OrderedDict()
        self._unread: OrderedDict[Ended, int] = OrderedDict()
        """Whose answers nobody had to read yet, and what they weigh."""
        self._weight = 0
        self._responses: OrderedDict[str, str] = OrderedDict()

    def find(self, story: Story, way: Way) -> Found:
        """The rollout that this conversation continues."""
        beginnings = story.beginnings
        for length in range(len(beginnings) - 1, 0, -1):
            candidates = self._open.get(beginnings[length - 1])
            if candidates:
                return _choose(candidates, story, length, way)
        return Found()

    def follow(self, found: Found, story: Story, way: Way, rollout: str) -> None:
        """The call has been given this rollout."""
        if found.after is not None:
            found.after.continued.append(story.key)
            way.mixed = way.mixed or way.last not in (None, rollout)
        way.last = rollout

    def remember(self, story: Story, found: Found, way: Way, rollout: str, answer: Answer) -> list[Ended]:
        """This conversation of the rollout was answered. Returns what must be settled now: the same of others."""
        alone = found.after is None or (found.after.alone and found.after.way is way)
        candidates = self._open.setdefault(story.key, [])
        candidates.append(Ended(rollout, way, alone, answer))
        self._keep(candidates[-1], answer.weight)
        del candidates[:-_EQUAL]
        self._open.move_to_end(story.key)
        while len(self._open) > self._remembered:
            self._open.popitem(last=False)
        if len({it.rollout for it in candidates}) == 1:
            return []
        return self._take([it for it in candidates if it in self._unread])

    def undo(self, found: Found, story: Story) -> None:
        """The call came to nothing: what it would have continued has not been continued."""
        if found.after is not None and story.key in found.after.continued:
            found.after.continued.remove(story.key)

    def _keep(self, ended: Ended, weight: int) -> None:
        self._unread[ended] = weight
        self._weight += weight
        while self._weight > self._unread_bytes:
            for forgotten in self._take([next(iter(self._unread))]):
                forgotten.answer = None

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


def _choose(candidates: list[Ended], story: Story, length: int, way: Way) -> Found:
    """Which of those whose conversation this begins with it continues."""
    if len({it.rollout for it in candidates}) == 1:
        return Found(candidates[-1].rollout, after=candidates[-1])
    if unread := [it for it in candidates if it.answer is not None]:
        return Found(unread=unread)
    possible = _possible(candidates, story.items[length:])
    if not possible:
        # It was edited, or is no answer of ours at all.
        own = [it for it in candidates if _owns(way, it)]
        return Found(own[0].rollout, after=own[0]) if len(own) == 1 else Found(ambiguous=True)
    chosen = min(possible, key=lambda it: _rank(it, story.key, way))
    others = [it for it in possible if it.rollout != chosen.rollout]
    return Found(chosen.rollout, bool(others) and not _certain(chosen, others, way), chosen)


def _possible(candidates: list[Ended], rest: list[int]) -> list[Ended]:
    """Those whose answer is what comes next. Whose answer nobody knows any more counts while it was not continued."""
    same = [it for it in candidates if it.said and rest[: len(it.said)] == it.said]
    return same + [it for it in candidates if it.said is None and not (same and it.continued)]


def _rank(one: Ended, key: int, way: Way) -> tuple[bool, ...]:
    """The smallest is chosen, of equals the first. What this very conversation has continued already comes last: the
    same twice is more likely of two agents than of one."""
    return (
        key in one.continued,
        one.way is not way,
        bool(one.continued),
        one.way.peer != way.peer,
        one.said is None,
    )


def _owns(way: Way, one: Ended) -> bool:
    """Whether the connection and the rollout have had to do with each other only."""
    return one.way is way and one.alone and way.last == one.rollout and not way.mixed


def _certain(chosen: Ended, others: list[Ended], way: Way) -> bool:
    """Whether it cannot be any of the others."""
    if chosen.continued or any(it.way is way for it in others):
        return False
    return _owns(way, chosen) or (chosen.way.peer == way.peer and all(it.way.peer != way.peer for it in others))
