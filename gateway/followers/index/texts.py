"""The passages of an index: texts of messages in blocks of a megabyte, each with a filter that excludes most texts that
it does not have.

A block is a row group of a Parquet file: a row for each passage, with its exact text. Its filter has a bit for each run
of five bytes in it, casefolded, so that a search reads few blocks: one in ten or fewer for rare words. The text of a
block is then searched as a whole. So a search finds any part of a text, as a scan does, for an eighth of the text's
compressed size; an index of words would need as much as the text itself.

Blocks go from the oldest change to the newest, and all passages of a span are in one. Unsealed blocks are in memory in
the same shape.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.gateway.followers.index.segments import SegmentDirectory, SegmentFile
from penstock.gateway.model.turn import Passage
from penstock.gateway.reading.filter_fields import TextPart, is_in
from penstock.gateway.reading.filters import MOST_TEXTS

np: Final[Any] = import_module("numpy")
pa: Final[Any] = import_module("pyarrow")
pq: Final[Any] = import_module("pyarrow.parquet")
"""Imported by name, because none of them has types."""
BLOCK: Final = 1 << 20
"""Bytes of text in a block."""
_BITS: Final = 18
"""2 ** 18 bits for each block: a fifth of them is set. With runs of four bytes nearly all blocks would seem to have a
phrase of common words."""
_GRAM: Final = 5
_WORD: Final = 8
"""Bytes of the integers with which runs are computed."""
_MIX: Final = 0x9E3779B97F4A7C15
_LEVEL: Final = 3
_WORDS: Final = ("rollout", "attempt", "role", "kind", "name")
"""Columns with few different values."""
SHAPE: Final = pa.schema(
    [
        ("cursor", pa.int64()), ("rollout", pa.string()), ("attempt", pa.string()), ("sequence", pa.int64()),
        ("position", pa.int32()), ("answer", pa.bool_()), ("role", pa.string()), ("kind", pa.string()),
        ("name", pa.string()), ("id", pa.string()), ("text", pa.string()),
    ]
)  # fmt: skip
"""A row for each passage: the span's cursor and name, the passage's place in the span."""
FIRST: Final = 16
"""Blocks that are read before a search yields its first hits; then four times as many, and so on."""
KNOWN: Final = 2 * MOST_TEXTS
"""Needles whose hits are remembered. For a common needle that is 8 MB for a million spans."""
_SLICE: Final = 1 << 20
"""Bytes of text whose runs are computed together: each run takes some words of memory."""
Needle = tuple[TextPart, ...]
"""Casefolded texts, at least one of which must be in a passage."""


@dataclass(frozen=True, slots=True)
class PassageBlock:
    """The passages of some spans, with their filter."""

    first: int
    """The cursor of its first span."""
    grams: Any
    """Its filter: a row of `2 ** _BITS // 8` bytes."""
    read: Callable[[], tuple[Any, Any]]
    """Returns its cursors and its texts, as arrays of Arrow."""


class Hits(NamedTuple):
    """The hits of one part of a search."""

    low: int
    """All spans from this cursor on were searched."""
    cursors: list[Any]
    """For each needle the cursors of the spans in this part that have it; unsorted."""
    last: bool
    """True if no part follows: everything was searched, or the time is up."""


class TextIndex:
    """The passages of one index; for one thread."""

    def __init__(self, segments: SegmentDirectory, files: Sequence[SegmentFile]) -> None:
        """Opens the sealed files. Raises `pa.ArrowException` if one cannot be read."""
        self._segments = segments
        self._thread = ThreadPoolExecutor(1, "penstock-texts")
        self._sealed = list[PassageBlock]()
        self._fresh = list[tuple[Any, PassageBlock]]()
        self._rows = list[tuple[Any, ...]]()
        self._size = 0
        self.unsealed_bytes = 0
        """Bytes of unsealed text, about."""
        self._known = OrderedDict[Needle, dict[int, Any]]()
        """Hits in blocks that no longer change, by the cursor of a block's first span: the next page of a search, and a
        continued search, need not read these blocks again."""
        for file in files:
            if file.table == "passages":
                self._sealed += self._blocks_of(file)

    def _blocks_of(self, file: SegmentFile) -> Iterator[PassageBlock]:
        path = self._segments.path / file.name
        parquet = pq.ParquetFile(path, page_checksum_verification=True)
        grams = pq.read_table(self._segments.path / file.name.replace("passages", "grams"), columns=["grams", "first"])
        for at, (bits, first) in enumerate(zip(grams["grams"].to_pylist(), grams["first"].to_pylist(), strict=True)):
            yield PassageBlock(first, np.frombuffer(bits, np.uint8), _reader(parquet, at))

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._thread.shutdown()

    def add(self, cursor: int, span: tuple[str, str, int], passages: Sequence[Passage]) -> None:
        """Adds the passages of a span (rollout, attempt, sequence)."""
        for position, (answer, role, kind, name, id, text) in enumerate(passages):
            self._rows.append((cursor, *span, position, answer, role, kind, name, id, text))
            self._size += len(text)
            self.unsealed_bytes += len(text)
        if self._size >= BLOCK:
            self._close_block()

    def _close_block(self) -> None:
        if self._rows:
            self._fresh.append(self._block(self._rows))
            self._rows, self._size = [], 0

    @staticmethod
    def _block(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, PassageBlock]:
        columns = [
            _strings(values) if pa.types.is_string(field.type) else pa.array(values, field.type)
            for field, values in zip(SHAPE, zip(*rows, strict=True), strict=True)
        ]
        table = pa.table(columns, schema=SHAPE)
        return table, _block_of(table)

    def seal(self, cursor: int) -> list[SegmentFile]:
        """Writes the new blocks to files. They are valid once a manifest names them; then call `adopt_sealed`."""
        self._close_block()
        if not self._fresh:
            return []
        return self._written(self._fresh, *(self._segments.new_path(table, cursor) for table in ("passages", "grams")))

    def _written(self, blocks: Sequence[tuple[Any, PassageBlock]], passages: Path, grams: Path) -> list[SegmentFile]:
        with pq.ParquetWriter(
            passages, SHAPE, compression="zstd", compression_level=_LEVEL, use_dictionary=list(_WORDS),
            data_page_size=2 * BLOCK, write_statistics=["cursor"], write_page_checksum=True,
        ) as writer:  # fmt: skip
            for table, _ in blocks:
                writer.write_table(table, row_group_size=len(table))
        found = {
            "first": pa.array([block.first for _, block in blocks], pa.int64()),
            "grams": pa.array([block.grams.tobytes() for _, block in blocks], pa.binary()),
        }
        pq.write_table(pa.table(found), grams, compression="zstd", use_dictionary=False)
        rows = sum(len(table) for table, _ in blocks)
        return [
            self._segments.finish("passages", passages, rows), self._segments.finish("grams", grams, len(blocks)),
        ]  # fmt: skip

    def adopt_sealed(self, files: Sequence[SegmentFile]) -> None:
        """Called when a manifest names these files: drops the blocks in memory that they hold."""
        for file in files:
            if file.table == "passages":
                self._sealed += self._blocks_of(file)
        self._fresh.clear()
        self.unsealed_bytes = 0

    def remove(self, cursors: Sequence[int]) -> None:
        """Takes calls out of the blocks in memory."""
        if cursors:
            self._close_block()
            gone = np.array(cursors, np.int64)
            kept = (_kept(table, gone) for table, _ in self._fresh)
            self._fresh = [(table, _block_of(table)) for table in kept if len(table)]
        self._known.clear()

    def rewrite_without(self, file: SegmentFile, cursors: Any) -> list[SegmentFile]:
        """Writes a file of passages anew without these calls, and its filters; no file if no other passage is in it."""
        parquet = pq.ParquetFile(self._segments.path / file.name, page_checksum_verification=True)
        kept = (_kept(parquet.read_row_group(at), cursors) for at in range(parquet.num_row_groups))
        blocks = [(table, _block_of(table)) for table in kept if len(table)]
        passages = self._segments.replacement_path(file)
        grams = passages.with_name(passages.name.replace("passages", "grams"))
        return self._written(blocks, passages, grams) if blocks else []

    def swap_files(self, files: Sequence[SegmentFile]) -> None:
        """Called with the files that are valid now."""
        self._sealed = [block for file in files if file.table == "passages" for block in self._blocks_of(file)]
        self._known.clear()

    @property
    def fresh(self) -> list[Any]:
        """Unsealed passages, as tables of Arrow."""
        tables = [table for table, _ in self._fresh]
        return [*tables, self._block(self._rows)[0]] if self._rows else tables

    # -- questions ---------------------------------------------------------------------------------------------------

    def search(self, needles: Sequence[Needle], before: int | None = None, until: float = math.inf) -> Iterator[Hits]:
        """The spans below a cursor that have a passage for each needle, part by part, the newest first. `until`: the
        time at which it ends (of `time.monotonic`), but not before it has read one new block. A needle that is longer
        than a passage can be has no hits."""
        closed = [*self._sealed, *(block for _, block in self._fresh)]
        blocks = [*closed, self._block(self._rows)[1]] if self._rows else closed
        if before is not None:
            blocks = blocks[: bisect_right(blocks, before - 1, key=lambda block: block.first)]
        candidates, known = [_candidates(blocks, needle) for needle in needles], [self._known_of(it) for it in needles]
        newest_first = range(len(blocks) - 1, -1, -1)
        asked = {
            at: some
            for at in newest_first
            if (some := [it for it, may in enumerate(candidates) if may[at] and blocks[at].first not in known[it]])
        }
        contents = self._read_ahead([blocks[at] for at in asked])
        parts: list[list[Any]] = [[] for _ in needles]
        wanted, read = FIRST, 0
        for at in newest_first:
            first = blocks[at].first
            found = {it: known[it][first] for it, may in enumerate(candidates) if may[at] and first in known[it]}
            if at in asked:
                some = hits_in(*next(contents), [needles[it] for it in asked[at]])
                for it, hits in zip(asked[at], some, strict=True):
                    found[it] = hits
                    if at < len(closed):
                        known[it][first] = hits
                read += 1
            for it, hits in found.items():
                parts[it].append(hits)
            # Hits in the last block are not kept, because it still grows: reading it alone would be no progress.
            late = at in asked and at < len(closed) and time.monotonic() > until
            if (read >= wanted or late) and at:
                yield Hits(first, [concatenate(some) for some in parts], late)
                if late:
                    return
                parts = [[] for _ in needles]
                wanted, read = 4 * wanted, 0
        yield Hits(0, [concatenate(some) for some in parts], True)

    def _known_of(self, needle: Needle) -> dict[int, Any]:
        """The remembered hits of a needle; forgets the least recently used needles."""
        known = self._known.setdefault(needle, {})
        self._known.move_to_end(needle)
        while len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return known

    def _read_ahead(self, blocks: Sequence[PassageBlock]) -> Iterator[tuple[Any, Any]]:
        """The contents of these blocks. A thread reads the next one while one is searched; it needs no lock."""
        read = (self._thread.submit(block.read) for block in blocks)
        ahead = next(read, None)
        while ahead is not None:
            now, ahead = ahead, next(read, None)
            yield now.result()


def _reader(parquet: Any, at: int) -> Callable[[], tuple[Any, Any]]:
    def read() -> tuple[Any, Any]:
        table = parquet.read_row_group(at, columns=["cursor", "text"], use_threads=False).combine_chunks()
        return table["cursor"].chunk(0), table["text"].chunk(0)

    return read


def _block_of(table: Any) -> PassageBlock:
    cursors, texts = (table[name].combine_chunks() for name in ("cursor", "text"))
    return PassageBlock(cursors[0].as_py(), _grams(texts), lambda: (cursors, texts))


def _kept(table: Any, cursors: Any) -> Any:
    """The passages of other calls than these."""
    return table.filter(pa.array(~np.isin(table["cursor"].to_numpy(), cursors)))


def concatenate(some: Sequence[Any]) -> Any:
    """Joins arrays of cursors into one."""
    return np.concatenate(some) if some else np.empty(0, np.int64)


def _strings(values: Sequence[str | None]) -> Any:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        # Half of a surrogate pair.
        plain = [None if value is None else value.encode(errors="replace").decode() for value in values]
        return pa.array(plain, pa.string())


def _grams(texts: Any) -> Any:
    """The filter of these texts."""
    raw = _raw(texts)
    bits = np.zeros(1 << _BITS, np.bool_)
    for data in (raw.data.lower(), "\0".join(text.casefold() for _, text in raw.non_ascii()).encode()):
        for at in range(0, len(data), _SLICE):
            bits[_hashes(data[at : at + _SLICE + _GRAM - 1])] = True
    return np.packbits(bits, bitorder="little")


def _hashes(data: bytes) -> Any:
    """The positions of the bits of all runs of five bytes, with repetitions."""
    padded, runs = data + bytes(_WORD), max(0, len(data) - _GRAM + 1)
    # Integers at every eighth byte, beginning at each of the first eight bytes.
    words = [np.frombuffer(padded, "<u8", (runs - at + _WORD - 1) // _WORD, at) for at in range(min(runs, _WORD))]
    grams = np.concatenate(words) if words else np.empty(0, np.uint64)
    return ((grams << np.uint64(8 * (_WORD - _GRAM))) * np.uint64(_MIX)) >> np.uint64(64 - _BITS)


def _candidates(blocks: Sequence[PassageBlock], needle: Needle) -> Any:
    """An array with True for each block that may have one of the needle's texts."""
    found = np.zeros(len(blocks), np.bool_)
    for text in needle:
        pieces = [text] if isinstance(text, str) else text.pieces
        places = np.unique(np.concatenate([np.empty(0, np.uint64), *(_hashes(piece.encode()) for piece in pieces)]))
        may = np.ones(len(blocks), np.bool_)
        for at, block in enumerate(blocks):
            may[at] = bool(np.all(block.grams[places >> 3] >> (places & 7) & 1))
        found |= may
    return found


class _TextBuffer(NamedTuple):
    """The memory of an array of texts."""

    data: bytes
    offsets: Any
    """The offset at which each text begins, and the end of the last one."""

    def non_ascii(self) -> Iterator[tuple[int, str]]:
        """The texts that are not ASCII, with their places: casefolding changes more of them than lower case does."""
        if not self.data.isascii():
            high = np.flatnonzero(np.frombuffer(self.data, np.uint8) >= 128)
            for at in np.unique(np.searchsorted(self.offsets, high, "right") - 1).tolist():
                yield at, self.data[self.offsets[at] : self.offsets[at + 1]].decode()


def _raw(texts: Any) -> _TextBuffer:
    _, offsets, data = texts.buffers()
    places = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    begins, ends = (int(places[0]), int(places[-1])) if len(places) else (0, 0)
    return _TextBuffer(b"" if data is None else data.slice(begins, ends - begins).to_pybytes(), places - begins)


def hits_in(cursors: Any, texts: Any, needles: Sequence[Needle]) -> Iterator[Any]:
    """For each needle the cursors of the spans that have it."""
    raw = _raw(texts)
    lowered, offsets = raw.data.lower(), raw.offsets.tolist()
    odd = [(at, text.casefold()) for at, text in raw.non_ascii()]
    of = cursors.to_numpy()
    for needle in needles:
        found = {at for at, text in odd if any(is_in(part, text) for part in needle)}
        for part in needle:
            if isinstance(part, str):
                if part.isascii():
                    found.update(_places(lowered, offsets, part.encode()))
            elif part.pattern.isascii():
                places = _places(lowered, offsets, max(part.pieces, key=len, default="").encode())
                plain = ((at, lowered[offsets[at] : offsets[at + 1]]) for at in places)
                found.update(at for at, text in plain if text.isascii() and part.is_in(text.decode()))
        yield np.unique(of[sorted(found)]) if found else np.empty(0, np.int64)


def _places(data: bytes, offsets: Sequence[int], part: bytes) -> Iterator[int]:
    """The indexes of the texts that contain the part."""
    if not part:
        yield from range(len(offsets) - 1)
        return
    at = data.find(part)
    while at >= 0:
        text = bisect_right(offsets, at) - 1
        if at + len(part) <= offsets[text + 1]:
            yield text
            at = data.find(part, offsets[text + 1])
        else:
            at = data.find(part, at + 1)
