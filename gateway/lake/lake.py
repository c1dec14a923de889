"""The lake of one tape: all its tables, kept in step with it, one chunk of changes at a time.

The tables are committed one after the other, so that a kill can leave some ahead of others. Each knows itself what it
has: the next chunk begins where the last of them is, and each takes from it what is new to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from penstock.gateway.lake.place import Place, Raced, Refused
from penstock.gateway.lake.reading import ALWAYS, BYTES, ROWS, Chunk, ChunkReader, is_marked
from penstock.gateway.lake.shapes import BODIES, SHAPES
from penstock.gateway.lake.table import Table, Written
from penstock.gateway.model.prices import Prices
from penstock.gateway.store import Store

_TRIES: Final = 20
"""Chunks in a row that another writer may be faster with."""


@dataclass(slots=True)
class Round:
    """What came of one chunk."""

    cursor: int
    """The change up to which the lake is whole."""
    behind: int
    """Changes that the tape has beyond it."""
    written: dict[str, Written] = field(default_factory=dict[str, Written])
    forgotten: int = 0
    """Rollouts that the chunk forgets."""


class Lake:
    """For one writer. Everything it does raises `Unreachable`, after which it can be tried again as a whole."""

    def __init__(
        self, store: Store, place: Place, prices: Prices, *, bodies: bool = False, rows: int = ROWS, size: int = BYTES
    ) -> None:
        self._store, self._place, self._bodies = store, place, bodies
        self._reader = ChunkReader(store, prices, rows, size)
        self._tables = list[Table]()
        self._is_clean = False

    @property
    def cursor(self) -> int:
        """The change up to which it is whole; 0 of one that is not there yet."""
        return min((table.cursor for table in self._tables), default=0)

    @property
    def behind(self) -> int:
        """Changes that it does not have."""
        return self._store.cursor() - self.cursor

    def open(self) -> None:
        """Opens it, makes it if need be, and deletes what killed writers have left. Raises `Refused`."""
        there = self._place.names()
        ours = [name for name in SHAPES if name in there]
        if strange := next((name for name in there if name not in SHAPES and not ours), None):
            raise Refused(f"--to: {self._place.name} holds {strange}, and no lake: choose an empty place")
        names = [*ALWAYS, *([BODIES] if self._bodies or BODIES in there else [])]
        tape = tape_id(self._store)
        tables = [Table(self._place, name, tape) for name in names]
        for table in tables:
            self._check(table)
        for table in tables:
            if table.must_erase:
                table.erase()
            else:
                table.clean()
        self._tables = tables

    def _check(self, table: Table) -> None:
        """Raises `Refused` where the tape is not the one that the table is of any more."""
        cursor, newest = table.cursor, self._store.cursor()
        if cursor > newest:
            raise Refused(
                f"the lake in {self._place.name} has change {cursor:,} of this tape, which ends at {newest:,}: it was "
                "put back from a backup; choose another --to"
            )
        if not cursor:
            return
        with self._store.view() as view:
            if not is_marked(view, cursor, table.mark):
                raise Refused(
                    f"the lake in {self._place.name} has another history of this tape up to change {cursor:,}: the "
                    "tape was put back from a backup and has gone on since; choose another --to"
                )

    def step(self) -> Round | None:
        """Writes the next chunk; None when there is nothing new."""
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
            except Raced:
                for table in self._tables:
                    table.reload()
        raise Refused(f"{self._place.name}: another writer was faster {_TRIES} times; one is enough")

    def _write(self, chunk: Chunk) -> Round:
        written = dict[str, Written]()
        for table in self._tables:
            if table.cursor < chunk.cursor:
                written[table.name] = table.commit(chunk)
        for table in self._tables:
            if table.must_erase:
                table.erase()
            elif not self._is_clean:
                table.clean()  # what a killed writer had put for the version that is there only now
        self._is_clean = True
        return Round(self.cursor, self.behind, written, len(chunk.forgotten))


def tape_id(store: Store) -> str:
    """What tells a tape from every other one. Raises `Refused`."""
    if found := store.identity():
        return found
    raise Refused(f"the tape in {store.path} was never served: start `penstock serve --data {store.path}` once")
