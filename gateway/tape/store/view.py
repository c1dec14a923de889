"""One transaction's view of the tape: summaries, changes and bodies. It knows the layout and holds no state beyond the
transaction's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, cast

from penstock.gateway.model.answers import Change, ChangeKind
from penstock.gateway.model.queue import QueueState
from penstock.gateway.model.rollout import Attempt, Rollout, RolloutStatus
from penstock.gateway.model.span import Span
from penstock.gateway.tape.store import codec, keys
from penstock.gateway.tape.store.codec import DeltaBase, StoredBody
from penstock.gateway.tape.store.directory import DAMAGE_ERRORS, DamagedRecordError
from penstock.gateway.tape.store.environment import Cursor, Txn, floor, last_number, scan
from penstock.gateway.tape.store.records import (
    ATTEMPT,
    STYLE_DEFAULTS,
    Origins,
    Style,
    attempt_of,
    attempt_sequence,
    attempt_values,
    body_of,
    kind_of,
    origins_of,
    padded,
    rollout_from,
    rollout_status,
    span_from,
)

# The choice of changes that a follower of the feed wants. Most are told apart by the first bytes of their record of
# the log, without decoding.

KINDS: Final[dict[bytes, ChangeKind]] = {
    b"s": "span",
    b"o": "span",
    b"a": "attempt",
    b"r": "rollout",
    b"v": "resource",
    b"e": "release",
    b"t": "run",
    b"f": "forgotten",
}
"""The first byte of a record of the log. The name of the rollout, resource, release or run follows it."""


class ChangeFilter:
    """A filter of changes by kind, name and status."""

    def __init__(
        self,
        kinds: Iterable[ChangeKind] = (),
        names: Iterable[str] = (),
        status: Iterable[RolloutStatus] = (),
    ) -> None:
        """An empty argument selects all. `names`: of rollouts (with their attempts and spans), resources, releases and
        runs; NAME* selects all that begin with NAME. `status`: only rollouts that have one of these when they are told,
        each once a page."""
        chosen = frozenset(kinds)
        self._kinds = frozenset(begin for begin, kind in KINDS.items() if not chosen or kind in chosen)
        given = [name.encode() for name in names]
        self._names = frozenset(name + b"\0" for name in given if not name.endswith(b"*"))
        self._begins = tuple(name[:-1] for name in given if name.endswith(b"*"))
        self.status = frozenset(status)

    def matches(self, record: bytes) -> bool:
        """True if a record of the log may be a wanted change."""
        if record[:1] not in self._kinds:
            return False
        if not self._names and not self._begins:
            return True
        return record[1 : record.find(0) + 1] in self._names or record.startswith(self._begins, 1)

    def matches_status(self, status: RolloutStatus | None) -> bool:
        """True if a rollout of this status is wanted; None, for one that is gone, is not when any status is asked
        for."""
        return not self.status or status in self.status


ALL_CHANGES: Final = ChangeFilter()
"""The filter that every change passes."""


BLOCK = 32
"""Sequences in one record of the index."""

FORGOTTEN = b"x"
"""Replaces the records of a forgotten rollout in the log."""
_HOLE = 4096
"""Forgotten changes that are returned at once where no segment holds them."""
_NAMED = frozenset({b"v", b"e", b"t", b"f"})
_RECENT = 4
_SPANS = ATTEMPT.index("spans")


def last_block(spans: int) -> int:
    """Return the block of the index that is stored with an attempt which has given out this many sequences."""
    return max(0, spans - 1) // BLOCK


class ForgottenBodyError(DamagedRecordError):
    """The body was forgotten since its place was read."""


class TapeView:
    """One transaction's view of the tape."""

    def __init__(self, txn: Txn, dbs: dict[str, Any], styles: dict[int, Style]) -> None:
        """`styles` is filled with styles that are read: a committed style never changes."""
        self.txn = txn
        self._dbs = dbs
        self._styles = styles
        self._segment: tuple[int, list[bytes]] = (0, [])
        self._bodies: tuple[int, list[bytes]] = (0, [])
        self._numbers: dict[bytes, int] = {}

    def get(self, database: str, key: bytes) -> bytes | None:
        """Return a record; None when there is none."""
        return self.txn.get(key, db=self._dbs[database])

    def scan(self, database: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield records whose keys begin with `prefix`, by key."""
        return scan(self.txn, self._dbs[database], prefix)

    def has(self, database: str, prefix: bytes) -> bool:
        """True if the key of any record begins with `prefix`."""
        return next(self.scan(database, prefix), None) is not None

    def cursor(self, database: str) -> Cursor:
        """Return a cursor over a database; for a `with`."""
        return self.txn.cursor(db=self._dbs[database])

    def count(self, database: str) -> int:
        """Return the number of records of a database."""
        return self.txn.stat(self._dbs[database])["entries"]

    def last(self, database: str) -> int:
        """Return the highest number of a database that is keyed by number; 0 when it is empty."""
        found = last_number(self.txn, self._dbs[database])
        return 0 if found is None else keys.to_number(found)

    def rollout(self, rollout: str) -> Rollout | None:
        """Return a rollout; None when there is none."""
        found = self.numbered_rollout(rollout)
        return None if found is None else found[1]

    def numbered_rollout(self, rollout: str) -> tuple[int, Rollout] | None:
        """Return a rollout with its number; None when there is none."""
        key = keys.rollout_key(rollout)
        stored = self.get("rollouts", key)
        return None if stored is None else rollout_from(rollout, stored, self.get("tasks", key))

    def origins(self, rollout: str) -> Origins | None:
        """Return the number and the creation time of a rollout; None when there is none."""
        stored = self.get("rollouts", keys.rollout_key(rollout))
        return None if stored is None else origins_of(stored)

    def rollout_of(self, number: int) -> Rollout | None:
        """Return the rollout with this number; None when it was forgotten."""
        if self.log_record(number) == FORGOTTEN:
            return None
        found = self.numbered_rollout(self.name(number))
        return None if found is None or found[0] != number else found[1]

    def name(self, number: int) -> str:
        """Return the name of the rollout with this number."""
        record = self.log_record(number)
        if record[:1] != b"r":
            raise DamagedRecordError(f"change {number} makes no rollout; run `penstock check`")
        return record[1:-1].decode("ascii")

    def attempt_values(self, rollout: str, attempt: str) -> tuple[Origins, list[Any], list[int]] | None:
        """Return (number and creation time of its rollout, values, cursors of its last block) of an attempt; None when
        there is none."""
        origins = self.origins(rollout)
        if origins is None:
            return None
        stored = self.get("attempts", keys.attempt_record_key(origins.number, attempt))
        return None if stored is None else (origins, *attempt_values(stored, origins))

    def attempts(self, rollout: str) -> list[Attempt]:
        """Return the attempts of a rollout, oldest first."""
        origins = self.origins(rollout)
        return [] if origins is None else [attempt for attempt, _ in self._attempts(rollout, origins)]

    def _attempts(self, rollout: str, origins: Origins) -> list[tuple[Attempt, list[int]]]:
        """Return the attempts of a rollout, oldest first, each with the cursors of its last block."""
        found: list[tuple[Attempt, list[int]]] = []
        for key, record in scan(self.txn, self._dbs["attempts"], keys.number(origins.number)):
            values, cursors = attempt_values(record, origins)
            found.append((attempt_of(rollout, keys.attempt_of_record_key(key), values), cursors))
        return sorted(found, key=lambda one: one[0].sequence)

    def attempts_and_spans(self, rollout: str) -> tuple[list[Attempt], list[Span]]:
        """Return the attempts of a rollout, oldest first, and all their spans in the same order. `spans` reads in
        pages."""
        origins = self.origins(rollout)
        if origins is None:
            return [], []
        found, spans = self._attempts(rollout, origins), list[Span]()
        for attempt, last in found:
            full = range(last_block(attempt.spans))
            cursors = [cursor for block in full for cursor in self._block(origins.number, attempt.id, block)] + last
            spans += [self.summary(rollout, attempt.id, at, cursor) for at, cursor in enumerate(cursors, 1)]
        return [attempt for attempt, _ in found], spans

    def attempt_names(self, number: int) -> list[str]:
        """Return the names of the attempts of the rollout with this number, oldest first."""
        found = scan(self.txn, self._dbs["attempts"], keys.number(number))
        return [
            name for _, name in sorted((attempt_sequence(it), keys.attempt_of_record_key(key)) for key, it in found)
        ]

    def queue_state(self) -> QueueState:
        """Return whether the queue hands out work."""
        found = (self.get("meta", b"queue") or b"open").decode()
        return cast(QueueState, found)

    def style(self, number: int) -> Style:
        """Return the values that the calls with this style number share."""
        found = self._styles.get(number)
        if found is None:
            stored = self.get("styles", keys.number(number))
            if stored is None:
                raise DamagedRecordError(f"style {number} is missing; run `penstock check`")
            found = self._styles[number] = padded(stored, STYLE_DEFAULTS)
        return found

    def cursors(self, rollout: str, attempt: str, block: int) -> list[int]:
        """Return the cursors of the summaries of a block of sequences, 0 for those that are open."""
        found = self.attempt_values(rollout, attempt)
        if found is None:
            return []
        origins, values, cursors = found
        if block == last_block(values[_SPANS]):
            return cursors
        return self._block(origins.number, attempt, block)

    def _block(self, rollout: int, attempt: str, block: int) -> list[int]:
        return keys.to_numbers(self.get("index", keys.attempt_record_key(rollout, attempt) + keys.u32(block)) or b"")

    def index(self, rollout: str, attempt: str, sequence: int) -> int | None:
        """Return the cursor of the summary of this sequence, 0 while it is open, None when it was never given out."""
        block, at = divmod(sequence - 1, BLOCK)
        cursors = self.cursors(rollout, attempt, block)
        return cursors[at] if at < len(cursors) else None

    def span(self, rollout: str, attempt: str, sequence: int) -> Span | None:
        """Return a span; None when there is none."""
        cursor = self.index(rollout, attempt, sequence)
        return None if cursor is None else self.summary(rollout, attempt, sequence, cursor)

    def spans(self, rollout: str, attempt: str, after: int, limit: int) -> list[Span]:
        """Return at most `limit` spans that follow this sequence in its block."""
        return [span_from(*it, self.style) for it in self.summaries(rollout, attempt, after, limit)]

    def summaries(self, rollout: str, attempt: str, after: int, limit: int) -> list[tuple[bytes, bytes]]:
        """Return the keys and records of the same spans."""
        block, skip = divmod(after, BLOCK)
        cursors = self.cursors(rollout, attempt, block)[skip : skip + limit]
        return [self._summary(rollout, attempt, after + at, cursor) for at, cursor in enumerate(cursors, 1)]

    def span_of(self, summary: tuple[bytes, bytes], kinds: Collection[str]) -> Span | None:
        """Return the span of a key and a record; None if it has none of `kinds`, where any are named."""
        wanted = not kinds or kind_of(summary[1], self.style) in kinds
        return span_from(*summary, self.style) if wanted else None

    def summary(self, rollout: str, attempt: str, sequence: int, cursor: int) -> Span:
        """Return the span whose cursor in the index is this; 0 for an open call."""
        return span_from(*self._summary(rollout, attempt, sequence, cursor), self.style)

    def _summary(self, rollout: str, attempt: str, sequence: int, cursor: int) -> tuple[bytes, bytes]:
        """Return the key of a span and its record."""
        key = keys.summary_key(rollout, attempt, sequence)
        if not cursor:
            return key, self._open(key)[0]
        record = self.log_record(cursor)
        if not record.startswith(b"s" + key):
            raise DamagedRecordError(
                f"change {cursor} is not the summary of {rollout}/{attempt}#{sequence}; run `penstock check`"
            )
        return key, record[1 + len(key) :]

    def _open(self, key: bytes) -> tuple[bytes, bytes | None]:
        stored = self.get("open", key)
        if stored is None:
            raise DamagedRecordError(
                f"span {keys.split_summary_key(key)} is neither open nor in the log; run `penstock check`"
            )
        return codec.unpack_open(stored)

    def log_record(self, at: int) -> bytes:
        """Return one record of the log."""
        first, records = self.log_segment(at)
        return records[at - first]

    def log_records(self, after: int, last: int) -> Iterator[bytes]:
        """Yield the records of the log after one cursor, up to another."""
        while after < last:
            first, records = self.log_segment(after + 1)
            yield from records[after + 1 - first : last + 1 - first]
            after = first + len(records) - 1

    def log_segment(self, at: int) -> tuple[int, list[bytes]]:
        """Return (cursor of its first record, records) of the log segment that holds this cursor."""
        first, records = self._segment
        if not first <= at < first + len(records):
            with self.txn.cursor(db=self._dbs["log"]) as cursor:
                if not cursor.set_range(keys.number(at)):
                    raise DamagedRecordError(f"change {at} is missing; run `penstock check`")
                last, segment = keys.to_number(cursor.key()), cursor.value()
            records = codec.unpack_log(segment)
            first = last - len(records) + 1
            if at < first:
                first, records = self._forgotten_changes(at)
            self._segment = first, records
        return first, records

    def log_gap(self, at: int) -> tuple[int, int]:
        """Return (first, last) of the cursors around this one whose records cannot be read, because the segment that
        holds them is damaged or gone. A very long gap is returned in pieces."""
        first, last = 1, at
        with self.txn.cursor(db=self._dbs["log"]) as cursor:
            if cursor.set_range(keys.number(at)):
                last, segment = keys.to_number(cursor.key()), cursor.value()
                with suppress(*codec.CORRUPTION_ERRORS):
                    begins = last - len(codec.unpack_log(segment)) + 1
                    last = begins - 1 if at < begins else last
                there = cursor.prev()
            else:
                there = cursor.last()
            if there:
                first = keys.to_number(cursor.key()) + 1
        return max(first, at - _HOLE), min(last, at + _HOLE)

    def _forgotten_changes(self, at: int) -> tuple[int, list[bytes]]:
        """Return (cursor of the first, records) of some changes around this one, all forgotten."""
        hole = self.hole("log", at)
        if hole is None:
            raise DamagedRecordError(f"change {at} is missing; run `penstock check`")
        first = max(hole[0], at - at % _HOLE)
        return first, [FORGOTTEN] * (min(hole[1], at - at % _HOLE + _HOLE - 1) + 1 - first)

    def hole(self, database: str, at: int) -> tuple[int, int] | None:
        """Return (first, last) of the forgotten numbers around this one that no segment holds any more; None when a
        segment may hold it."""
        with self.txn.cursor(db=self._dbs["holes"]) as cursor:
            prefix = keys.rollout_key(database)
            if not cursor.set_range(prefix + keys.number(at)) or not cursor.key().startswith(prefix):
                return None
            first, last = keys.to_number(cursor.value()), keys.to_number(cursor.key()[len(prefix) :])
            return (first, last) if first <= at else None

    def log_segments_with(
        self, texts: Collection[bytes], before: bytes | None, most: int
    ) -> tuple[list[Change], bytes | None]:
        """Return (changes, newest first, whose records hold one of these texts; the key to go on with, None at
        the end).

        It examines up to `most` segments below `before`, or from the end.
        """
        found: list[Change] = []
        with self.txn.cursor(db=self._dbs["log"]) as cursor:
            there = cursor.last() if before is None else cursor.set_range(before) and cursor.prev()
            for _ in range(most):
                if not there:
                    return found, None
                before = cursor.key()
                segment = cursor.value()
                if any(text in segment for text in texts):
                    with suppress(*DAMAGE_ERRORS):  # `changes` logs the damage
                        first, records = self.log_segment(keys.to_number(before))
                        told = [
                            self.change(first + at, record)
                            for at, record in enumerate(records)
                            if any(text in record for text in texts)
                        ]
                        found += [change for change in reversed(told) if change is not None]
                there = cursor.prev()
        return found, before

    def change(self, at: int, record: bytes) -> Change | None:
        """Return a record of the log as a `Change`; None for a call that was open then and has ended since, and for a
        forgotten record."""
        kind, key = record[:1], record[1:]
        if kind == FORGOTTEN:
            return None
        if kind == b"s":
            if not 0 < self._number(key[: key.index(0)]) <= at:
                return None  # its rollout was forgotten, and is about to be wiped; there may be another of its name
            span = span_from(key, key[keys.summary_key_length(key) :], self.style)
            return Change.model_construct(cursor=at, kind="span", span=span)
        if kind in _NAMED:
            return Change(cursor=at, kind=KINDS[kind], name=key[: key.index(0)].decode("ascii"))
        if kind == b"a":
            place = keys.split_attempt_key(key)
            values = self.attempt_values(*place)
            if values is None or at < values[0].number:
                return None
            return Change(cursor=at, kind="attempt", attempt=attempt_of(*place, values[1]))
        name = key[: key.index(0)].decode("ascii")
        if kind == b"o":
            stored = self.get("open", key)
            origins = None if stored is None else self.origins(name)
            if stored is None or origins is None or at < origins.number:
                return None
            return Change.model_construct(
                cursor=at, kind="span", span=span_from(key, codec.unpack_open(stored)[0], self.style)
            )
        found = self.numbered_rollout(name)
        # An older change may be of another rollout of this name, which was forgotten.
        return None if found is None or at < found[0] else Change(cursor=at, kind="rollout", rollout=found[1])

    def _number(self, name: bytes) -> int:
        """Return the number of a rollout, 0 when there is none; read once."""
        found = self._numbers.get(name)
        if found is None:
            origins = self.origins(name.decode("ascii"))
            found = self._numbers[name] = 0 if origins is None else origins.number
        return found

    def status(self, record: bytes) -> RolloutStatus | None:
        """Return the present status of the rollout that a record of the log names, without reading its task; None when
        it is gone."""
        stored = self.get("rollouts", record[1:])
        return None if stored is None else rollout_status(stored)

    def open_body(self, rollout: str, attempt: str, sequence: int) -> StoredBody | None:
        """Return the bytes so far of a call that still runs; None when there are none."""
        stored = self.get("open", keys.summary_key(rollout, attempt, sequence))
        record = None if stored is None else codec.unpack_open(stored)[1]
        return None if record is None else self.build_open_body(record)

    def body(self, number: int, known: Mapping[int, DeltaBase] = MappingProxyType({})) -> tuple[StoredBody, DeltaBase]:
        """Return a body, and the body as a base for the next one. `known`: possible bases, by number."""
        return self._build(self.body_record(number), number, known)

    def _build(
        self, record: bytes, number: int, known: Mapping[int, DeltaBase] = MappingProxyType({})
    ) -> tuple[StoredBody, DeltaBase]:
        """Follow the chain of bases down to a known one or its keyframe and build the body up again."""
        chain = [(number, record)]
        while (lower := codec.base_of(chain[-1][1])) and lower not in known:
            chain.append((lower, self.body_record(lower)))
        at, record = chain.pop()
        body, base = codec.unpack_body(record, known[lower] if lower else None, at)
        for at, record in reversed(chain):
            body, base = codec.unpack_body(record, base, at)
        return body, base

    def build_open_body(self, record: bytes) -> StoredBody:
        """Return the body of a call that still runs."""
        return self._build(record, 0)[0]

    def drop_segments(self) -> None:
        """Drop the segments at hand: they were rewritten."""
        self._segment = self._bodies = (0, [])

    def body_record(self, number: int) -> bytes:
        """Return the record of a body. Raises `ForgottenBodyError` when it was forgotten."""
        first, records = self._bodies
        if not first <= number < first + len(records):
            first, records = self._body_segment(number)
        if not records[number - first]:
            raise ForgottenBodyError(f"body {number} was forgotten")
        return records[number - first]

    def _body_segment(self, number: int) -> tuple[int, list[bytes]]:
        with self.txn.cursor(db=self._dbs["bodies"]) as cursor:
            if floor(cursor, keys.number(number)):
                first, records = keys.to_number(cursor.key()), codec.unpack_segment(cursor.value())
                if number - first < len(records):
                    self._bodies = first, records
                    return self._bodies
        if self.hole("bodies", number) is not None:
            raise ForgottenBodyError(f"body {number} was forgotten")
        raise DamagedRecordError(f"body {number} is missing; run `penstock check`")

    def newest_body(self, rollout: str, attempt: str, spans: int) -> tuple[int, DeltaBase] | None:
        """Return (sequence, base) of the attempt's newest finished call with a body; None when the last ones have
        none."""
        for sequence in range(spans, max(0, spans - _RECENT), -1):
            cursor = self.index(rollout, attempt, sequence)
            if cursor:
                record = self.log_record(cursor)
                number = body_of(record[1 + keys.summary_key_length(record[1:]) :])
                if number is not None:
                    return sequence, self.body(number)[1]
        return None
