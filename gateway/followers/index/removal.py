"""Takes forgotten rollouts out of an index: out of its answers at once, out of its sealed files one seal after another.

The files of a seal that hold rows of one are written anew without it, under other names, and a manifest that names the
new files deletes the old ones. Until then the manifest lists the rollouts that are still in files, so that a killed
process's successor continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, Final

from penstock.gateway.followers.index.segments import SegmentDirectory, SegmentFile, seal_of
from penstock.gateway.followers.index.tables import IndexTables
from penstock.gateway.followers.index.texts import TextIndex

np: Final[Any] = import_module("numpy")


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
