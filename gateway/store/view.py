"""What one transaction sees: summaries, changes and bodies. It knows the layout and holds no state beyond the
transaction's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, cast

from penstock.gateway.model.change import Change
from penstock.gateway.model.queue import QueueState
from penstock.gateway.model.rollout import Attempt, Rollout, RolloutStatus
from penstock.gateway.model.span import Span
from penstock.gateway.store import codec, keys
from penstock.gateway.store.codec import Base, Body
from penstock.gateway.store.damage import DAMAGE
from penstock.gateway.store.directory import Damaged
from penstock.gateway.store.environment import Cursor, Txn, floor, last_number, scan
from penstock.gateway.store.records import (
    ATTEMPT,
    STYLE_DEFAULTS,
    Origins,
    Style,
    attempt_of,
    attempt_sequence,
    attempt_values,
    body_of,
    origins_of,
    padded,
    rollout_from,
    rollout_status,
    span_from,
)
from penstock.gateway.store.wanted import KINDS

BLOCK = 32
"""Sequences in one record of the index."""

FORGOTTEN = b"x"
"""In the log, what was there of a rollout that was forgotten."""
_HOLE = 4096
"""Forgotten changes that are told at once where no segment holds them."""
_NAMED = frozenset({b"v", b"e", b"t", b"f"})
_RECENT = 4
_SPANS = ATTEMPT.index("spans")


def last_block(spans: int) -> int:
    """The block of the index that is stored with an attempt which has given out so many sequences."""
    return max(0, spans - 1) // BLOCK


class Forgot(Damaged):
    """Something was forgotten since its place was read."""


class View:
    """One transaction's view of the tape."""

    def __init__(self, txn: Txn, dbs: dict[str, Any], styles: dict[int, Style]) -> None:
        """`styles` is filled with what is looked up: a style that was committed never changes."""
        self.txn = txn
        self._dbs = dbs
        self._styles = styles
        self._segment: tuple[int, list[bytes]] = (0, [])
        self._bodies: tuple[int, list[bytes]] = (0, [])
        self._numbers: dict[bytes, int] = {}

    def get(self, database: str, key: bytes) -> bytes | None:
        """One record."""
        return self.txn.get(key, db=self._dbs[database])

    def scan(self, database: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Records whose keys begin so, by key."""
        return scan(self.txn, self._dbs[database], prefix)

    def has(self, database: str, prefix: bytes) -> bool:
        """Whether any record's key begins so."""
        return next(self.scan(database, prefix), None) is not None

    def cursor(self, database: str) -> Cursor:
        """A cursor over a database; for a `with`."""
        return self.txn.cursor(db=self._dbs[database])

    def count(self, database: str) -> int:
        """How many records a database has."""
        return self.txn.stat(self._dbs[database])["entries"]

    def last(self, database: str) -> int:
        """The highest number of a database that is keyed by number."""
        found = last_number(self.txn, self._dbs[database])
        return 0 if found is None else keys.to_number(found)

    def rollout(self, rollout: str) -> Rollout | None:
        """One rollout."""
        found = self.numbered_rollout(rollout)
        return None if found is None else found[1]

    def numbered_rollout(self, rollout: str) -> tuple[int, Rollout] | None:
        """One rollout, behind its number."""
        key = keys.rollout_key(rollout)
        stored = self.get("rollouts", key)
        return None if stored is None else rollout_from(rollout, stored, self.get("tasks", key))

    def origins(self, rollout: str) -> Origins | None:
        """Number and beginning of a rollout."""
        stored = self.get("rollouts", keys.rollout_key(rollout))
        return None if stored is None else origins_of(stored)

    def rollout_of(self, number: int) -> Rollout | None:
        """The rollout with this number; None when it was forgotten."""
        if self.log_record(number) == FORGOTTEN:
            return None
        found = self.numbered_rollout(self.name(number))
        return None if found is None or found[0] != number else found[1]

    def name(self, number: int) -> str:
        """The name of the rollout with this number."""
        record = self.log_record(number)
        if record[:1] != b"r":
            raise Damaged(f"change {number} makes no rollout; run `penstock check`")
        return record[1:-1].decode("ascii")

    def attempt_values(self, rollout: str, attempt: str) -> tuple[Origins, list[Any], list[int]] | None:
        """(number and beginning of its rollout, values, cursors of its last block) of an attempt."""
        origins = self.origins(rollout)
        if origins is None:
            return None
        stored = self.get("attempts", keys.place_key(origins.number, attempt))
        return None if stored is None else (origins, *attempt_values(stored, origins))

    def attempts(self, rollout: str) -> list[Attempt]:
        """The attempts of a rollout, oldest first."""
        origins = self.origins(rollout)
        if origins is None:
            return []
        records = scan(self.txn, self._dbs["attempts"], keys.number(origins.number))
        found = [
            attempt_of(rollout, keys.attempt_of_place(key), attempt_values(value, origins)[0]) for key, value in records
        ]
        return sorted(found, key=lambda attempt: attempt.sequence)

    def attempt_names(self, number: int) -> list[str]:
        """The names of the attempts of the rollout with this number, oldest first."""
        found = scan(self.txn, self._dbs["attempts"], keys.number(number))
        return [name for _, name in sorted((attempt_sequence(it), keys.attempt_of_place(key)) for key, it in found)]

    def queue_state(self) -> QueueState:
        """Whether work is handed out."""
        found = (self.get("meta", b"queue") or b"open").decode()
        return cast(QueueState, found)

    def style(self, number: int) -> Style:
        """What the calls that name this number have in common."""
        found = self._styles.get(number)
        if found is None:
            stored = self.get("styles", keys.number(number))
            if stored is None:
                raise Damaged(f"style {number} is missing; run `penstock check`")
            found = self._styles[number] = padded(stored, STYLE_DEFAULTS)
        return found

    def cursors(self, rollout: str, attempt: str, block: int) -> list[int]:
        """Where the summaries of a block of sequences are in the log, 0 for those that are open."""
        found = self.attempt_values(rollout, attempt)
        if found is None:
            return []
        origins, values, cursors = found
        if block == last_block(values[_SPANS]):
            return cursors
        return keys.to_numbers(self.get("index", keys.place_key(origins.number, attempt) + keys.u32(block)) or b"")

    def index(self, rollout: str, attempt: str, sequence: int) -> int | None:
        """Where the summary of this sequence is in the log, 0 while it is open, None when it was never given out."""
        block, at = divmod(sequence - 1, BLOCK)
        cursors = self.cursors(rollout, attempt, block)
        return cursors[at] if at < len(cursors) else None

    def span(self, rollout: str, attempt: str, sequence: int) -> Span | None:
        """One summary."""
        cursor = self.index(rollout, attempt, sequence)
        return None if cursor is None else self.summary(rollout, attempt, sequence, cursor)

    def spans(self, rollout: str, attempt: str, after: int, limit: int) -> list[Span]:
        """At most `limit` summaries that follow this sequence in its block."""
        block, skip = divmod(after, BLOCK)
        cursors = self.cursors(rollout, attempt, block)[skip : skip + limit]
        return [self.summary(rollout, attempt, after + at, cursor) for at, cursor in enumerate(cursors, 1)]

    def summary(self, rollout: str, attempt: str, sequence: int, cursor: int) -> Span:
        """The summary that the index finds at this cursor."""
        key = keys.summary_key(rollout, attempt, sequence)
        if not cursor:
            return span_from(key, self._open(key)[0], self.style)
        record = self.log_record(cursor)
        if not record.startswith(b"s" + key):
            raise Damaged(f"change {cursor} is not the summary of {rollout}/{attempt}#{sequence}; run `penstock check`")
        return span_from(key, record[1 + len(key) :], self.style)

    def _open(self, key: bytes) -> tuple[bytes, bytes | None]:
        stored = self.get("open", key)
        if stored is None:
            raise Damaged(f"span {keys.split_head_key(key)} is neither open nor in the log; run `penstock check`")
        return codec.unpack_open(stored)

    def log_record(self, at: int) -> bytes:
        """One record of the log."""
        first, records = self.log_segment(at)
        return records[at - first]

    def log_records(self, after: int, last: int) -> Iterator[bytes]:
        """The records of the log beyond one cursor, up to another."""
        while after < last:
            first, records = self.log_segment(after + 1)
            yield from records[after + 1 - first : last + 1 - first]
            after = first + len(records) - 1

    def log_segment(self, at: int) -> tuple[int, list[bytes]]:
        """(cursor of its first record, records) of the log segment that holds this cursor."""
        first, records = self._segment
        if not first <= at < first + len(records):
            with self.txn.cursor(db=self._dbs["log"]) as cursor:
                if not cursor.set_range(keys.number(at)):
                    raise Damaged(f"change {at} is missing; run `penstock check`")
                last, segment = keys.to_number(cursor.key()), cursor.value()
            records = codec.unpack_log(segment)
            first = last - len(records) + 1
            if at < first:
                first, records = self._forgotten_changes(at)
            self._segment = first, records
        return first, records

    def log_gap(self, at: int) -> tuple[int, int]:
        """(first, last) of the cursors around this one whose records cannot be read, because the segment that holds
        them is damaged or gone. A very long gap is told in pieces."""
        first, last = 1, at
        with self.txn.cursor(db=self._dbs["log"]) as cursor:
            if cursor.set_range(keys.number(at)):
                last, segment = keys.to_number(cursor.key()), cursor.value()
                with suppress(*codec.TORN):
                    begins = last - len(codec.unpack_log(segment)) + 1
                    last = begins - 1 if at < begins else last
                there = cursor.prev()
            else:
                there = cursor.last()
            if there:
                first = keys.to_number(cursor.key()) + 1
        return max(first, at - _HOLE), min(last, at + _HOLE)

    def _forgotten_changes(self, at: int) -> tuple[int, list[bytes]]:
        """(cursor of the first, records) of some changes around this one, all forgotten."""
        hole = self.hole("log", at)
        if hole is None:
            raise Damaged(f"change {at} is missing; run `penstock check`")
        first = max(hole[0], at - at % _HOLE)
        return first, [FORGOTTEN] * (min(hole[1], at - at % _HOLE + _HOLE - 1) + 1 - first)

    def hole(self, database: str, at: int) -> tuple[int, int] | None:
        """(first, last) of the numbers around this one that were forgotten, and that no segment holds any more."""
        with self.txn.cursor(db=self._dbs["holes"]) as cursor:
            prefix = keys.rollout_key(database)
            if not cursor.set_range(prefix + keys.number(at)) or not cursor.key().startswith(prefix):
                return None
            first, last = keys.to_number(cursor.value()), keys.to_number(cursor.key()[len(prefix) :])
            return (first, last) if first <= at else None

    def log_segments_with(self, text: bytes, before: bytes | None, most: int) -> tuple[list[Change], bytes | None]:
        """(changes, newest first, of segments of the log that hold these bytes; where to go on, None at the end).

        Looks at up to `most` segments below `before`, or from the end.
        """
        found: list[Change] = []
        with self.txn.cursor(db=self._dbs["log"]) as cursor:
            there = cursor.last() if before is None else cursor.set_range(before) and cursor.prev()
            for _ in range(most):
                if not there:
                    return found, None
                before = cursor.key()
                if text in cursor.value():
                    with suppress(*DAMAGE):  # `changes` tells of it
                        first, records = self.log_segment(keys.to_number(before))
                        told = [self.change(first + at, record) for at, record in enumerate(records) if text in record]
                        found += [change for change in reversed(told) if change is not None]
                there = cursor.prev()
        return found, before

    def change(self, at: int, record: bytes) -> Change | None:
        """A record of the log as the noun; None for a call that was open then and has ended since, and for what was
        forgotten."""
        kind, key = record[:1], record[1:]
        if kind == FORGOTTEN:
            return None
        if kind == b"s":
            if not 0 < self._number(key[: key.index(0)]) <= at:
                return None  # it was forgotten, and is about to be wiped; there may be another of its name
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
        # An older one may be of another rollout of this name, which was forgotten.
        return None if found is None or at < found[0] else Change(cursor=at, kind="rollout", rollout=found[1])

    def _number(self, name: bytes) -> int:
        """The number of a rollout, 0 when there is none; read once."""
        found = self._numbers.get(name)
        if found is None:
            origins = self.origins(name.decode("ascii"))
            found = self._numbers[name] = 0 if origins is None else origins.number
        return found

    def status(self, record: bytes) -> RolloutStatus | None:
        """Where the rollout of a record of the log stands now; its task is not read for that."""
        stored = self.get("rollouts", record[1:])
        return None if stored is None else rollout_status(stored)

    def open_body(self, rollout: str, attempt: str, sequence: int) -> Body | None:
        """What is known of a call that still runs."""
        stored = self.get("open", keys.summary_key(rollout, attempt, sequence))
        record = None if stored is None else codec.unpack_open(stored)[1]
        return None if record is None else self.built(record)

    def body(self, number: int, known: Mapping[int, Base] = MappingProxyType({})) -> tuple[Body, Base]:
        """A body, and itself as a base for the next one. `known`: bases that it may stand on, by their numbers."""
        return self._build(self.body_record(number), number, known)

    def _build(self, record: bytes, number: int, known: Mapping[int, Base] = MappingProxyType({})) -> tuple[Body, Base]:
        """Follows the chain of bases down to a known one or its keyframe and builds the body up again."""
        chain = [(number, record)]
        while (lower := codec.base_of(chain[-1][1])) and lower not in known:
            chain.append((lower, self.body_record(lower)))
        at, record = chain.pop()
        body, base = codec.unpack_body(record, known[lower] if lower else None, at)
        for at, record in reversed(chain):
            body, base = codec.unpack_body(record, base, at)
        return body, base

    def built(self, record: bytes) -> Body:
        """The body of a call that still runs."""
        return self._build(record, 0)[0]

    def renew(self) -> None:
        """Forgets the segments at hand: they were written anew."""
        self._segment = self._bodies = (0, [])

    def body_record(self, number: int) -> bytes:
        """What is stored of a body. Raises `Forgot` when that is nothing any more."""
        first, records = self._bodies
        if not first <= number < first + len(records):
            first, records = self._body_segment(number)
        if not records[number - first]:
            raise Forgot(f"body {number} was forgotten")
        return records[number - first]

    def _body_segment(self, number: int) -> tuple[int, list[bytes]]:
        with self.txn.cursor(db=self._dbs["bodies"]) as cursor:
            if floor(cursor, keys.number(number)):
                first, records = keys.to_number(cursor.key()), codec.unpack_segment(cursor.value())
                if number - first < len(records):
                    self._bodies = first, records
                    return self._bodies
        if self.hole("bodies", number) is not None:
            raise Forgot(f"body {number} was forgotten")
        raise Damaged(f"body {number} is missing; run `penstock check`")

    def newest_body(self, rollout: str, attempt: str, spans: int) -> tuple[int, Base] | None:
        """(sequence, base) of the attempt's newest finished call with a body; None when the last have none."""
        for sequence in range(spans, max(0, spans - _RECENT), -1):
            cursor = self.index(rollout, attempt, sequence)
            if cursor:
                record = self.log_record(cursor)
                number = body_of(record[1 + keys.summary_key_length(record[1:]) :])
                if number is not None:
                    return sequence, self.body(number)[1]
        return None
