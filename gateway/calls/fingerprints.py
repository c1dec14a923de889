"""Conversations as numbers: what each item says, and each beginning of the conversation. Pure.

Agents resend the whole conversation with every call, and of most calls everything but the end was here before, byte for
byte. Such a beginning is a stem: the request is compared with it, which costs a hundredth of reading it, and read is
the request without it. What remains is known item by item: by its raw bytes when it comes again, and only what is new
is read for what it says, not for how its JSON is written. A stem ends some items before the request's end, because
clients move cache markers about there.

A stem is looked for by the bytes before the last of some places that it reaches, each an eighth further than the one
before.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from itertools import accumulate
from operator import mul
from typing import Final, Protocol, TypeAlias, cast

import msgspec
from msgspec import Raw

from penstock.gateway.dialects.items import LARGE, Items

LONGEST: Final = 4 << 20
"""Bytes of a request above which it has no stem: comparing it would hold others up."""
_STEMS_BYTES: Final = 32 << 20
_ITEMS: Final = 1 << 14
"""Items that are known by their raw bytes; twice as many at most. So many are forgotten in well below a millisecond."""
_LARGE_ITEM: Final = 256 << 10
"""Bytes of an item above which it is not read: it must come again as it was."""
_HEAD: Final = 2
"""Items that are always read: an agent's task, and instructions that are no item of the request's list."""
_MOVING: Final = 3
"""Items at the end that a stem leaves out."""
_LONG: Final = _HEAD + 2 * _MOVING
"""Items from which a stem is worth it."""
_SHORTEST: Final = 4 << 10
"""Bytes of a request below which reading it costs no more than following it."""
_PLACES: Final = [int(_SHORTEST * 1.125**step) for step in range(60)]
_SUMS: Final = (1 << 63) - 1
_BEFORE: Final = 128
"""Bytes by which a stem is found."""
_TRIES: Final = 8
"""Places that are looked at: a request may be two and a half times as long as its stem."""

Source: TypeAlias = Callable[[bytes], bytes]
"""What an item says; nothing of one that does not count."""


class Reads(Protocol):
    """The slice of a dialect that is needed here."""

    @property
    def name(self) -> str: ...
    def items(self, request: bytes) -> Items: ...
    def source(self, item: bytes) -> bytes: ...


class Story(msgspec.Struct, frozen=True, gc=False):
    """A conversation: a number for each item, and one for each beginning, the first item alone first."""

    items: array[int]
    beginnings: array[int]

    @property
    def key(self) -> int:
        """What stands for it as a whole."""
        return self.beginnings[-1]


EMPTY: Final = Story(array("q"), array("q"))


class Read(msgspec.Struct, frozen=True, gc=False):
    """What was read of a request."""

    items: Items
    """Those that had to be read, and what else a head needs."""
    story: Story
    """Of all of them."""
    numbers: list[int]
    """Of the items that were read; 0 of one that does not count."""


class _Stem(msgspec.Struct, frozen=True, gc=False):
    dialect: str
    bytes: Raw
    """The request up to an item. Holds all of it."""
    end: int
    """How long that is."""
    cut: int
    """Where in it the items begin that need not be read again."""
    head: list[Raw]
    """The items before that."""
    story: Story
    """Of all items up to its end."""
    key: bytes
    weight: int
    """Bytes of the request."""


class Fingerprints:
    """Stems, items and what they say."""

    def __init__(self, stems_bytes: int = _STEMS_BYTES) -> None:
        self._said: dict[str, dict[int, int]] = {}
        """By dialect: what an item says, by the hash of its raw bytes."""
        self._said_before: dict[str, dict[int, int]] = {}
        self._weights: list[int] = []
        self._stems: OrderedDict[bytes, _Stem] = OrderedDict()
        self._stems_bytes = stems_bytes
        self._held = 0

    def follow(self, dialect: Reads, body: bytes) -> Read | None:
        """The conversation of a request that goes on from a stem; None of any other. On the loop only."""
        stem = self._find(dialect.name, body)
        if stem is None or stem.cut + len(body) - stem.end > LARGE:
            return None
        rest = body[: stem.cut] + body[stem.end :]
        items = dialect.items(rest)
        if items.raw[:_HEAD] != stem.head:
            return None
        new = items.raw[_HEAD:]
        read = self._read(stem.story, dialect, Items(items.asked, new, items.previous), len(rest))
        longer = _longer(body, stem, read) if len(new) > 2 * _MOVING else None
        if longer is not None:
            self._drop(stem)
            self._keep(longer)
        return read

    def read(self, dialect: Reads, body: bytes) -> Read:
        """The conversation of any request. On any thread."""
        return self._read(EMPTY, dialect, dialect.items(body), len(body))

    def keep(self, dialect: Reads, body: bytes, read: Read) -> None:
        """What comes later may go on from this request, which was read. On the loop only."""
        raw = read.items.raw
        if len(raw) < _LONG or not _SHORTEST <= len(body) <= LONGEST:
            return
        cut = body.find(memoryview(raw[_HEAD]))
        told = _part(read.story, _counting(read.numbers[:_HEAD]))
        rest = Read(Items(None, raw[_HEAD:]), read.story, read.numbers[_HEAD:])
        stem = _longer(body, _Stem(dialect.name, Raw(), cut, cut, raw[:_HEAD], told, b"", 0), rest)
        if stem is None:
            return
        left = body[:cut] + body[stem.end :]
        # What is to be left out must be these items, and not the same bytes in another place.
        if len(left) <= LARGE and dialect.items(left).raw == raw[:_HEAD] + raw[-_MOVING:]:
            self._keep(stem)

    def _find(self, dialect: str, body: bytes) -> _Stem | None:
        last = bisect_right(_PLACES, len(body)) if len(body) <= LONGEST else 0
        for place in _PLACES[max(0, last - _TRIES) : last][::-1]:
            stem = self._stems.get(body[place - _BEFORE : place])
            if stem is not None and stem.dialect == dialect and Raw(memoryview(body)[: stem.end]) == stem.bytes:
                self._stems.move_to_end(stem.key)
                return stem
        return None

    def _keep(self, stem: _Stem) -> None:
        if (before := self._stems.get(stem.key)) is not None:
            self._drop(before)
        self._stems[stem.key] = stem
        self._held += stem.weight
        while self._held > self._stems_bytes:
            self._drop(next(iter(self._stems.values())))

    def _drop(self, stem: _Stem) -> None:
        del self._stems[stem.key]
        self._held -= stem.weight

    def _read(self, story: Story, dialect: Reads, items: Items, size: int) -> Read:
        """`story`: what comes before these; `size`: bytes that they were cut from."""
        numbers = self._numbers(dialect, items.raw, size)
        new = array("q", filter(None, numbers))
        first, last = len(story.items), len(story.items) + len(new)
        while len(self._weights) < last:
            self._weights.append(random.getrandbits(63))
        # With weights that nobody knows, different beginnings hardly ever have equal sums.
        sums = accumulate(map(mul, new, self._weights[first:last]), initial=story.beginnings[-1] if first else 0)
        next(sums)
        beginnings = story.beginnings + array("q", (it & _SUMS for it in sums))
        return Read(items, Story(story.items + new, beginnings), numbers)

    def _numbers(self, dialect: Reads, items: list[Raw], size: int) -> list[int]:
        """0 for an item that does not count."""
        said = self._said.get(dialect.name)
        if said is None or len(said) > _ITEMS:
            self._said_before[dialect.name], said = said or {}, {}
            self._said[dialect.name] = said
        if size > LARGE:
            # One after the other, so that other threads may run.
            return [self._number(said, dialect, item) for item in items]
        found = [*map(said.get, map(hash, map(bytes, items)))]
        if None in found:
            found = [
                self._number(said, dialect, raw) if it is None else it for it, raw in zip(found, items, strict=True)
            ]
        return cast(list[int], found)

    def _number(self, said: dict[int, int], dialect: Reads, raw: Raw) -> int:
        if len(memoryview(raw)) > _LARGE_ITEM:
            return number_of(memoryview(raw))
        item = bytes(raw)
        known = hash(item)
        number = said.get(known, self._said_before[dialect.name].get(known))
        if number is None:
            source = dialect.source(item)
            number = number_of(source) if source else 0
        said[known] = number
        return number


def number_of(source: bytes | memoryview) -> int:
    """What an item says as a number, never 0. A large one is hashed by what lets other threads run meanwhile."""
    if len(source) > _LARGE_ITEM:
        return int.from_bytes(blake2b(source, digest_size=8).digest(), signed=True) or 1
    return hash(source) or 1


def _longer(body: bytes, stem: _Stem, read: Read) -> _Stem | None:
    """A stem up to the last of the items that were read after one; None where they do not stand right after it, written
    as most clients write them."""
    items = read.items.raw[: 1 - _MOVING]
    for mark in (b",", b", "):
        text = mark.join(items)
        if body.startswith(text, stem.end):
            end = stem.end + len(text) - len(memoryview(items[-1]))
            place = bisect_right(_PLACES, end) - 1
            story = _part(read.story, len(stem.story.items) + _counting(read.numbers[:-_MOVING]))
            start, key = Raw(memoryview(body)[:end]), body[_PLACES[place] - _BEFORE : _PLACES[place]]
            made = _Stem(stem.dialect, start, end, stem.cut, stem.head, story, key, len(body))
            return made if place >= 0 else None
    return None


def _part(story: Story, count: int) -> Story:
    return Story(story.items[:count], story.beginnings[:count])


def _counting(numbers: list[int]) -> int:
    return sum(map(bool, numbers))
