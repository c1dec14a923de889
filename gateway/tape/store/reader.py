"""Reading the tape. Every read is one short transaction or a series of slices: no reader keeps old pages alive.

Generators hold no transaction while their consumer works.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import islice
from typing import Any, TypeVar

from penstock.gateway.model.answers import Change
from penstock.gateway.model.base import CALLS, ID_PATTERN
from penstock.gateway.model.facts import REQUEST_ID, own_attribute
from penstock.gateway.model.rollout import Attempt, Rollout
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Chunk, Exchange
from penstock.gateway.tape.store import codec, keys
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.directory import DAMAGE_ERRORS, DamageLog, TapeError, is_damage
from penstock.gateway.tape.store.environment import ORDER, Cursor, Environment
from penstock.gateway.tape.store.records import Style
from penstock.gateway.tape.store.view import ALL_CHANGES, BLOCK, FORGOTTEN, ChangeFilter, ForgottenBodyError, TapeView

# Makes an `Exchange`, the noun that people and programs read, of a stored body.


def header_lines(block: bytes) -> list[tuple[str, str]]:
    """Return `name: value CRLF` lines as pairs, bytes above 0x7f as latin-1 (RFC 9110 §5.5)."""
    lines = block.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return [(name, value.strip(" \t")) for name, _, value in pairs]


def exchange(body: StoredBody) -> Exchange:
    """Return a stored body as an `Exchange`."""
    marks = iter(body.marks)
    return Exchange(
        url=body.url,
        request_headers=header_lines(body.request_headers),
        request_body=body.request,
        response_headers=header_lines(body.response_headers),
        response_body=body.response,
        trailers=header_lines(body.trailers),
        chunks=[Chunk(at_ns=at * 1000, size=size) for at, size in zip(marks, marks, strict=True)],
        sides=body.sides,
    )


A = TypeVar("A")
T = TypeVar("T")
SECRET = b"secret"
"""Key in `meta` of the secret that signs agent tokens."""
_ID = re.compile(ID_PATTERN)
_SLICE = 256
_LOOKED = 4096
"""Changes that are examined for one page, or the page's limit if that is larger."""
_SEGMENTS = 2000
"""Segments of the log that are searched in one transaction."""
_STEP = 50
"""Heads that are decoded at once: consumers often stop after a page."""
_SPANS = ChangeFilter(kinds=["span"])


class StoreReader:
    """All reads of a tape; thread-safe."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._styles: dict[int, Style] = {}
        self._passed_over = DamageLog()

    @contextmanager
    def view(self) -> Generator[TapeView]:
        """Open a short read transaction of the tape."""
        with self._env.read() as txn:
            yield TapeView(txn, self._env.dbs, self._styles)

    def cursor(self) -> int:
        """Return the cursor of the newest committed change."""
        with self.view() as view:
            return view.last("log")

    def identity(self) -> str:
        """Return a name that tells this tape from every other one, whatever is on it; empty where no gateway has served
        it yet. It is a hash of the tape's secret, which cannot be computed back."""
        with self.view() as view:
            secret = view.get("meta", SECRET)
        return "" if secret is None else blake2b(secret, digest_size=16, person=b"penstock-tape").hexdigest()

    def rollout(self, rollout: str) -> Rollout | None:
        """Return a rollout; None when the tape has none of that name."""
        if not _possible(rollout):
            return None
        with self.view() as view:
            return view.rollout(rollout)

    def pass_over(self, what: str, error: TapeError) -> None:
        """Log once that `what` is left out because it is damaged; for long reads. Raises the error if it is not
        damage."""
        if not is_damage(error):
            raise error
        self._passed_over(what, error)

    def named(self, rollouts: Iterable[str]) -> list[tuple[int, Rollout]]:
        """Return those of these rollouts that exist and can be read, newest first, with the positions that `rollouts`
        gives them."""
        with self.view() as view:
            stored = [self._whole(view.numbered_rollout, rollout) for rollout in rollouts if _possible(rollout)]
        return sorted(filter(None, stored), key=lambda one: one[0], reverse=True)

    def _whole(self, read: Callable[[A], T | None], rollout: A) -> T | None:
        """Return what `read` returns for a rollout's name or number; None if it meets damage."""
        try:
            return read(rollout)
        except DAMAGE_ERRORS as error:
            self._passed_over(f"rollout {rollout}", error)
            return None

    def rollouts(self, before: int | None = None) -> Iterator[tuple[int, Rollout]]:
        """Yield all readable rollouts, newest first, each with a position that `before` takes."""
        for slice_ in self._orders(before):
            with self.view() as view:
                stored = [(number, self._whole(view.rollout_of, number)) for number in slice_]
            yield from ((number, rollout) for number, rollout in stored if rollout is not None)

    def at(self, cursors: Iterable[int]) -> Iterator[tuple[int, Span]]:
        """Yield the spans of these changes in order, each with its position. The change of a running call is left out
        if the call has ended since."""
        rest = iter(cursors)
        while slice_ := list(islice(rest, _STEP)):
            with self.view() as view:
                told = [self._told(view, at) for at in slice_]
            yield from ((one.cursor, one.span) for one in told if one is not None and one.span is not None)

    def numbers(self) -> Iterator[int]:
        """Yield the number of every rollout, newest first."""
        for slice_ in self._orders(None):
            yield from slice_

    def _orders(self, before: int | None) -> Iterator[list[int]]:
        """Yield numbers of rollouts, newest first, each list read in one transaction."""
        while True:
            with self.view() as view, view.txn.cursor(db=self._env.dbs["order"]) as cursor:
                found = _numbers(cursor, before)
            yield found
            if len(found) < _SLICE:
                return
            before = found[-1]

    def rollouts_oldest_first(self, after: int = 0) -> Iterator[tuple[int, Rollout]]:
        """Yield all readable rollouts beyond this number, oldest first, with their numbers."""
        while True:
            with self.view() as view, view.txn.cursor(db=self._env.dbs["order"]) as cursor:
                numbers = _numbers_above(cursor, after)
                stored = [(number, self._whole(view.rollout_of, number)) for number in numbers]
            yield from ((number, rollout) for number, rollout in stored if rollout is not None)
            if len(numbers) < _SLICE:
                return
            after = numbers[-1]

    def _segment(self, view: TapeView, at: int) -> tuple[int, list[bytes]]:
        """Return `TapeView.log_segment`; unreadable records count as forgotten."""
        try:
            return view.log_segment(at)
        except DAMAGE_ERRORS as error:
            first, last = view.log_gap(at)
            self._passed_over(f"changes {first} to {last}", error)
            return first, [FORGOTTEN] * (last - first + 1)

    def _told(self, view: TapeView, at: int) -> Change | None:
        """Return a change; None if it is damaged."""
        first, records = self._segment(view, at)
        return self._change(view, at, records[at - first], ALL_CHANGES)

    def _change(self, view: TapeView, at: int, record: bytes, wanted: ChangeFilter) -> Change | None:
        """Return a record of the log as a change; None if it is damaged, or if its rollout has a status that is not
        wanted."""
        try:
            if wanted.status and record[:1] == b"r" and not wanted.matches_status(view.status(record)):
                return None
            return view.change(at, record)
        except DAMAGE_ERRORS as error:
            self._passed_over(f"change {at}", error)
            return None

    def attempts(self, rollout: str) -> list[Attempt]:
        """Return the attempts of a rollout, oldest first."""
        if not _possible(rollout):
            return []
        with self.view() as view:
            return view.attempts(rollout)

    def span(self, rollout: str, attempt: str, sequence: int) -> Span | None:
        """Return a span; None when there is none."""
        if not 0 < sequence <= keys.HIGHEST_SEQUENCE or not _possible(rollout, attempt):
            return None
        with self.view() as view:
            return view.span(rollout, attempt, sequence)

    def spans(
        self,
        rollout: str,
        attempt: str | None = None,
        after: tuple[str, int] | None = None,
        kinds: Collection[str] = (),
    ) -> Iterator[Span]:
        """Yield spans by attempt (oldest first) and sequence; `after` is (attempt, sequence) of the last one seen.
        `kinds`: only these, if any are named; others are hardly decoded."""
        if attempt is not None and not _possible(rollout, attempt):
            return
        names = [found.id for found in self.attempts(rollout)] if attempt is None else [attempt]
        if after is not None and after[0] in names:
            names = names[names.index(after[0]) :]
        for name in names:
            begin = after[1] if after is not None and after[0] == name else 0
            yield from self._attempt_spans(rollout, name, begin, kinds)

    def _attempt_spans(self, rollout: str, attempt: str, after: int, kinds: Collection[str]) -> Iterator[Span]:
        after = min(max(0, after), keys.HIGHEST_SEQUENCE)
        while True:
            with self.view() as view:
                found = view.summaries(rollout, attempt, after, _STEP)
                spans = [view.span_of(it, kinds) for it in found]
            yield from filter(None, spans)
            after += len(found)
            if not found or after % BLOCK:
                # A page ends with its block, or there are no more.
                return

    def recent(self, before: int | None = None) -> Iterator[tuple[int, Span]]:
        """Yield all readable spans, newest change first, each once, with a position that `before` takes."""
        newest = self.cursor()
        if before is not None:
            newest = min(newest, before - 1)
        while newest > 0:
            with self.view() as view:
                found, newest = self._spans_back(view, newest)
            yield from found

    def _spans_back(self, view: TapeView, newest: int) -> tuple[list[tuple[int, Span]], int]:
        """Return (some spans of the changes up to this one, newest first; the change to go on with)."""
        found, least = list[tuple[int, Span]](), newest - _LOOKED
        while newest > max(0, least) and len(found) < _STEP:
            if (hole := view.hole("log", newest)) is not None:
                newest = hole[0] - 1
                continue
            first, records = self._segment(view, newest)
            while newest >= first and len(found) < _STEP:
                record = records[newest - first]
                # Other changes are not even decoded.
                if _SPANS.matches(record) and (change := self._change(view, newest, record, _SPANS)) is not None:
                    found += [] if change.span is None else [(change.cursor, change.span)]
                newest -= 1
        return found, newest

    def changes(self, since: int, limit: int, wanted: ChangeFilter = ALL_CHANGES) -> tuple[list[Change], int]:
        """Return at most `limit` wanted changes after `since`, oldest first, and the cursor to go on from: a page that
        examined many unwanted changes ends early. If a call has ended since it began, only its end is told. A rollout
        is told with its present state, and once in a page if `wanted` names statuses. Damaged changes are left out."""
        found: list[Change] = []
        told = set[bytes]()
        since = max(0, since)
        with self.view() as view:
            last = view.last("log")
            if since < last and (hole := view.hole("log", since + 1)) is not None:
                since = hole[1]
            newest = min(last, since + max(_LOOKED, limit))
            while since < newest and len(found) < limit:
                first, records = self._segment(view, since + 1)
                for record in records[since + 1 - first : newest + 1 - first]:
                    since += 1
                    if not wanted.matches(record) or record in told:
                        continue
                    if wanted.status and record[:1] == b"r":
                        told.add(record)
                    change = self._change(view, since, record, wanted)
                    if change is not None:
                        found.append(change)
                        if len(found) >= limit:
                            break
        return found, since

    def exchange(self, span: Span) -> Exchange | None:
        """Return the bytes of a call; None when none were kept. An open call has its request."""
        return next(exchange for _, exchange in self.exchanges([span]))

    def exchanges(self, spans: Iterable[Span]) -> Iterator[tuple[Span, Exchange | None]]:
        """Yield the bytes of several calls. If each is stored against the one before, no chain is followed twice."""
        known = dict[int, codec.DeltaBase]()
        for span in spans:
            with self.view() as view:
                if span.body is None:
                    body = view.open_body(span.rollout, span.attempt, span.sequence)
                else:
                    body = None
                    with suppress(ForgottenBodyError):  # since the span was read
                        body, base = view.body(span.body, known)
                        known = {base.number: base}
            yield span, None if body is None else exchange(body)

    def figures(self) -> dict[str, int]:
        """Return sizes and counts of the tape."""
        with self.view() as view:
            counts = {name: view.txn.stat(self._env.dbs[name])["entries"] for name in ("rollouts", "attempts", "open")}
            cursor = view.last("log")
            map_bytes, used_bytes = self._env.sizes()
        return {
            "rollouts": counts["rollouts"],
            "attempts": counts["attempts"],
            "changes": cursor,
            "open": counts["open"],
            "map_bytes": map_bytes,
            "used_bytes": used_bytes,
        }

    def live_bytes(self) -> int:
        """Return the bytes of the file that are in use; space of deleted records is used again."""
        with self.view() as view:
            stats = [view.txn.stat(database) for database in self._env.dbs.values()]
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return pages * stats[0]["psize"]

    def note(self, name: str) -> bytes | None:
        """Return the note that `QueueOperations.note` has stored under a name; None when there is none."""
        with self.view() as view:
            return view.get("meta", b"note " + name.encode())

    def find_response(self, response_id: str) -> Span | None:
        """Return the newest span whose response has this id; None when there is none."""
        return self._newest([response_id], lambda span: (span.response_id,)).get(response_id)

    def find_calls(self, ids: Collection[str]) -> dict[str, Span]:
        """Return, by id, the newest calls whose responses, or whose requests at the provider, have these ids. It is one
        search for all."""
        return self._newest(
            ids, lambda span: (span.response_id, own_attribute(span, REQUEST_ID)) if span.kind in CALLS else ()
        )

    def _newest(self, ids: Collection[str], ids_of: Callable[[Span], Collection[Any]]) -> dict[str, Span]:
        """Return the newest spans with these ids, by id. It searches the log backwards, bytes before records: a recent
        one is found at once, one of a million spans ago in a fraction of a second."""
        left, before, newest = set(ids), None, dict[str, Span]()
        while left:
            with self.view() as view:
                found, before = view.log_segments_with([one.encode() for one in left], before, _SEGMENTS)
                spans = [span for change in found if (span := change.span) is not None]
            for span in spans:
                for name in left.intersection(ids_of(span)):
                    newest[name] = span
                    left.remove(name)
            if before is None:
                break
        return newest

    def records(self, database: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield all records of a database by key, from `start` on, read in slices of one transaction each."""
        while True:
            with self.view() as view, view.txn.cursor(db=self._env.dbs[database]) as cursor:
                found = _ascending_slice(cursor, start)
            yield from found
            if len(found) < _SLICE:
                return
            start = found[-1][0] + b"\0"


def _possible(*names: str) -> bool:
    """False if one of these names cannot exist."""
    return all(map(_ID.fullmatch, names))


def _numbers(cursor: Cursor, before: int | None) -> list[int]:
    """Return a slice of the numbers below this one, highest first."""
    start = keys.number(min(max(0, before or 0), keys.HIGHEST_NUMBER))
    if before is not None and cursor.set_range_dup(ORDER, start):
        more = cursor.prev_dup()
    else:
        more = cursor.set_key(ORDER) and cursor.last_dup()
    found: list[int] = []
    while more and len(found) < _SLICE:
        found.append(keys.to_number(cursor.value()))
        more = cursor.prev_dup()
    return found


def _numbers_above(cursor: Cursor, after: int) -> list[int]:
    """Return a slice of the numbers above this one, lowest first."""
    more = cursor.set_range_dup(ORDER, keys.number(min(after + 1, keys.HIGHEST_NUMBER)))
    found: list[int] = []
    while more and len(found) < _SLICE:
        found.append(keys.to_number(cursor.value()))
        more = cursor.next_dup()
    return found


def _ascending_slice(cursor: Cursor, start: bytes) -> list[tuple[bytes, bytes]]:
    """Return a slice of records from this key on."""
    items: list[tuple[bytes, bytes]] = []
    more = cursor.set_range(start)
    while more and len(items) < _SLICE:
        items.append(cursor.item())
        more = cursor.next()
    return items


def descending_slice(cursor: Cursor, start: bytes | None, most: int = _SLICE) -> list[tuple[bytes, bytes]]:
    """Return up to `most` records before this key, highest first; None is the end."""
    items: list[tuple[bytes, bytes]] = []
    more = cursor.prev() if start is not None and cursor.set_range(start) else cursor.last()
    while more and len(items) < most:
        items.append(cursor.item())
        more = cursor.prev()
    return items
