"""Keeps an index in step with a tape. Runs in the process of the index, on one thread.

Following reads the log in pieces, each in one short transaction. A changed rollout is read anew at the next question,
or with the next piece: so many calls of one rollout cost one reading.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Final

from penstock.gateway.followers.index.finder import NoAnswerError, compute_totals, find, sum_up
from penstock.gateway.followers.index.link import (
    FindRequest,
    FindResult,
    IndexState,
    SumRequest,
    SumResult,
    TotalResult,
)
from penstock.gateway.followers.index.rows import (
    PassageReader,
    RolloutNumbers,
    Row,
    SpanRecord,
    attempt_row,
    input_row,
    rollout_row,
    span_row,
)
from penstock.gateway.followers.index.segments import (
    NOW,
    SEALED,
    Manifest,
    SegmentDirectory,
    SegmentFile,
    clear,
    seal_of,
)
from penstock.gateway.followers.index.tables import DAMAGE_ERRORS, IndexTables
from penstock.gateway.followers.index.texts import SHAPE, TextIndex
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.turn import Passage
from penstock.gateway.tape.store import Store, codec, directory, keys
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.view import FORGOTTEN, TapeView

np: Final[Any] = import_module("numpy")
pa: Final[Any] = import_module("pyarrow")
pq: Final[Any] = import_module("pyarrow.parquet")

PIECE: Final = 4096
"""Changes that are read in one transaction."""
READ_S: Final = 0.2
"""Seconds of reading in one transaction: bodies may be large."""
UNSEALED_BYTES: Final = 64 << 20
"""Bytes of texts in memory above which they are sealed, however few their spans are."""
MARKED: Final = 256
"""The number of last changes that identify the tape of an index."""
_GONE: Final = "-" * 8
"""Stands in a mark for a forgotten change."""
_log = logging.getLogger("penstock.index")


@dataclass(slots=True)
class _LogSlice:
    cursor: int = 0
    """The last change that was read; 0 without one."""
    spans: list[Row] = field(default_factory=list[Row])
    said: list[tuple[int, tuple[str, str, int], list[Passage]]] = field(
        default_factory=list[tuple[int, tuple[str, str, int], list[Passage]]]
    )
    running: dict[bytes, int | None] = field(default_factory=dict[bytes, "int | None"])
    """The cursor of a call's beginning, by the key of its summary; None for a call that has ended."""
    rollouts: dict[str, None] = field(default_factory=dict[str, None])
    """Changed rollouts."""
    forgotten: list[int] = field(default_factory=list[int])
    """Numbers of forgotten rollouts."""


class TapeIndex:
    """The index of a tape. Every error of DuckDB that it raises means that it is damaged: `rebuild`."""

    def __init__(self, store: Store, path: Path, sealed: int = SEALED, prices: Prices | None = None) -> None:
        """Opens the files if they are whole, of this tape and of these prices; otherwise begins anew. Raises
        `IndexLockedError`."""
        self._store, self._sealed, self._prices = store, sealed, prices or Prices()
        self._segments = SegmentDirectory(path)
        manifest = self._segments.load()
        if not self._of_this_tape(manifest):
            _log.info("the index in %s is of another tape, or of an older state of it: it is made anew", path)
            manifest = Manifest()
        if manifest.cursor and manifest.prices != self._prices.digest:
            _log.info("prices have changed: the index in %s is made anew", path)
            manifest = Manifest()
        try:
            self._open(manifest)
        except DAMAGE_ERRORS:
            _log.warning("the index in %s cannot be read: it is made anew", path, exc_info=True)
            self._segments.commit(Manifest())
            self._open(Manifest())

    def _of_this_tape(self, manifest: Manifest) -> bool:
        try:
            if not manifest.cursor:
                return True
            return manifest.cursor <= self._store.cursor() and _same(manifest.mark, self._mark(manifest.cursor))
        except TapeError:
            return False

    def _mark(self, cursor: int) -> str:
        """Identifies the tape: a hash of each of the last changes, with the creation time of the rollout that it names.
        (Calls contain their times; other changes are only a name.)"""
        with self._store.view() as view:
            records = _records(view, max(1, cursor - MARKED + 1), cursor)
            return "".join(_hash(view, at, record) for at, record in records)

    def _open(self, manifest: Manifest) -> None:
        self._segments.clean(manifest.files)
        clear(self._segments.path)
        self.cursor, self._sealed_cursor = manifest.cursor, manifest.cursor
        self._tables = IndexTables(self._segments, manifest.files)
        self._texts, self._snapshots = TextIndex(self._segments, manifest.files), Snapshots(self._segments)
        self._removal = Removal(self._segments, self._tables, self._texts, manifest.forgotten)
        self._rollouts, self._passages = RolloutNumbers(), PassageReader()
        self._running = {bytes.fromhex(key): at for at, key in manifest.running}
        self._running_changed = bool(self._running)
        self._dirty = dict[str, None]()
        self._inputs = set[int]()
        self._fresh = 0
        self._changed = 0

    def rebuild(self) -> None:
        """Deletes the index and begins anew."""
        self._tables.close()
        self._texts.close()
        self._segments.commit(Manifest())
        self._open(Manifest())

    def close(self) -> None:
        """Closes the index. Rows that no manifest names are on the tape."""
        self._tables.close()
        self._texts.close()
        self._snapshots.close()
        self._segments.close()

    # -- following ---------------------------------------------------------------------------------------------------

    def follow(self, until: float) -> bool:
        """Reads to the present end of the tape, or until that time (of `time.monotonic`). True if it has reached the
        end.

        Changes that are made meanwhile are left for the next time: many small pieces would cost more than a few large
        ones.
        """
        end = self._store.cursor()
        while self.cursor < end and self._read_piece():
            if len(self._dirty) >= PIECE:
                self._refresh_rollouts()
            many = self._fresh >= self._sealed or self._changed + len(self._dirty) >= self._sealed
            if many or self._texts.unsealed_bytes >= UNSEALED_BYTES:
                self._refresh()
                self._seal()
            if time.monotonic() >= until:
                break
        return self.cursor >= end

    def _read_piece(self) -> bool:
        """Reads the next changes, as many as there is time for; False without any."""
        piece, until = _LogSlice(), time.monotonic() + READ_S
        with self._store.view() as view:
            if (hole := view.hole("log", self.cursor + 1)) is not None:
                piece.cursor = hole[1]
            if hole is not None and hole[0] == 1:
                # The beginning of the log was swept, and with it the records that these rollouts were forgotten.
                piece.forgotten += self._tables.numbers_to(hole[1])
                self._rollouts, self._passages = RolloutNumbers(), PassageReader()
            newest = min(view.last("log"), self.cursor + PIECE) if hole is None else 0
            for piece.cursor, record in _records(view, self.cursor + 1, newest):
                try:
                    self._take(view, piece.cursor, record, piece)
                except directory.DAMAGE_ERRORS as error:
                    _log.error("change %d of the tape is not in the index: %s", piece.cursor, error)
                if time.monotonic() > until:
                    break
            else:
                if newest > self.cursor:
                    piece.cursor = newest  # the last records of all may be damaged
        if not piece.cursor:
            return False
        self._add(piece)
        return True

    def _take(self, view: TapeView, at: int, record: bytes, piece: _LogSlice) -> None:
        kind, key, rollout = record[:1], record[1:], _rollout_of(record)
        if rollout is None:
            return
        if kind == b"f":
            piece.forgotten.append(keys.to_number(key[-8:]))
            self._rollouts.forget(rollout)
            self._passages.forget()
            return
        number = self._rollouts.number(view, rollout)
        if not 0 < number <= at:
            return  # it was forgotten; there may be another of its name
        piece.rollouts[rollout] = None
        if kind == b"s":
            length = keys.summary_key_length(key)
            head = SpanRecord(view, key[:length], key[length:])
            passages = self._passages.read(view, head)
            piece.spans.append(span_row(head, at, number, head.tools(passages), self._prices))
            piece.said.append((at, (head.rollout, head.attempt, head.sequence), passages))
            piece.running[key[:length]] = None
        elif kind == b"o":
            piece.running[key] = at

    def _add(self, piece: _LogSlice) -> None:
        """Adds a piece as a whole, so that a piece that cannot be read leaves nothing behind."""
        self._tables.add("spans", piece.spans)
        for said in piece.said:
            self._texts.add(*said)
        for key, begun in piece.running.items():
            if begun is not None:
                self._running[key] = begun
                self._running_changed = True
            elif self._running.pop(key, None) is not None:
                self._running_changed = True
        self._dirty.update(piece.rollouts)
        if piece.forgotten:
            self._removal.add(piece.forgotten)
            self._snapshots.drop()
        self._fresh += len(piece.spans)
        self.cursor = piece.cursor

    def _refresh(self) -> None:
        """Reads the changed rows anew: running calls, and rollouts with their attempts."""
        while self._running_changed:
            rows, gone = self._running_rows()
            if gone and self._read_piece():
                continue  # they have ended since, and that is in the log
            for key in gone:
                del self._running[key]
            self._tables.replace_running(rows)
            self._running_changed = False
        while self._dirty:
            self._refresh_rollouts()

    def _refresh_rollouts(self) -> None:
        """Reads up to `PIECE` changed rollouts anew."""
        rollouts: list[Row] = []
        attempts: list[Row] = []
        inputs: list[Row] = []
        names = list(islice(self._dirty, PIECE))
        with self._store.view() as view:
            for name in names:
                try:
                    self._read_rollout(view, name, rollouts, attempts, inputs)
                except directory.DAMAGE_ERRORS as error:
                    _log.error("rollout %s is not in the index as it is now: %s", name, error)
        self._tables.replace_rows("rollouts", rollouts)
        self._tables.replace_rows("attempts", attempts)
        self._tables.add("inputs", inputs)
        self._inputs.update(number for number, _ in inputs)
        self._changed += len(rollouts)
        for name in names:
            del self._dirty[name]

    def _read_rollout(
        self, view: TapeView, name: str, rollouts: list[Row], attempts: list[Row], inputs: list[Row]
    ) -> None:
        found = view.numbered_rollout(name)
        if found is None:
            return
        number, rollout = found
        tries = view.attempts(name)
        made = [attempt_row(number, attempt) for attempt in tries]
        rollouts.append(rollout_row(number, rollout, tries))
        attempts += made
        # A rollout's input never changes, so it is added once: those of before the last seal are sealed.
        if rollout.input is not None and number > self._sealed_cursor and number not in self._inputs:
            inputs.append(input_row(number, rollout))

    def _running_rows(self) -> tuple[list[Row], list[bytes]]:
        """(rows of running calls, keys of those that no longer run)."""
        rows: list[Row] = []
        gone: list[bytes] = []
        with self._store.view() as view:
            for key, at in self._running.items():
                stored = view.get("open", key)
                if stored is None:
                    gone.append(key)
                    continue
                try:
                    head = SpanRecord(view, key, codec.unpack_open(stored)[0])
                    number = self._rollouts.number(view, head.rollout)
                    rows.append(span_row(head, at, number, head.tools(()), self._prices))
                except directory.DAMAGE_ERRORS as error:
                    _log.error("a call that runs is not in the index: %s", error)
        return rows, gone

    def _seal(self) -> None:
        mark = self._mark(self.cursor)
        files = [*self._tables.seal(self.cursor), *self._texts.seal(self.cursor)]
        self._commit(self.cursor, mark, (*self._tables.files, *files))
        self._tables.adopt_sealed(files)
        self._texts.adopt_sealed(files)
        self._sealed_cursor = self.cursor
        self._inputs.clear()
        self._fresh = self._changed = 0

    def _commit(self, cursor: int, mark: str, files: Sequence[SegmentFile]) -> None:
        running = tuple((at, key.hex()) for key, at in self._running.items())
        forgotten = tuple(self._removal.numbers)
        self._segments.commit(Manifest(cursor, mark, running, tuple(files), forgotten, self._prices.digest))

    def tidy(self) -> bool:
        """Takes forgotten rollouts out of the files of one seal. True if there is more to do."""
        if not self._removal.numbers:
            return False
        replaced = self._removal.step()
        if replaced is None:
            self._tables.clear_hidden()
        else:
            self._tables.swap_files(*replaced)
            self._snapshots.drop()
        if self._sealed_cursor:
            self._commit(self._sealed_cursor, self._mark(self._sealed_cursor), self._tables.files)
        self._texts.swap_files(self._tables.files)
        return bool(self._removal.numbers)

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def lag(self) -> int:
        """The number of changes of the tape that it has not read."""
        return self._store.cursor() - self.cursor

    def sound(self) -> bool:
        """True if its columns can be read and its texts are as they were written."""
        try:
            self._tables.query("select count(distinct model), max(start_ns) from spans")
            return all(self._segments.is_whole(file) for file in self._tables.files if file.table == "passages")
        except DAMAGE_ERRORS:
            return False

    def state(self) -> IndexState:
        files = self._tables.files
        return IndexState(
            self.cursor,
            self._store.cursor(),
            len(files),
            sum(file.bytes for file in files),
            self._fresh,
            len(self._removal.numbers),
        )

    def find(self, asked: FindRequest) -> FindResult:
        """The positions of a page's rows, newest first. The index must have caught up."""
        self._refresh()
        return find(self._tables, self._texts, asked)

    def sum(self, asked: SumRequest) -> SumResult:
        """Sums over the calls of a filter. The index must have caught up. Raises `NoAnswerError`."""
        self._refresh()
        return sum_up(self._tables, self._texts, asked)

    def total(self) -> TotalResult:
        """Sums over all spans. The index must have caught up."""
        self._refresh()
        return compute_totals(self._tables.query)

    def files(self) -> Files:
        """Files with all rows of the index, by table. The index must have caught up. Raises `NoAnswerError`."""
        while self.tidy():
            pass
        self._refresh()
        try:
            return self._snapshots.take(self._tables, self._texts, self.cursor)
        except DAMAGE_ERRORS as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise NoAnswerError(f"what is in memory cannot be written: {reason}") from None


def _rollout_of(record: bytes) -> str | None:
    """The rollout of a change; None for a change of a release, a run ..."""
    return record[1 : record.index(0)].decode("ascii") if record[:1] in (b"s", b"o", b"a", b"r", b"f") else None


def _hash(view: TapeView, at: int, record: bytes) -> str:
    """Identifies a change; the same for all that were forgotten."""
    named = _rollout_of(record)
    try:
        origins = None if named is None else view.origins(named)
    except directory.DAMAGE_ERRORS:
        return _GONE
    if record == FORGOTTEN or (named is not None and (origins is None or origins.number > at)):
        return _GONE
    return hashlib.blake2b(record + repr(origins).encode(), digest_size=len(_GONE) // 2).hexdigest()


def _same(mark: str, now: str) -> bool:
    """True if the tape of a mark is that of now, which may have forgotten something since."""
    pieces = ((mark[at : at + len(_GONE)], now[at : at + len(_GONE)]) for at in range(0, len(now), len(_GONE)))
    return len(mark) == len(now) and all(is_now in (was, _GONE) for was, is_now in pieces)


def _records(view: TapeView, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """The records of the log with these cursors, both included."""
    while first <= last:
        try:
            begins, records = view.log_segment(first)
        except directory.DAMAGE_ERRORS as error:
            _, end = view.log_gap(first)
            _log.error("changes %d to %d of the tape are not in the index: %s", first, end, error)
            first = end + 1
            continue
        yield from enumerate(records[first - begins : last + 1 - begins], first)
        first = begins + len(records)


# Forgotten rollouts leave the answers at once, and the sealed files one seal after another.
#
# The files of a seal that hold rows of one are written anew without it, under other names, and a manifest that names
# the new files deletes the old ones. Until then the manifest lists the rollouts that are still in files, so that a
# killed process's successor continues.


class Removal:
    """The removal of forgotten rollouts from one index."""

    def __init__(
        self, segments: SegmentDirectory, tables: IndexTables, texts: TextIndex, numbers: Iterable[int]
    ) -> None:
        """`numbers`: forgotten rollouts that may still be in sealed files, from the manifest."""
        self._segments, self._tables, self._texts = segments, tables, texts
        self.numbers = set[int]()
        self._seals: list[str] | None = None
        """Seals whose files may hold rows of `numbers`; None if unknown."""
        self.add(numbers)

    def add(self, numbers: Iterable[int]) -> None:
        """Takes rollouts out of the answers."""
        new = set(numbers) - self.numbers
        if new:
            self.numbers |= new
            self._seals = None
            self._texts.remove(self._tables.hide(new))

    def step(self) -> tuple[list[SegmentFile], list[SegmentFile]] | None:
        """Writes the files of one seal anew. Returns (replaced files, new files); None if none is left to do."""
        if self._seals is None:
            named = self._tables.files_naming(self.numbers)
            self._seals = sorted({seal_of(file.name) for file in self._tables.files if file.name in named})
        if not self._seals:
            self.numbers.clear()
            return None
        return self._rewritten(self._seals.pop())

    def _rewritten(self, seal: str) -> tuple[list[SegmentFile], list[SegmentFile]]:
        files = [file for file in self._tables.files if seal_of(file.name) == seal]
        named, gone, made = self._tables.files_naming(self.numbers, files), list[SegmentFile](), list[SegmentFile]()
        cursors: Sequence[int] = []
        for file in files:
            if file.name in named:
                if file.table == "spans":
                    cursors = self._tables.cursors_of(file, self.numbers)
                gone.append(file)
                made += self._tables.rewrite_without(file, self.numbers)
        if cursors:
            said = [file for file in files if file.table in ("passages", "grams")]
            gone += said
            made += [new for file in said if file.table == "passages" for new in self._without(file, cursors)]
        return gone, made

    def _without(self, file: SegmentFile, cursors: Sequence[int]) -> Iterator[SegmentFile]:
        yield from self._texts.rewrite_without(file, np.array(cursors, np.int64))


# Snapshots of the rows in memory as files, for processes that read files: with the sealed files they are the whole
# index.
#
# A snapshot is taken for a request, at most once a second. The last two are kept: a reader that needs the files for
# longer makes links to them (`sql.runner`).

FRESH_S: Final = 1.0
"""Greatest age of a snapshot that is used again, in seconds."""
KEPT: Final = 2
"""The number of snapshots that are kept."""
Files = dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    cursor: int
    taken: float
    path: Path
    files: Files


class Snapshots:
    """The snapshots of one index; for one thread."""

    def __init__(self, segments: SegmentDirectory) -> None:
        self._path, self._segments = segments.path / NOW, segments
        self._taken: list[_Snapshot] = []
        self._number = 0

    def take(self, tables: IndexTables, texts: TextIndex, cursor: int) -> Files:
        """The files of each table, as of now or of at most `FRESH_S` ago."""
        now = time.monotonic()
        newest = self._taken[-1] if self._taken else None
        if newest is None or (newest.cursor != cursor and now - newest.taken > FRESH_S):
            self._number += 1
            path = self._path / str(self._number)
            path.mkdir(mode=0o700, parents=True)
            try:
                newest = _Snapshot(cursor, now, path, self._write(path, tables, texts))
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
            self._taken.append(newest)
            for old in self._taken[:-KEPT]:
                shutil.rmtree(old.path, ignore_errors=True)
            del self._taken[:-KEPT]
        return newest.files

    def drop(self) -> None:
        """Deletes all snapshots, because rows in them were forgotten."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._taken.clear()

    def close(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)

    def _write(self, path: Path, tables: IndexTables, texts: TextIndex) -> Files:
        found = {table: [str(path / f"{table}.parquet")] for table in ("spans", "rollouts", "attempts")}
        tables.write(path)
        if fresh := texts.fresh:
            found["passages"] = [str(path / "passages.parquet")]
            pq.write_table(pa.concat_tables(fresh).cast(SHAPE), path / "passages.parquet", compression="snappy")
        for file in tables.files:
            if file.table in ("spans", "passages"):
                found.setdefault(file.table, []).append(str(self._segments.path / file.name))
        return found
