"""Conversations as numbers: one for the content of each item, and one for each beginning of the conversation. Pure.

Agents resend the whole conversation with every call, and most requests begin with bytes that were seen before. Such a
beginning is a *stem*: the request is compared with it, at a hundredth of the cost of reading it. The bytes after the
conversation (the model, tools) are compared too; if they are the same, only the new items are read. An item that was
seen before is recognised by its raw bytes. A new item is read for its content, however its JSON is written.

A stem ends in two places: with its last item, and some items before that, because clients move cache markers there.
Stems are found at fixed places in a request, each an eighth further than the one before: the key of a stem is the bytes
before the last place that it reaches.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from hashlib import blake2b
from typing import Final, Protocol, cast

import msgspec
from msgspec import Raw

from penstock.gateway.wire.dialects.loose_json import UNREADABLE, RequestFields, detached_fields
from penstock.gateway.wire.dialects.request_body import LARGE, ConversationItems

LONGEST: Final = 4 << 20
"""Most bytes of a request with a stem: comparing a longer one would delay other calls."""
_STEMS_BYTES: Final = 32 << 20
_ITEMS: Final = 1 << 14
"""Number of items that are known by their raw bytes; at most twice as many. Dropping them takes well below a
millisecond."""
_LARGE_ITEM: Final = 256 << 10
"""Most bytes of an item that is read; a larger one must come again byte for byte."""
_HEAD: Final = 2
"""Number of first items that are always read: an agent's task, and instructions outside the request's list."""
_MOVING: Final = 3
"""Number of items at the end of a stem that clients may write otherwise the next time."""
_NEW: Final = 8
"""Number of items after a stem beyond which the stem is extended."""
_LONG: Final = _HEAD + 2 * _MOVING
"""Least items of a conversation with a stem."""
_SHORTEST: Final = 8 << 10
"""Least bytes of a request with a stem: reading a shorter one costs no more than following it."""
_PLACES: Final = [int(_SHORTEST * 1.125**step) for step in range(60)]
_BEFORE: Final = 128
"""Number of bytes that are the key of a stem."""
_TRIES: Final = 8
"""Number of places that are tried: a request may be two and a half times as long as its stem."""


class ItemReader(Protocol):
    """The part of a dialect that is needed here."""

    @property
    def name(self) -> str: ...
    def items(self, request: bytes) -> ConversationItems: ...
    def item_fingerprint(self, item: bytes) -> bytes: ...


class ConversationFingerprint(msgspec.Struct, frozen=True, gc=False):
    """A conversation: a number for each item, and one for each beginning, from the first item alone to all."""

    items: array[int]
    beginnings: array[int]

    @property
    def key(self) -> int:
        """The number of the whole conversation."""
        return self.beginnings[-1]


EMPTY: Final = ConversationFingerprint(array("q"), array("q"))


class ParsedConversation(msgspec.Struct, frozen=True, gc=False):
    """The result of reading a request."""

    items: ConversationItems
    """The items that had to be read, with the other facts of the request."""
    story: ConversationFingerprint
    """The conversation of all items."""
    numbers: list[int]
    """Numbers of the items that were read; 0 for one that does not count."""


class _StemEnd(msgspec.Struct, frozen=True, gc=False):
    """The request up to the end of an item, and the conversation up to there."""

    bytes: Raw
    """Holds all of the request."""
    length: int
    story: ConversationFingerprint


class _StemStart(msgspec.Struct, frozen=True, gc=False):
    """The common beginning of a stem's requests; stays the same as the stem grows."""

    dialect: str
    first: int
    """Offset in the request at which the items begin that need not be read again."""
    head: list[Raw]
    """The items before that."""
    mark: bytes
    """The bytes between two items."""


class _Stem(msgspec.Struct, frozen=True, gc=False):
    start: _StemStart
    ends: tuple[_StemEnd, _StemEnd]
    """The later one first."""
    rest: bytes
    """The request after its last item."""
    asked: RequestFields | None
    previous: str | None
    key: bytes
    weight: int
    """Bytes of the request."""


_items = msgspec.json.Decoder(list[Raw]).decode


class FingerprintCache:
    """The known stems and items."""

    def __init__(self, stems_bytes: int = _STEMS_BYTES) -> None:
        self._said: dict[str, dict[int, int]] = {}
        """Number of an item by the hash of its raw bytes, by dialect."""
        self._said_before: dict[str, dict[int, int]] = {}
        self._stems: OrderedDict[bytes, _Stem] = OrderedDict()
        self._stems_bytes = stems_bytes
        self._held = 0

    def follow(self, dialect: ItemReader, body: bytes) -> ParsedConversation | None:
        """The conversation of a request that continues a stem; None for any other. On the loop only."""
        found = self._find(dialect.name, body)
        if found is None:
            return None
        stem, end = found
        size = len(body) - end.length
        if stem.start.first + size > LARGE:
            return None
        last = len(body) - len(stem.rest)
        if end.length <= last and body.endswith(stem.rest):
            try:
                items = ConversationItems(stem.asked, _items(b"[0" + body[end.length : last] + b"]")[1:], stem.previous)
            except UNREADABLE:
                return None
        else:
            rest = dialect.items(body[: stem.start.first] + body[end.length :])
            if rest.raw[:_HEAD] != stem.start.head:
                return None
            items = ConversationItems(rest.asked, rest.raw[_HEAD:], rest.previous)
        read = self._read(end.story, dialect, items, size)
        if len(items.raw) > _NEW:
            longer = _stem(stem.start, end, body, read)
            if longer is not None:
                self._drop(stem)
                self._keep(longer)
        return read

    def read(self, dialect: ItemReader, body: bytes) -> ParsedConversation:
        """Read the conversation of any request. On any thread."""
        return self._read(EMPTY, dialect, dialect.items(body), len(body))

    def add_stem(self, dialect: ItemReader, body: bytes, read: ParsedConversation) -> None:
        """Make a stem of this request, which was read, for later ones. On the loop only."""
        raw = read.items.raw
        if len(raw) < _LONG or not _SHORTEST <= len(body) <= LONGEST or body.rfind(bytes(raw[-_MOVING])) < _SHORTEST:
            return
        first = body.find(memoryview(raw[_HEAD]))
        items = ConversationItems(read.items.asked, raw[_HEAD:], read.items.previous)
        told = _part(read.story, _counting(read.numbers[:_HEAD]))
        for mark in (b",", b", "):
            before = _StemEnd(Raw(), first - len(mark), told)
            start = _StemStart(dialect.name, before.length, raw[:_HEAD], mark)
            made = _stem(start, before, body, ParsedConversation(items, read.story, read.numbers[_HEAD:]))
            if made is not None:
                # The bytes to leave out must be these items, and not the same bytes in another place.
                left = body[: before.length] + made.rest
                if len(left) <= LARGE and dialect.items(left).raw == raw[:_HEAD]:
                    self._keep(made)
                return

    def _find(self, dialect: str, body: bytes) -> tuple[_Stem, _StemEnd] | None:
        last = bisect_right(_PLACES, len(body)) if len(body) <= LONGEST else 0
        view = memoryview(body)
        for place in _PLACES[max(0, last - _TRIES) : last][::-1]:
            stem = self._stems.get(body[place - _BEFORE : place])
            if stem is not None and stem.start.dialect == dialect:
                for end in stem.ends:
                    if Raw(view[: end.length]) == end.bytes:
                        self._stems.move_to_end(stem.key)
                        return stem, end
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

    def _read(
        self, story: ConversationFingerprint, dialect: ItemReader, items: ConversationItems, size: int
    ) -> ParsedConversation:
        """`story`: the conversation before these items; `size`: bytes that they were cut from."""
        numbers = self._numbers(dialect, items.raw, size)
        total = story.beginnings[-1] if story.beginnings else 0
        new, sums = array("q"), array("q")
        for number in numbers:
            if number:
                new.append(number)
                # The numbers are salted hashes, so nobody can predict these.
                total = hash((total, number))
                sums.append(total)
        return ParsedConversation(items, ConversationFingerprint(story.items + new, story.beginnings + sums), numbers)

    def _numbers(self, dialect: ItemReader, items: list[Raw], size: int) -> list[int]:
        """The numbers of items; 0 for an item that does not count."""
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

    def _number(self, said: dict[int, int], dialect: ItemReader, raw: Raw) -> int:
        if len(memoryview(raw)) > _LARGE_ITEM:
            return number_of(memoryview(raw))
        item = bytes(raw)
        known = hash(item)
        number = said.get(known, self._said_before[dialect.name].get(known))
        if number is None:
            source = dialect.item_fingerprint(item)
            number = number_of(source) if source else 0
        said[known] = number
        return number


def number_of(source: bytes | memoryview) -> int:
    """The content of an item as a number, never 0. A large item is hashed by a function that lets other threads run
    meanwhile."""
    if len(source) > _LARGE_ITEM:
        return int.from_bytes(blake2b(source, digest_size=8).digest(), signed=True) or 1
    return hash(source) or 1


def _stem(start: _StemStart, end: _StemEnd, body: bytes, read: ParsedConversation) -> _Stem | None:
    """A stem up to the last of the items that were read after this end, more than `_MOVING`; None if they do not follow
    the end directly, with the mark between them."""
    raw, mark = read.items.raw, start.mark
    text = mark.join([b"", *raw])
    last = end.length + len(text)
    moving = len(mark.join([b"", *raw[-_MOVING:]]))
    place = bisect_right(_PLACES, last - moving) - 1
    if place < 0 or not body.startswith(text, end.length):
        return None
    view = memoryview(body)
    story = _part(read.story, len(end.story.items) + _counting(read.numbers[:-_MOVING]))
    ends = (_StemEnd(Raw(view[:last]), last, read.story), _StemEnd(Raw(view[: last - moving]), last - moving, story))
    asked, key = read.items.asked, body[_PLACES[place] - _BEFORE : _PLACES[place]]
    return _Stem(start, ends, body[last:], asked and detached_fields(asked), read.items.previous, key, len(body))


def _part(story: ConversationFingerprint, count: int) -> ConversationFingerprint:
    return ConversationFingerprint(story.items[:count], story.beginnings[:count])


def _counting(numbers: list[int]) -> int:
    return sum(map(bool, numbers))
