"""Removal of a rollout from the tape: one transaction hides it, the next ones delete its bytes, some in each.

Log and bodies are segments that many rollouts share. The records of a forgotten rollout in a segment are replaced by
empty ones, so that numbers stay; a segment of which nothing is left is deleted, and its numbers are noted as a *hole*.
A body depends only on bodies of its own rollout and on shared ones (`codec`). Of a shared body only the parts that
others still use are kept, and nothing once nobody uses it.

The deleted bytes are still in free pages of the file, until an `OverwritePass` has written zeros over them.
"""

from __future__ import annotations

import os
import struct
import time
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

from penstock.gateway.tape.store import codec, keys, records
from penstock.gateway.tape.store.directory import DamagedRecordError, TapeError
from penstock.gateway.tape.store.environment import ORDER, Environment, floor
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
        for kind in (keys.LIGHTNING_ROLLOUT, keys.LIGHTNING_ATTEMPT, keys.LIGHTNING_COUNTER, keys.LIGHTNING_SERVED):
            self._delete_all("lightning", kind + key)
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
                for kind in (keys.LIGHTNING_SPAN, keys.LIGHTNING_SEEN, keys.LIGHTNING_EVENT):
                    self._delete_all("lightning", kind + keys.number(number))
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


# Writes zeros over the remains of deleted records in the file of a tape, while a gateway writes it.
#
# LMDB never writes over anything: an unused page keeps its bytes until it is used again, and so does the gap between
# the two ends of a page of the tree, from which records were deleted. A *pass* goes through the file from its first
# page to its last. It writes zeros over free pages that no reader can still see, into gaps, and behind values that
# have pages of their own. First it does so behind the last page, where a failed commit may have left something; it
# does not cut that off, because the map of a reader may reach there.
#
# Each step holds LMDB's lock for writing, so that no page changes its use meanwhile; it is short. Nobody reads the
# bytes that it writes: LMDB neither reads a free page nor a gap. Before a pass the environment is opened anew,
# because LMDB keeps the buffers of written pages, with their old content, for the next pages that it writes.
#
# The layout is that of LMDB 0.9 (data version 1): `struct MDB_page`, `MDB_node`, `MDB_meta` and `MDB_db` of its
# mdb.c. A file with another layout is left alone, and `TapeError` raised.

OVERWRITE_STEP_S: Final = 0.01
"""Seconds that one step may hold the lock."""
_AT_ONCE: Final = 1024
"""Pages that are read in one go."""
_HEADER: Final = 16
_PAGE: Final = struct.Struct("<QHHHH")
"""Number, pad, flags, begin and end of the gap; a value with pages of its own has their count in place of the last
two."""
_NODE: Final = struct.Struct("<HHHH")
"""Size of the value (low, high), flags, size of the key."""
_BRANCH, _LEAF, _OVERFLOW, _FIXED = 0x01, 0x02, 0x04, 0x20
_BIG: Final = 0x01
"""The flag of a node whose value has pages of its own."""
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_DBS: Final = _HEADER + 24
"""Offset in a meta page of the records of the two roots, of 48 bytes each: first that of the list of free pages."""
_NONE: Final = 0xFFFFFFFFFFFFFFFF


class _Meta(NamedTuple):
    page_bytes: int
    free_root: int
    last_page: int
    transaction: int


class _FreePages(NamedTuple):
    """A record of the list of free pages."""

    transaction: int
    """The transaction that freed the pages."""
    pages: array[int]
    """Numbers of the pages, ascending."""


class OverwritePass:
    """One pass: call `step` until it returns False, from one thread."""

    def __init__(self, env: Environment) -> None:
        """Open the environment anew. Raises `TapeError` when the disk does not let it."""
        env.reopen()
        self._env = env
        self._fd = os.open(env.file, os.O_RDWR)
        try:
            meta = self._meta()
        except BaseException:
            os.close(self._fd)
            raise
        self._page_bytes, self._end = meta.page_bytes, meta.last_page + 1
        self._zeros = bytes(self._page_bytes)
        self._at = 2  # the first two are metas
        self._behind: int | None = 0
        """The position behind the last page at which to go on; None when nothing is left there."""
        self._seen = set[int]()
        """Free pages that a reader may still see, or that the next process would go back to."""
        self._read: tuple[int, list[_FreePages]] = (-1, [])
        """The list of free pages, and the transaction as of which it was read."""
        self.pages_overwritten = 0
        """Number of pages that were not empty and were overwritten."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    @property
    def is_blocked(self) -> bool:
        """True if it can only go on when a reader has ended, or when something has been committed."""
        return self._behind is None and self._at >= self._end

    def step(self) -> bool:
        """Do one step of the pass; return True if there is more."""
        if not self.is_blocked:
            # The pages of the step are in memory then, so that nobody waits for a disk.
            os.pread(self._fd, _AT_ONCE * self._page_bytes, self._at * self._page_bytes)
        with self._env.exclusive() as oldest:
            meta = self._meta()
            if self._behind is not None:
                self._rest(self._behind, meta)
                return True
            oldest, free = min(oldest, meta.transaction), self._all_free(meta)
            if self.is_blocked:
                self._again(free, oldest)
            else:
                self._some(free, oldest)
        if self.is_blocked and not self._seen:
            os.fdatasync(self._fd)
            return False
        return True

    def _rest(self, at: int, meta: _Meta) -> None:
        """Clear some of the file behind the last page. A writer may use some of it meanwhile, so the pass then ends at
        the new last page."""
        until, size = time.monotonic() + OVERWRITE_STEP_S, os.fstat(self._fd).st_size
        self._end = meta.last_page + 1
        at = max(at, self._end * self._page_bytes)
        while at < size and time.monotonic() < until:
            held = os.pread(self._fd, _AT_ONCE * self._page_bytes, at)
            self._clear(at, memoryview(held))
            at += len(held)
        self._behind = at if at < size else None

    def _some(self, free: list[_FreePages], oldest: int) -> None:
        first, until = self._at, time.monotonic() + OVERWRITE_STEP_S
        held = memoryview(os.pread(self._fd, _AT_ONCE * self._page_bytes, first * self._page_bytes))
        end = min(self._end, first + len(held) // self._page_bytes)
        if end <= first:
            self._at = self._end  # the file is shorter than LMDB counts: pages that were never written
            return
        gone, seen = set[int](), set[int]()
        for record in free:
            (gone if record.transaction < oldest else seen).update(
                record.pages[bisect_left(record.pages, first) : bisect_left(record.pages, end)]
            )
        if self._at not in gone and self._at not in seen:
            self._at = self._behind_value(gone | seen)
        while self._at < end and time.monotonic() < until:
            number = self._at
            page = held[(number - first) * self._page_bytes :][: self._page_bytes]
            self._at += 1
            if number in gone:
                self._clear(number * self._page_bytes, page)
            elif number in seen:
                self._seen.add(number)
            else:
                self._at = number + self._live(number, page)

    def _behind_value(self, free: set[int]) -> int:
        """Return the page at which to go on: the one behind the value that covers this page. A page before it was free
        at the last step, and may be the first of such a value now."""
        for number in range(self._at - 1, 1, -1):
            if number in free:
                break
            named, _, flags, low, high = _PAGE.unpack(os.pread(self._fd, _HEADER, number * self._page_bytes))
            if named == number:
                return max(self._at, number + (low | high << 16) if flags & _OVERFLOW else 0)
        return self._at

    def _again(self, free: list[_FreePages], oldest: int) -> None:
        """Check again the free pages that a reader could see. A page that is used again was written whole."""
        still, until = set[int](), time.monotonic() + OVERWRITE_STEP_S
        for record in free:
            for number in self._seen.intersection(record.pages):
                if record.transaction >= oldest or time.monotonic() > until:
                    still.add(number)
                    continue
                at = number * self._page_bytes
                self._clear(at, memoryview(os.pread(self._fd, self._page_bytes, at)))
        self._seen = still

    def _live(self, number: int, page: memoryview) -> int:
        """Clear the unused parts of a used page; return its number of pages."""
        named, _, flags, lower, upper = _PAGE.unpack_from(page)
        if named != number:
            raise self._strange(f"page {number} says that it is page {named}")
        if flags & _OVERFLOW:
            return lower | upper << 16
        if flags & (_BRANCH | _LEAF) and not flags & _FIXED:
            if not _HEADER <= lower <= upper <= self._page_bytes:
                raise self._strange(f"page {number} has its gap at {lower} to {upper}")
            self._clear(number * self._page_bytes + lower, page[lower:upper])
            if flags & _LEAF:
                for at, size in _big(page, lower):
                    self._clear_behind(at, size)
        return 1

    def _clear_behind(self, first: int, size: int) -> None:
        """Clear the bytes behind a value of `size` bytes that has pages of its own."""
        head = os.pread(self._fd, _HEADER, first * self._page_bytes)
        named, _, flags, low, high = _PAGE.unpack(head)
        if named != first or not flags & _OVERFLOW:
            raise self._strange(f"page {first} should hold a value of {size} bytes")
        at, end = first * self._page_bytes + _HEADER + size, (first + (low | high << 16)) * self._page_bytes
        self._clear(at, memoryview(os.pread(self._fd, max(0, end - at), at)))

    def _clear(self, at: int, held: memoryview) -> None:
        """Write zeros there unless all bytes are zero."""
        zeros = self._zeros if len(held) <= self._page_bytes else bytes(len(held))
        if bytes(held) != zeros[: len(held)]:
            if os.pwrite(self._fd, zeros[: len(held)], at) < len(held):
                raise TapeError(
                    f"the disk takes only some of what is written over {self._env.file}; free or remount it"
                )
            self.pages_overwritten += 1

    # -- pages of LMDB -----------------------------------------------------------------------------------------------

    def _meta(self) -> _Meta:
        """Return the newer of the two metas."""
        found = [self._meta_at(0)]
        found.append(self._meta_at(found[0].page_bytes))
        return max(found, key=lambda meta: meta.transaction)

    def _meta_at(self, at: int) -> _Meta:
        head = os.pread(self._fd, 256, at)
        magic, version = struct.unpack_from("<II", head, _HEADER)
        if (magic, version) != (_MAGIC, _VERSION):
            raise self._strange(f"it has version {version} of LMDB's layout, {_VERSION} is known")
        (page_bytes,) = struct.unpack_from("<I", head, _DBS)
        (free_root,) = struct.unpack_from("<Q", head, _DBS + 40)
        last_page, transaction = struct.unpack_from("<QQ", head, _DBS + 2 * 48)
        return _Meta(page_bytes, free_root, last_page, transaction)

    def _all_free(self, meta: _Meta) -> list[_FreePages]:
        """Return the list of free pages. A long list takes longer to read than the rest of a step, so it is read again
        only after a commit."""
        if self._read[0] != meta.transaction:
            self._read = meta.transaction, list(self._free(meta.free_root))
        return self._read[1]

    def _free(self, root: int) -> Iterator[_FreePages]:
        """Yield all records of the list of free pages below this root."""
        if root == _NONE:
            return
        page = memoryview(os.pread(self._fd, self._page_bytes, root * self._page_bytes))
        _, _, flags, lower, _ = _PAGE.unpack_from(page)
        for at in _nodes(page, lower):
            low, high, node_flags, key_bytes = _NODE.unpack_from(page, at)
            if flags & _BRANCH:
                yield from self._free(low | high << 16 | node_flags << 32)
                continue
            (transaction,) = struct.unpack_from("<Q", page, at + 8)
            data, size = page[at + 8 + key_bytes :], low | high << 16
            if node_flags & _BIG:
                (first,) = struct.unpack_from("<Q", data)
                data = memoryview(os.pread(self._fd, size, first * self._page_bytes + _HEADER))
            numbers = array("Q", bytes(data[:size]))
            yield _FreePages(transaction, numbers[1 : 1 + numbers[0]][::-1])  # LMDB has the highest first

    def _strange(self, what: str) -> TapeError:
        return TapeError(f"{self._env.file} is not laid out as expected ({what}): nothing more is overwritten in it")


def _nodes(page: memoryview, lower: int) -> tuple[int, ...]:
    """Return the offsets of the nodes of a page."""
    return struct.unpack_from(f"<{(lower - _HEADER) // 2}H", page, _HEADER)


def _big(page: memoryview, lower: int) -> Iterator[tuple[int, int]]:
    """Yield (first page, bytes) of the values of a leaf that have pages of their own."""
    for at in _nodes(page, lower):
        low, high, flags, key_bytes = _NODE.unpack_from(page, at)
        if flags & _BIG:
            yield struct.unpack_from("<Q", page, at + 8 + key_bytes)[0], low | high << 16
