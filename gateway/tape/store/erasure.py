"""Removal of a rollout from the tape: one transaction hides it, the next ones delete its bytes, some in each.

Log and bodies are segments that many rollouts share. The records of a forgotten rollout in a segment are replaced by
empty ones, so that numbers stay; a segment of which nothing is left is deleted, and its numbers are noted as a *hole*.
A body depends only on bodies of its own rollout and on shared ones (`codec`). Of a shared body only the parts that
others still use are kept, and nothing once nobody uses it.

The deleted bytes are still in free pages of the file, until `overwrite_pass` has written zeros over them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.gateway.tape.store import codec, keys, records
from penstock.gateway.tape.store.directory import DamagedRecordError
from penstock.gateway.tape.store.environment import ORDER, floor
from penstock.gateway.tape.store.records import Origins
from penstock.gateway.tape.store.tables import TapeTables, WriteBatch
from penstock.gateway.tape.store.view import BLOCK, FORGOTTEN

SPANS = 256
"""About this many spans are wiped in one transaction, if there is time."""
STEP_S = 0.02
"""Time after which a transaction wipes no more, in seconds."""
_TOGETHER = 32
"""Spans that are wiped at least before the time is checked."""
_SWEPT = 64
"""Segments of the log that are deleted in one transaction."""
_SPANS = records.ATTEMPT.index("spans")


class WipePosition(NamedTuple):
    """The position at which wiping goes on: a block of the index of an attempt."""

    attempt: bytes = b""
    """Key of the attempt; empty for the first one."""
    block: int = 0


class RolloutErasure:
    """Removal of rollouts in an open transaction; for the thread that writes."""

    def __init__(self, batch: WriteBatch, tables: TapeTables) -> None:
        self._batch, self._tables = batch, tables
        self._txn, self._dbs, self._view = batch.txn, tables.dbs, batch.view

    def hide(self, rollout: str) -> int:
        """Hide a rollout and return its number. It must have ended, and none of its calls may run."""
        key, origins = keys.rollout_key(rollout), self._view.origins(rollout)
        assert origins is not None, rollout
        self._delete("rollouts", key)
        self._delete("tasks", key)
        self._txn.delete(ORDER, keys.number(origins.number), db=self._dbs["order"])
        self._delete_all("rewards", key)
        self._delete_all("live", key)
        self._delete_all("unclaimed", keys.number(origins.number))
        self._tables.forget(rollout, self._view.attempt_names(origins.number))
        self._batch.append(b"f" + key + keys.number(origins.number))
        return origins.number

    def wipe(self, going: Sequence[tuple[int, WipePosition]]) -> list[WipePosition | None]:
        """Wipe some calls of hidden rollouts. `going` has the number of each and the position to go on from. The calls
        of the first are wiped, and those of as many more as there is time for. Return the next position for each of
        these; None when all of its calls are gone. Together they cost less: the calls of rollouts that ran at the same
        time are in the same segments."""
        cursors: list[int] = []
        following: list[WipePosition | None] = []
        for number, place in going:
            if len(cursors) >= SPANS:
                break
            found, after = self._cursors(number, place)
            cursors += found
            following.append(after)
        until = time.monotonic() + STEP_S
        for at, some in enumerate(self._portions(cursors)):
            if at and time.monotonic() >= until:
                return [going[0][1]]  # the next call skips those that are wiped
            self._wipe_calls(some)
            self._batch.wrote = True
        for (number, _), after in zip(going, following, strict=False):
            if after is None:
                self._delete_all("attempts", keys.number(number))
                self._delete_all("index", keys.number(number))
        return following

    def _portions(self, cursors: Iterable[int]) -> Iterator[dict[int, set[int]]]:
        """Yield the cursors that are not wiped yet, by the last cursor of their segment of the log; a segment is never
        split."""
        found: dict[int, set[int]] = defaultdict(set)
        for cursor in sorted(cursors):
            if self._view.log_record(cursor) != FORGOTTEN:
                found[self._log_key(cursor)].add(cursor)
        portion: dict[int, set[int]] = {}
        for last, some in found.items():
            portion[last] = some
            if sum(map(len, portion.values())) >= _TOGETHER:
                yield portion
                portion = {}
        if portion:
            yield portion

    def _wipe_calls(self, gone: Mapping[int, set[int]]) -> None:
        edits: dict[int, bytes] = {}
        for cursor in (cursor for some in gone.values() for cursor in some):
            record = self._view.log_record(cursor)
            body = records.body_of(record[1 + keys.summary_key_length(record[1:]) :])
            if body is not None:
                edits[body] = b""
        self._replace_bodies(edits | self._shared_edits(edits))
        for last, some in gone.items():
            self._wipe_log(last, some)

    def sweep(self, below: int) -> bool:
        """Delete some of the log below this cursor, which nothing on the tape refers to. Return True if there is
        more."""
        for _ in range(_SWEPT):
            with self._txn.cursor(db=self._dbs["log"]) as cursor:
                if not cursor.first() or keys.to_number(cursor.key()) >= below:
                    return False
                key, segment = cursor.item()
                if not cursor.next():
                    return False
            last = keys.to_number(key)
            self._delete("log", key)
            self._add_hole("log", last - len(codec.unpack_log(segment)) + 1, last)
            self._batch.wrote = True
        return True

    # -- the index ---------------------------------------------------------------------------------------------------

    def _cursors(self, number: int, place: WipePosition) -> tuple[list[int], WipePosition | None]:
        """Return (cursors of summaries, the position to go on from; None at the end)."""
        found: list[int] = []
        for key, record in self._view.scan("attempts", keys.number(number)):
            if key < place.attempt:
                continue
            values, newest = records.attempt_values(record, Origins(number, 0))
            block = place.block if key == place.attempt else 0
            while block * BLOCK < values[_SPANS]:
                if len(found) >= SPANS:
                    return found, WipePosition(key, block)
                stored = self._view.get("index", key + keys.u32(block))
                cursors = newest if stored is None else keys.to_numbers(stored)
                found += filter(None, cursors)
                block += 1
        return found, None

    # -- the log -----------------------------------------------------------------------------------------------------

    def _log_key(self, at: int) -> int:
        """Return the last cursor of the segment that holds this one."""
        first, held = self._view.log_segment(at)
        return first + len(held) - 1

    def _wipe_log(self, last: int, cursors: set[int]) -> None:
        """Wipe these calls of a segment, and the segment's other changes of their rollouts. After the change that hid a
        rollout, a new rollout of the same name may begin."""
        first, found = self._view.log_segment(last)
        names = {_rollout_of(found[cursor - first]) for cursor in cursors}
        held: list[bytes] = []
        for cursor, record in enumerate(found, first):
            kind, name = record[:1], _rollout_of(record)
            if kind == b"f":
                names.discard(name)
            gone = cursor in cursors or (kind in (b"r", b"o", b"a") and name in names)
            held.append(FORGOTTEN if gone else record)
        if all(record == FORGOTTEN for record in held) and last != self._view.last("log"):
            self._delete("log", keys.number(last))
            self._add_hole("log", first, last)
        else:
            self._txn.put(keys.number(last), codec.repack_log(held), db=self._dbs["log"])
        self._view.drop_segments()

    # -- bodies ------------------------------------------------------------------------------------------------------

    def _shared_edits(self, gone: Iterable[int]) -> dict[int, bytes]:
        """Return the new records of the shared bodies that these bodies were stored against."""
        used = set[int]()
        for number in gone:
            base = codec.base_use(self._view.body_record(number))[0]
            if self._txn.delete(keys.numbers((base, number)), db=self._dbs["uses"]):
                used.add(base)
        edits: dict[int, bytes] = {}
        for number in used:
            text = self._view.body(number)[0].request
            uses = [keys.to_numbers(value) for _, value in self._view.scan("uses", keys.number(number))]
            prefix, suffix = (max(sizes) for sizes in zip(*uses, strict=True)) if uses else (0, 0)
            if prefix + suffix < len(text):
                cut = text[:prefix] + text[len(text) - suffix :]
                edits[number] = codec.pack_shared(cut, number, alone=True)[0] if uses else b""
        if edits:
            self._restate_open(edits)
            self._tables.forget_shared(edits)
            self._batch.cut = True
        return edits

    def _restate_open(self, changing: Mapping[int, bytes]) -> None:
        """Rewrite calls that run and are stored against one of these bodies, so that they do not need it."""
        stored = [(key, *codec.unpack_open(value), codec.process_of(value)) for key, value in self._view.scan("open")]
        for key, summary, record, process in stored:
            if record is not None and codec.base_use(record)[0] in changing:
                restated, _ = codec.pack_body(self._view.build_open_body(record), 0, None, alone=True)
                self._txn.put(key, codec.pack_open(summary, restated, process), db=self._dbs["open"])

    def _replace_bodies(self, edits: Mapping[int, bytes]) -> None:
        newest = self._view.last("bodies")
        for first, segment, numbers in list(self._segments(edits)):
            held = codec.unpack_segment(segment)
            for number in numbers:
                held[number - first] = edits[number]
            if not any(held) and first != newest:
                self._delete("bodies", keys.number(first))
                self._add_hole("bodies", first, first + len(held) - 1)
            else:
                self._txn.put(keys.number(first), codec.repack_segment(held, segment), db=self._dbs["bodies"])
        self._view.drop_segments()

    def _segments(self, numbers: Iterable[int]) -> Iterator[tuple[int, bytes, list[int]]]:
        """Yield (number of its first body, the segment, those of these numbers that it holds) for each segment."""
        found: dict[int, list[int]] = defaultdict(list)
        with self._txn.cursor(db=self._dbs["bodies"]) as cursor:
            for number in numbers:
                if not floor(cursor, keys.number(number)):
                    raise DamagedRecordError(f"body {number} is missing; run `penstock check`")
                found[keys.to_number(cursor.key())].append(number)
        for first, held in found.items():
            segment = self._view.get("bodies", keys.number(first))
            assert segment is not None
            yield first, segment, held

    # -- records -----------------------------------------------------------------------------------------------------

    def _add_hole(self, database: str, first: int, last: int) -> None:
        """Note that no segment holds these numbers any more; neighbours become one hole."""
        holes, prefix = self._dbs["holes"], keys.rollout_key(database)
        before = self._txn.pop(prefix + keys.number(first - 1), db=holes)
        if before is not None:
            first = keys.to_number(before)
        after = self._view.hole(database, last + 1)
        self._txn.put(prefix + keys.number(last if after is None else after[1]), keys.number(first), db=holes)

    def _delete(self, database: str, key: bytes) -> None:
        self._batch.wrote |= self._txn.delete(key, db=self._dbs[database])

    def _delete_all(self, database: str, prefix: bytes) -> None:
        for key in [key for key, _ in self._view.scan(database, prefix)]:
            self._delete(database, key)


def _rollout_of(record: bytes) -> bytes:
    return record[1 : record.find(0) + 1]
