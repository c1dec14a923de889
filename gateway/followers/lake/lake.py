"""The lake of one tape: all its tables, kept in step with it, one chunk of changes at a time.

The tables are committed one after the other, so a kill can leave some ahead of others. Each has its own cursor: the
next chunk begins at the lowest of them, and each table takes only rows that are new to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from penstock.gateway.followers.lake.chunk_reader import ALWAYS, BYTES, ROWS, ChunkReader, RowChunk, is_marked
from penstock.gateway.followers.lake.location import CommitConflictError, LakeLocation, LakeUnusableError
from penstock.gateway.followers.lake.table import CommitResult, LakeTable
from penstock.gateway.followers.lake.table_definitions import BODIES, TABLE_DEFINITIONS
from penstock.gateway.model.prices import Prices
from penstock.gateway.tape.store import Store

_TRIES: Final = 20
"""Chunks in a row for which another writer may commit first."""


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
