"""The columns in DuckDB: sealed files, and newer rows in memory. Only the process of the index imports this.

Spans are sealed once and never change. Rollouts and attempts as of now are in memory, and the files hold those that had
changed at each seal: the newest row of each is loaded when an index is opened. Questions read the tables `spans`,
`rollouts`, `attempts` and `inputs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

import duckdb

from penstock.gateway.followers.index.rows import COLUMNS, Row
from penstock.gateway.followers.index.segments import SPILL, SegmentDirectory, SegmentFile, seal_of
from penstock.gateway.reading.filters import HITS

pa: Final[Any] = import_module("pyarrow")
"""Imported by name, because it has no types."""
DAMAGE_ERRORS: Final[tuple[type[Exception], ...]] = (duckdb.Error, pa.ArrowException, OSError)
"""Errors of a damaged index or a full disk."""
PERSISTENT_ERRORS: Final[tuple[type[Exception], ...]] = (duckdb.IOException, duckdb.FatalException, OSError)
"""Those errors that every other question would meet, too."""
_TYPES: Final[dict[str, Any]] = {
    "bigint": pa.int64(),
    "integer": pa.int32(),
    "varchar": pa.string(),
    "boolean": pa.bool_(),
    "double": pa.float64(),
    "varchar[]": pa.list_(pa.string()),
    "map(varchar, varchar)": pa.map_(pa.string(), pa.string()),
}
_MEMORY: Final = "1GB"
_THREADS: Final = 2
_KEYS: Final = {"rollouts": ("number",), "attempts": ("number", "attempt")}
"""The columns that identify a rollout, or an attempt."""
_REMEMBERED: Final = 100_000
"""Most different values of a column that are remembered; more are read for each question."""
_SEALED_SO: Final = "(format parquet, compression zstd, row_group_size 65536)"
_LEAST, _MOST = -(2**63), 2**63 - 1


class IndexTables:
    """One connection to DuckDB; for one thread."""

    def __init__(self, segments: SegmentDirectory, files: Sequence[SegmentFile]) -> None:
        """Opens the sealed files. Raises `duckdb.Error` if one cannot be read."""
        self._segments = segments
        self.files = list(files)
        self._duck = duckdb.connect()
        self._duck.execute(f"set memory_limit = '{_MEMORY}'; set threads = {_THREADS}; set enable_progress_bar = false")
        self._duck.execute(
            f"set temp_directory = '{_quoted(segments.path / SPILL)}'; set preserve_insertion_order = false"
        )
        self._duck.execute("create table gone (number bigint)")
        self._words = dict[tuple[str, str], set[str]]()
        """The different values in sealed spans, for each expression that was asked for."""
        for table, columns in COLUMNS.items():
            shape = ", ".join(f'"{name}" {kind}' for name, kind in columns.items())
            if table == "spans":
                self._duck.execute(f"create table fresh ({shape}); create table running ({shape})")
            elif table == "inputs":
                self._duck.execute(f"create table fresh_inputs ({shape})")
            else:
                self._duck.execute(f"create table {table} ({shape}); create table changed_{table} ({shape})")
                self._recall(table)
        self._views()

    def close(self) -> None:
        self._duck.close()

    def _recall(self, table: str) -> None:
        """Loads the newest sealed row of each rollout or attempt: files are named by their cursors."""
        if self._paths(table):
            key = ", ".join(_KEYS[table])
            self._duck.execute(
                f"insert into {table} select * exclude filename from {_read(self._paths(table), ', filename = true')} "
                f"qualify row_number() over (partition by {key} order by filename desc) = 1"
            )

    def _paths(self, table: str) -> list[Path]:
        return [self._segments.path / file.name for file in self.files if file.table == table]

    def _views(self) -> None:
        """Makes the views of questions anew, because files were added."""
        spans = ["select * from fresh", "select * from running", *_selects(self._paths("spans"))]
        inputs = ["select * from fresh_inputs", *_selects(self._paths("inputs"))]
        kept = " where number not in (select number from gone)" if self.query("select 1 from gone limit 1") else ""
        for name, parts in (("spans", spans), ("inputs", inputs)):
            self._duck.execute(f"create or replace view {name} as from ({' union all '.join(parts)}){kept}")

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Returns the rows of a query."""
        return self._duck.execute(sql, values).fetchall()

    @property
    def newest_file(self) -> str | None:
        """The newest file of sealed spans, as SQL that can stand in place of `spans`."""
        paths = self._paths("spans")
        return _read(paths[-1:]) if paths else None

    @property
    def older_files(self) -> str | None:
        """The older files of sealed spans, likewise."""
        paths = self._paths("spans")[:-1]
        return _read(paths) if paths else None

    def words(self, table: str, expression: str) -> Iterable[str]:
        """The different values of a column, without NULL. Those of sealed spans are remembered, because they never
        change."""
        if table != "spans s":
            return [word for (word,) in self.query(_distinct(table, expression))]
        sealed = self._words.get((table, expression))
        if sealed is None:
            files = self._paths("spans")
            found = self.query(_distinct(f"{_read(files)} s", expression)) if files else []
            sealed = {word for (word,) in found}
            if len(sealed) <= _REMEMBERED:
                self._words[table, expression] = sealed
        fresh = self.query(f"{_distinct('fresh s', expression)} union {_distinct('running s', expression)}")
        return sealed.union(word for (word,) in fresh)

    def put_hits(self, found: Sequence[Any]) -> None:
        """Makes the hits of a search tables that a question can join with: arrays of cursors, in the order of
        `filters.HITS`."""
        for at, cursors in enumerate(found):
            self._duck.register(HITS.format(at), pa.table({"cursor": pa.array(cursors, pa.int64())}))

    def write(self, directory: Path) -> None:
        """Writes the rows in memory as files: unsealed spans, and rollouts and attempts as of now."""
        for table, source in (
            ("spans", "select * from fresh union all select * from running"),
            ("rollouts", "select * from rollouts"),
            ("attempts", "select * from attempts"),
        ):
            path = _quoted(directory / f"{table}.parquet")
            self._duck.execute(f"copy ({source}) to '{path}' (format parquet, compression snappy)")

    # -- following ---------------------------------------------------------------------------------------------------

    def add(self, table: str, rows: Sequence[Row]) -> None:
        """Adds spans that have ended, or inputs."""
        if rows:
            self._insert({"spans": "fresh", "inputs": "fresh_inputs"}[table], _arrow(table, rows))

    def replace_running(self, rows: Sequence[Row]) -> None:
        """Replaces the rows of running calls."""
        self._duck.execute("truncate running")
        if rows:
            self._insert("running", _arrow("spans", rows))

    def replace_rows(self, table: str, rows: Sequence[Row]) -> None:
        """Replaces the rows of rollouts or attempts."""
        if not rows:
            return
        self._duck.register("batch", _arrow(table, rows))
        key = _KEYS[table]
        same = " and ".join(f"t.{name} = batch.{name}" for name in key)
        for name in (table, f"changed_{table}"):
            self._duck.execute(f"delete from {name} t using batch where {same}")
            self._duck.execute(f"insert into {name} select * from batch")
        self._duck.unregister("batch")

    def _insert(self, table: str, batch: Any) -> None:
        self._duck.register("batch", batch)
        self._duck.execute(f"insert into {table} select * from batch")
        self._duck.unregister("batch")

    def hide(self, numbers: Iterable[int]) -> list[int]:
        """Takes rollouts out of memory and of answers; returns the cursors of their calls that were in memory."""
        self._duck.execute("insert into gone select unnest(?::bigint[])", [list(numbers)])
        going = "where number in (select number from gone)"
        cursors = [cursor for (cursor,) in self.query(f"select cursor from fresh {going}")]
        for table in ("fresh", "running", "fresh_inputs", *_KEYS, *(f"changed_{table}" for table in _KEYS)):
            self._duck.execute(f"delete from {table} {going}")
        self._views()
        return cursors

    def numbers_to(self, last: int) -> list[int]:
        """The numbers of the rollouts in answers, up to `last`."""
        named = " union ".join(f"select number from {table}" for table in ("spans", "inputs", *_KEYS))
        return [number for (number,) in self.query(f"from ({named}) where number between 1 and ?", [last])]

    def files_naming(self, numbers: Iterable[int], files: Sequence[SegmentFile] | None = None) -> set[str]:
        """The names of files that hold rows of these rollouts; files of passages are not searched."""
        of = [file for file in (self.files if files is None else files) if file.table in COLUMNS]
        found = set[str]()
        for file in of:
            read = _read([self._segments.path / file.name])
            if self.query(f"select 1 from {read} where number in (select unnest(?)) limit 1", [list(numbers)]):
                found.add(file.name)
        return found

    def cursors_of(self, file: SegmentFile, numbers: Iterable[int]) -> list[int]:
        """The cursors of the calls of these rollouts in a file of spans."""
        read = _read([self._segments.path / file.name])
        found = self.query(f"select cursor from {read} where number in (select unnest(?))", [list(numbers)])
        return [cursor for (cursor,) in found]

    def rewrite_without(self, file: SegmentFile, numbers: Iterable[int]) -> list[SegmentFile]:
        """Writes a file anew without these rollouts; no file if no other row is in it."""
        order = "cursor" if file.table == "spans" else "number"
        kept = (
            f"from {_read([self._segments.path / file.name])} where number not in (select unnest(?)) order by {order}"
        )
        self._duck.execute(f"create or replace temp table kept as {kept}", [list(numbers)])
        [(rows,)] = self.query("select count(*) from kept")
        made: list[SegmentFile] = []
        if rows:
            path = self._segments.replacement_path(file)
            self._duck.execute(f"copy (select * from kept order by {order}) to '{_quoted(path)}' {_SEALED_SO}")
            made.append(self._segments.finish(file.table, path, rows))
        self._duck.execute("drop table kept")
        return made

    def swap_files(self, gone: Sequence[SegmentFile], made: Sequence[SegmentFile]) -> None:
        """Called when files were replaced by others."""
        self.files = [file for file in self.files if file not in gone] + list(made)
        self.files.sort(key=lambda file: seal_of(file.name))
        self._words.clear()
        self._views()

    def clear_hidden(self) -> None:
        """Called when no file has rows of the hidden rollouts any more."""
        self._duck.execute("truncate gone")
        self._views()

    def seal(self, cursor: int) -> list[SegmentFile]:
        """Writes the new rows to files. They are valid once a manifest names them; then call `sealed`."""
        found: list[SegmentFile] = []
        for table, source, order in (
            ("spans", "fresh", "cursor"),
            ("rollouts", "changed_rollouts", "number"),
            ("attempts", "changed_attempts", "number"),
            ("inputs", "fresh_inputs", "number"),
        ):
            [(rows,)] = self.query(f"select count(*) from {source}")
            if rows:
                path = self._segments.new_path(table, cursor)
                self._duck.execute(f"copy (select * from {source} order by {order}) to '{_quoted(path)}' {_SEALED_SO}")
                found.append(self._segments.finish(table, path, rows))
        return found

    def adopt_sealed(self, files: Sequence[SegmentFile]) -> None:
        """Called when a manifest names these files: drops the rows in memory that they hold."""
        for (table, expression), known in list(self._words.items()):
            known.update(word for (word,) in self.query(_distinct("fresh s", expression)))
            if len(known) > _REMEMBERED:
                del self._words[table, expression]
        self.files += files
        self._views()
        for table in ("fresh", "fresh_inputs", "changed_rollouts", "changed_attempts"):
            self._duck.execute(f"truncate {table}")
        for table in _KEYS:
            # DuckDB keeps replaced rows in memory; a copy frees them.
            self._duck.execute(f"create or replace table {table} as select * from {table}")


def _distinct(table: str, expression: str) -> str:
    return f"select distinct word from (select {expression} as word from {table}) where word is not null"


def _read(paths: Sequence[Path], more: str = "") -> str:
    """SQL that reads these files. Without the option, DuckDB would take a directory named `model=x` for a column."""
    names = ", ".join(f"'{_quoted(path)}'" for path in paths)
    return f"read_parquet([{names}], hive_partitioning = false{more})"


def _selects(paths: Sequence[Path]) -> list[str]:
    return [f"select * from {_read(paths)}"] if paths else []


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


def _arrow(table: str, rows: Sequence[Row]) -> Any:
    columns = zip(*rows, strict=True)
    names = COLUMNS[table].items()
    return pa.table({name: _array(values, _TYPES[kind]) for (name, kind), values in zip(names, columns, strict=True)})


def _array(values: Sequence[Any], kind: Any) -> Any:
    try:
        return pa.array(values, kind)
    except (UnicodeEncodeError, OverflowError, pa.ArrowInvalid):
        plain = list(map(_plain, values))
        if pa.types.is_map(kind):
            # Keys that differed may be equal now.
            plain = [None if row is None else list(dict(row).items()) for row in plain]
        return pa.array(plain, kind)


def _plain(value: Any) -> Any:
    """A value that Arrow can hold: without halves of surrogate pairs, and with numbers limited to 64 bits."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list | tuple):
        kind = type(cast("list[Any] | tuple[Any, ...]", value))
        return kind(map(_plain, cast("Sequence[Any]", value)))
    if isinstance(value, int) and not isinstance(value, bool):
        return min(max(value, _LEAST), _MOST)
    return value
