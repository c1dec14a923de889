"""The lake of one tape: all its tables, kept in step with it, one chunk of changes at a time.

The tables are committed one after the other, so a kill can leave some ahead of others. Each has its own cursor: the
next chunk begins at the lowest of them, and each table takes only rows that are new to it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, timedelta
from importlib import import_module
from typing import Any, Final, NamedTuple, cast
from uuid import uuid4

from penstock.gateway.followers.lake.location import (
    CommitConflictError,
    LakeFiles,
    LakeLocation,
    LakeUnreachableError,
    LakeUnusableError,
    deltalake,
)
from penstock.gateway.followers.lake.rows import (
    ALWAYS,
    BODIES,
    BYTES,
    ROWS,
    SCHEMA,
    TABLE_DEFINITIONS,
    ChunkReader,
    RowChunk,
    TableDefinition,
    Values,
    is_marked,
)
from penstock.gateway.model.prices import Prices
from penstock.gateway.tape.store import Store

pa: Final[Any] = import_module("pyarrow")
pq: Final[Any] = import_module("pyarrow.parquet")
actions: Final[Any] = import_module("deltalake.transaction")

_TRIES: Final = 20
"""Chunks in a row for which another writer may commit first."""


class CommitResult(NamedTuple):
    """The rows that a commit added and deleted."""

    rows: int
    bytes: int
    erased: int
    """Rows of forgotten rollouts."""


@dataclass(slots=True)
class ChunkResult:
    """The result of one chunk."""

    cursor: int
    """The change up to which all tables are complete."""
    behind: int
    """Changes of the tape after `cursor`."""
    written: dict[str, CommitResult] = field(default_factory=dict[str, CommitResult])
    forgotten: int = 0
    """Rollouts that the chunk forgets."""


class Lake:
    """The tables of a lake, for one writer. Every method may raise `LakeUnreachableError`, after which it can be tried
    again as a whole."""

    def __init__(
        self,
        store: Store,
        place: LakeLocation,
        prices: Prices,
        *,
        bodies: bool = False,
        rows: int = ROWS,
        size: int = BYTES,
    ) -> None:
        self._store, self._place, self._bodies = store, place, bodies
        self._reader = ChunkReader(store, prices, rows, size)
        self._tables = list[LakeTable]()
        self._is_clean = False

    @property
    def cursor(self) -> int:
        """The change up to which all tables are complete; 0 for a lake that does not exist yet."""
        return min((table.cursor for table in self._tables), default=0)

    @property
    def behind(self) -> int:
        """The number of changes that the lake does not have."""
        return self._store.cursor() - self.cursor

    def open(self) -> None:
        """Opens the lake, makes it if needed, and deletes files that killed writers have left. Raises
        `LakeUnusableError`."""
        there = self._place.names()
        ours = [name for name in TABLE_DEFINITIONS if name in there]
        if strange := next((name for name in there if name not in TABLE_DEFINITIONS and not ours), None):
            raise LakeUnusableError(f"--to: {self._place.name} holds {strange}, and no lake: choose an empty place")
        names = [*ALWAYS, *([BODIES] if self._bodies or BODIES in there else [])]
        tape = tape_id(self._store)
        tables = [LakeTable(self._place, name, tape) for name in names]
        for table in tables:
            self._check(table)
        for table in tables:
            if table.must_erase:
                table.erase()
            else:
                table.clean()
        self._tables = tables

    def _check(self, table: LakeTable) -> None:
        """Raises `LakeUnusableError` if the tape is no longer the one that the table was written from."""
        cursor, newest = table.cursor, self._store.cursor()
        if cursor > newest:
            raise LakeUnusableError(
                f"the lake in {self._place.name} has change {cursor:,} of this tape, which ends at {newest:,}: it was "
                "put back from a backup; choose another --to"
            )
        if not cursor:
            return
        with self._store.view() as view:
            if not is_marked(view, cursor, table.mark):
                raise LakeUnusableError(
                    f"the lake in {self._place.name} has another history of this tape up to change {cursor:,}: the "
                    "tape was put back from a backup and has gone on since; choose another --to"
                )

    def step(self) -> ChunkResult | None:
        """Writes the next chunk; None if there is nothing new."""
        if not self._tables:
            if not self._store.cursor():
                return None
            self.open()
        for _ in range(_TRIES):
            chunk = self._reader.read(self.cursor, any(table.name == BODIES for table in self._tables))
            if chunk is None:
                return None
            try:
                return self._write(chunk)
            except CommitConflictError:
                for table in self._tables:
                    table.reload()
        raise LakeUnusableError(f"{self._place.name}: another writer was faster {_TRIES} times; one is enough")

    def _write(self, chunk: RowChunk) -> ChunkResult:
        written = dict[str, CommitResult]()
        for table in self._tables:
            if table.cursor < chunk.cursor:
                written[table.name] = table.commit(chunk)
        for table in self._tables:
            if table.must_erase:
                table.erase()
            elif not self._is_clean:
                table.clean()  # files of a killed writer for the version that exists only now
        self._is_clean = True
        return ChunkResult(self.cursor, self.behind, written, len(chunk.forgotten))


def tape_id(store: Store) -> str:
    """The tape's id, which no other tape has. Raises `LakeUnusableError` if it has none."""
    if found := store.identity():
        return found
    raise LakeUnusableError(
        f"the tape in {store.path} was never served: start `penstock serve --data {store.path}` once"
    )


# One table of a lake. It holds every row exactly once.
#
# A commit is a file of the table's log that only one writer can create (a hard link in a directory, a conditional put
# in a bucket). It names the files that it adds, and the change of the tape up to which the table is then complete. A
# writer takes only rows of later changes, and commits against the version in which it has read that change: the
# second writer is refused, reads again, and finds the rows there.
#
# A file's name has the number of the only commit that may name it. So a file of an earlier number that no version
# names was left by a killed writer, and can be deleted at once, even while others write.

TYPES: Final[dict[str, Any]] = {
    "varchar": pa.string(), "bigint": pa.int64(), "integer": pa.int32(), "double": pa.float64(), "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"), "varchar[]": pa.list_(pa.string()), "date": pa.date32(),
    "map(varchar, varchar)": pa.map_(pa.string(), pa.string()), "blob": pa.binary(),
}  # fmt: skip
OURS: Final = re.compile(r"day=[0-9-]+/part-([0-9]{20})-[0-9a-f]{32}\.zstd\.parquet")
_EPOCH: Final = date(1970, 1, 1)


def schema_of(shape: TableDefinition) -> Any:
    """The columns of a table as an Arrow schema."""
    return pa.schema([(name, TYPES[column.type]) for name, column in shape.columns.items()])


class LakeTable:
    """One table, for one writer."""

    def __init__(self, place: LakeLocation, name: str, tape: str) -> None:
        """Opens the table, and makes it if needed. Raises `LakeUnusableError`, `LakeUnreachableError`."""
        self._place, self.name, self._tape, self._shape = place, name, tape, TABLE_DEFINITIONS[name]
        self._files = place.table(name)
        self._schema = schema_of(self._shape)
        self._marks = {what: f"penstock-{what}:{tape}" for what in ("cursor", "mark", "forgotten", "erased")}
        with place.translate_errors():
            if not deltalake.DeltaTable.is_deltatable(self._files.uri, storage_options=self._files.options):
                self._create()
            self._table = deltalake.DeltaTable(self._files.uri, storage_options=self._files.options)
        self._look_at_it()

    def _create(self) -> None:
        if self._place.is_local:
            os.makedirs(self._files.uri, exist_ok=True)
        if rest := [name for name in self._files.names() if not name.startswith("_delta_log/")]:
            raise LakeUnusableError(
                f"{self._place.name}/{self.name} holds {rest[0]}, which is no table of ours: choose another --to"
            )
        key = self._shape.key
        configuration = {
            "penstock.schema": str(SCHEMA),
            "penstock.tape": self._tape,
            # Otherwise an engine that compacts the table would copy texts into its log.
            "delta.dataSkippingStatsColumns": key,
        }
        with suppress(CommitConflictError), self._place.translate_errors():
            try:
                deltalake.DeltaTable.create(
                    self._files.uri, self._schema, mode="error", partition_by=["day"], name=self.name,
                    description=self._shape.help, configuration=configuration, storage_options=self._files.options,
                    raise_if_key_not_exists=False,
                )  # fmt: skip
            except deltalake.exceptions.DeltaError as error:
                if "already exists" not in str(error):
                    raise  # otherwise another writer has made it, which is fine

    def _look_at_it(self) -> None:
        found: Mapping[str, str] = self._table.metadata().configuration
        named = f"{self._place.name}/{self.name}"
        if "penstock.schema" not in found:
            raise LakeUnusableError(f"{named} is a table of somebody else: choose another --to")
        if int(found["penstock.schema"]) > SCHEMA:
            raise LakeUnusableError(
                f"{named} has schema {found['penstock.schema']}, and this version writes {SCHEMA}: "
                "update Penstock, or choose another --to"
            )
        if found["penstock.tape"] != self._tape:
            raise LakeUnusableError(f"{named} holds the lake of another tape: choose another --to")
        self._add_columns(named)

    def _add_columns(self, named: str) -> None:
        """Adds the columns that the table of an earlier Penstock lacks; they are empty in the rows that it has."""
        while True:
            known = {one.name for one in self._table.schema().fields}
            ours = deltalake.Schema.from_arrow(self._schema).fields
            if strange := next(iter(known.difference(one.name for one in ours)), None):
                raise LakeUnusableError(
                    f"{named} has the column {strange}, which this version does not write: "
                    "update Penstock, or choose another --to"
                )
            lacking = [one for one in ours if one.name not in known]
            if not lacking:
                return
            with suppress(CommitConflictError), self._place.translate_errors():
                self._table.alter.add_columns(lacking)
            self.reload()

    def _noted(self, what: str) -> int:
        with self._place.translate_errors():
            return self._table.transaction_version(self._marks[what]) or 0

    @property
    def cursor(self) -> int:
        """The change of the tape up to which the table is complete."""
        return self._noted("cursor")

    @property
    def mark(self) -> int:
        """Identifies the state of the tape at `cursor` (`rows.mark_of`)."""
        return self._noted("mark")

    @property
    def must_erase(self) -> bool:
        """True if files still hold forgotten rows."""
        return self._noted("erased") < self._noted("forgotten")

    def reload(self) -> None:
        """Reads the commits of other writers."""
        with self._place.translate_errors():
            self._table.update_incremental()

    # -- committing --------------------------------------------------------------------------------------------------

    def commit(self, chunk: RowChunk) -> CommitResult:
        """Adds the rows of a chunk that the table does not have, and deletes those that the chunk forgets; all or
        nothing. Raises `CommitConflictError`, `LakeUnreachableError`; then the table is unchanged."""
        put, written = list[str](), CommitResult(0, 0, 0)
        try:
            with self._place.translate_errors():
                changed, written = self._prepared(chunk, put)
            self._commit(changed, self._notes(chunk))
        except BaseException as error:
            if not (
                isinstance(error, CommitConflictError | LakeUnreachableError) and self._is_committed(put, chunk.cursor)
            ):
                self._discard(put)
                raise
        return written

    def _prepared(self, chunk: RowChunk, put: list[str]) -> tuple[list[Any], CommitResult]:
        """Writes the files of a chunk: (actions of the commit, rows that it adds and deletes)."""
        version = self._table.version() + 1
        days = chunk.after(self.name, self.cursor)
        adds = [self._put(version, day, rows, put) for day, rows in sorted(days.items())]
        changed, erased = self._without(self._forgotten(chunk), version, put)
        return [*changed, *adds], CommitResult(sum(map(len, days.values())), sum(add.size for add in adds), erased)

    def _forgotten(self, chunk: RowChunk) -> dict[str, int]:
        return {name: at for name, at in chunk.forgotten.items() if at > self.cursor}

    def _notes(self, chunk: RowChunk) -> dict[str, int]:
        notes = {"cursor": chunk.cursor, "mark": chunk.mark}
        if forgotten := self._forgotten(chunk):
            notes["forgotten"] = max(forgotten.values())
        return notes

    def _commit(self, changed: Sequence[Any], noted: Mapping[str, int]) -> None:
        transactions = [deltalake.Transaction(self._marks[what], value) for what, value in noted.items()]
        version = self._table.version() + 1
        with self._place.translate_errors():
            self._table.create_write_transaction(
                list(changed), "append", self._schema, ["day"],
                commit_properties=deltalake.CommitProperties(app_transactions=transactions, max_commit_retries=0),
            )  # fmt: skip
            self._files.sync_log(version)
            self._table.update_incremental()

    def _is_committed(self, put: Sequence[str], cursor: int) -> bool:
        """True if a failed commit has happened all the same: its answer may have been lost."""
        try:
            self.reload()
            return bool(put) and self.cursor == cursor and set(put) <= self._live()
        except LakeUnreachableError:
            return False

    def _discard(self, put: Iterable[str]) -> None:
        """Deletes files of a commit that failed. Any that remain are found at the next start."""
        try:
            with self._place.translate_errors():
                self._table.update_incremental()
                rest = set(put) - self._live()
                for name in rest:
                    self._files.delete(name)
        except (CommitConflictError, LakeUnreachableError):
            return

    def _put(self, version: int, day: int, rows: Sequence[Values], put: list[str]) -> Any:
        """Writes rows of one day to a file; returns the action that adds it."""
        shape = pa.schema(list(self._schema)[:-1], metadata=self._metadata())
        columns = [_column(values, kind.type) for values, kind in zip(zip(*rows, strict=True), shape, strict=True)]
        name = self._name(version, f"{_EPOCH + timedelta(days=day)}")
        put.append(name)
        with self._files.create_file(name) as out:
            pq.write_table(pa.table(columns, schema=shape), out, compression="zstd")
        return self._add(name, len(rows), min(row[0] for row in rows), max(row[0] for row in rows))

    def _metadata(self) -> dict[str, str]:
        return {"penstock.schema": str(SCHEMA), "penstock.table": self.name, "penstock.tape": self._tape}

    @staticmethod
    def _name(version: int, day: str) -> str:
        return f"day={day}/part-{version:020d}-{uuid4().hex}.zstd.parquet"

    def _add(self, name: str, rows: int, first: int, last: int) -> Any:
        # Only cursors: texts in a log could not be forgotten.
        key = self._shape.key
        stats = {"numRecords": rows, "minValues": {key: first}, "maxValues": {key: last}, "nullCount": {key: 0}}
        now, day = int(time.time() * 1000), _day(name)
        return actions.AddAction(name, self._files.size(name), {"day": day}, now, True, json.dumps(stats))

    # -- forgetting --------------------------------------------------------------------------------------------------

    def _without(self, forgotten: Mapping[str, int], version: int, put: list[str]) -> tuple[list[Any], int]:
        """(actions after which the table has no rows of these rollouts from before the given changes, number of deleted
        rows). Files with such rows are written anew."""
        said, erased = list[Any](), 0
        if not forgotten:
            return said, 0
        for file in pa.table(self._table.get_add_actions(flatten=True)).to_pylist():
            first = file.get(f"min.{self._shape.key}")
            if first is not None and first >= max(forgotten.values()):
                continue
            name = self._name(version, _day(file["path"]))
            kept = rewrite_without(self._files, file["path"], name, self._shape.key, forgotten)
            if kept is None:
                continue
            if kept.rows:
                put.append(name)
                said.append(self._add(name, kept.rows, kept.first, kept.last))
            said.append(
                actions.RemoveAction(
                    file["path"], True, int(time.time() * 1000), file["size_bytes"], {"day": _day(file["path"])}
                )
            )
            erased += kept.erased
        return said, erased

    def erase(self) -> None:
        """Deletes every file that the table no longer has, including those of older versions."""
        for _ in range(_TRIES):
            try:
                with self._place.translate_errors():
                    noted = self._noted("forgotten")
                    self._table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
                    self._table.update_incremental()
                    self._clean(keep_named=False)
                    self._commit([], {"erased": noted})
                return
            except CommitConflictError:
                self.reload()
        raise LakeUnreachableError(f"{self._place.name}/{self.name}: other writers were faster {_TRIES} times")

    def clean(self) -> None:
        """Deletes files that killed writers have left."""
        with self._place.translate_errors():
            self._clean(keep_named=True)

    def _clean(self, keep_named: bool) -> None:
        """`keep_named`: True to keep files that an older version of the table names."""
        live, version = self._live(), self._table.version()
        for name in list(self._files.names()):
            match = OURS.fullmatch(name)
            if match is None or name in live or int(match[1]) > version:
                continue
            if not (keep_named and self._is_named(name, int(match[1]))):
                self._files.delete(name)

    def _is_named(self, name: str, version: int) -> bool:
        """True if the only commit that may name a file does. A commit whose log file is gone is too old to be read."""
        try:
            with self._files.open_file(f"_delta_log/{version:020d}.json") as log:
                return name.encode() in log.read()
        except FileNotFoundError:
            return False

    def _live(self) -> set[str]:
        return set(pa.table(self._table.get_add_actions(flatten=True))["path"].to_pylist())


def _day(path: str) -> str:
    return path.partition("=")[2].partition("/")[0]


def _column(values: Sequence[Any], kind: Any) -> Any:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON can contain.
        return pa.array(_encodable(values), kind)


def _encodable(value: Any) -> Any:
    """The value with marks for halves of surrogate pairs, also in texts of lists and pairs."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list | tuple):
        found = map(_encodable, cast("Sequence[Any]", value))
        return list(found) if isinstance(value, list) else tuple(found)
    return value


# A file is written anew without the rows of some rollouts, a few rows at a time.

_BATCH: Final = 4096


@dataclass(slots=True)
class RewriteStats:
    """The rows of a rewritten file: their number, first and last cursor."""

    rows: int = 0
    first: int = 0
    last: int = 0
    erased: int = 0
    """Rows of the old file that were left out."""


def rewrite_without(
    files: LakeFiles, old: str, new: str, key: str, forgotten: Mapping[str, int]
) -> RewriteStats | None:
    """Writes the file `new` without forgotten rows, unless no row is left for it. None if the old file has no row of
    these rollouts. `forgotten`: for each rollout the change from which on a new one of this name may be there."""
    with files.open_file(old) as source:
        parquet = pq.ParquetFile(source)
        if not _concerns(parquet, key, forgotten):
            return None
    kept = RewriteStats()
    with files.open_file(old) as source:
        parquet = pq.ParquetFile(source)
        batches = (_without(batch, key, forgotten, kept) for batch in parquet.iter_batches(_BATCH))
        batches = (batch for batch in batches if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return kept
        with (
            files.create_file(new) as out,
            pq.ParquetWriter(out, parquet.schema_arrow, compression="zstd") as writer,
        ):
            writer.write_batch(first)
            for batch in batches:
                writer.write_batch(batch)
    return kept


def _concerns(parquet: Any, key: str, forgotten: Mapping[str, int]) -> bool:
    return any(
        not all(_stay(batch, key, forgotten)) for batch in parquet.iter_batches(_BATCH, columns=[key, "rollout"])
    )


def _stay(batch: Any, key: str, forgotten: Mapping[str, int]) -> list[bool]:
    cursors, rollouts = batch.column(key).to_pylist(), batch.column("rollout").to_pylist()
    return [at >= forgotten.get(name, 0) for at, name in zip(cursors, rollouts, strict=True)]


def _without(batch: Any, key: str, forgotten: Mapping[str, int], kept: RewriteStats) -> Any:
    stay = batch.filter(pa.array(_stay(batch, key, forgotten)))
    kept.erased += batch.num_rows - stay.num_rows
    if stay.num_rows:
        cursors = stay.column(key).to_pylist()
        kept.first = min(cursors) if not kept.rows else min(kept.first, *cursors)
        kept.last = max(kept.last, *cursors)
        kept.rows += stay.num_rows
    return stay
