"""Finds the rollout of a call without an address: a request that continues a conversation belongs to its rollout.

Agents resend the whole conversation with every call. A request whose first items are all items of an earlier request,
followed by the answer to it, continues that one. Items are compared by their content, not by how their JSON is written.
Every beginning of a conversation has a number (`ConversationFingerprint`), so the longest known one is
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
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Final, Protocol, cast

import msgspec
from msgspec import Raw

from penstock.gateway.wire.dialects.loose_json import UNREADABLE, RequestFields, detached_fields
from penstock.gateway.wire.dialects.request_body import LARGE, ConversationItems
from penstock.gateway.wire.http.client_connection import ConnectionHints

# Conversations as numbers: one for the content of each item, and one for each beginning of the conversation. Pure.
#
# Agents resend the whole conversation with every call, and most requests begin with bytes that were seen before. Such
# a beginning is a *stem*: the request is compared with it, at a hundredth of the cost of reading it. The bytes after
# the conversation (the model, tools) are compared too; if they are the same, only the new items are read. An item
# that was seen before is recognised by its raw bytes. A new item is read for its content, however its JSON is
# written.
#
# A stem ends in two places: with its last item, and some items before that, because clients move cache markers there.
# Stems are found at fixed places in a request, each an eighth further than the one before: the key of a stem is the
# bytes before the last place that it reaches.

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
    retry: bool = False
    """True if the call repeats one that failed."""


# Calls that their clients repeat.
#
# A call that failed has no answer that a later request could continue. A client that tries again sends the same bytes
# with the same key. The SDKs of OpenAI and Anthropic count their retries in a header, so a failed call is found by its
# request and its count, for `COUNTED_S`, on any connection. Of several such calls, each is repeated once; if these are
# of different rollouts and the connection does not tell which one is meant, the choice is ambiguous. A client that does
# not count must repeat the call on the same connection, next, within `UNCOUNTED_S`. Every other call may be another
# agent's that begins with the same words.

COUNTED_S: Final = 90.0
"""Seconds after a call failed in which a counted retry may come: SDKs wait for up to a minute if they are told to."""
UNCOUNTED_S: Final = 10.0
"""The same for one that is not counted."""


class RepeatableRequest(msgspec.Struct, frozen=True, gc=False):
    """A request without an address, as it is recognised when it comes again."""

    key: int
    """Number of its path, its keys and its body."""
    tries: int | None
    """How often its client has sent it before, as the client says; None if it does not say."""


class FailedCall(msgspec.Struct, frozen=True, gc=False):
    """A call that failed and was not repeated yet."""

    rollout: str
    tries: int | None
    hints: ConnectionHints
    ended: float
    """Monotonic seconds."""


class FailedCalls:
    """The calls without an address that failed lately, by request."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self.calls: OrderedDict[int, list[FailedCall]] = OrderedDict()

    def remember(self, request: RepeatableRequest, hints: ConnectionHints, rollout: str, now: float) -> None:
        """Remember a call that failed. `now`: monotonic seconds."""
        calls = self.calls.setdefault(request.key, [])
        calls.append(FailedCall(rollout, request.tries, hints, now))
        del calls[:-_EQUAL]
        self.calls.move_to_end(request.key)
        if len(self.calls) > self._remembered:
            self.calls.popitem(last=False)

    def forget(self, before: float) -> None:
        """Forget the requests whose last call failed before this time; monotonic seconds."""
        while self.calls and next(iter(self.calls.values()))[-1].ended < before:
            self.calls.popitem(last=False)

    def find(self, request: RepeatableRequest, hints: ConnectionHints, now: float) -> ConversationMatch | None:
        """The rollout of the failed call that a request repeats; that call is forgotten. None if it repeats none."""
        calls, tries = self.calls.get(request.key, []), request.tries
        if tries is None:
            possible = [it for it in calls if it.hints is hints and it.tries is None and it.ended >= now - UNCOUNTED_S]
        else:
            possible = [it for it in calls if it.tries == tries - 1 and it.ended >= now - COUNTED_S]
        if not possible:
            return None
        possible = [it for it in possible if it.hints is hints] or possible
        # The newest: the client of an older one may have given up.
        chosen = min(reversed(possible), key=lambda it: it.hints.peer != hints.peer)
        calls.remove(chosen)
        if not calls:
            del self.calls[request.key]
        return ConversationMatch(chosen.rollout, len({it.rollout for it in possible}) > 1, retry=True)


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
        self.failed = FailedCalls(remembered)

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

    def find_response(self, name: str) -> str | None:
        """The rollout of the answer with this name; None if it is not known."""
        return self._responses.get(name)

    def remember_response(self, name: str, rollout: str) -> None:
        """Note that the answer with this name belongs to the rollout."""
        self._responses[name] = rollout
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
