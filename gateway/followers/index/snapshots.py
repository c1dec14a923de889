"""Snapshots of the rows in memory as files, for processes that read files: with the sealed files they are the whole
index.

A snapshot is taken for a request, at most once a second. The last two are kept: a reader that needs the files for
longer makes links to them (`sql.runner`).
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from penstock.gateway.followers.index.segments import NOW, SegmentDirectory
from penstock.gateway.followers.index.tables import IndexTables
from penstock.gateway.followers.index.texts import SHAPE, TextIndex

pa: Final[Any] = import_module("pyarrow")
pq: Final[Any] = import_module("pyarrow.parquet")
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
