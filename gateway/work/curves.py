"""A metric over the steps, exactly or in buckets. Pure.

Buckets are of equal width in steps, not in points, so that gaps stay gaps. Each has the lowest, the highest and the
mean of its finite values, so a drawing of them hides no spike (M. Jugel et al., M4, VLDB 2014, keep extremes for the
same reason).
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec
import zstandard

from penstock.gateway.model.run import Curve
from penstock.gateway.tape.store.codec import DECODE_ERRORS

# Points of a run as records of the tape. Pure.
#
# A record is a *block* of points: its lowest and its highest step, 8 bytes each, big-endian, so that a reader can
# pass over it, then its columns, `[packed, steps, times, names, columns]` in msgpack. `steps` rise; they and `times`
# (ns) are differences, each to the one before it and the first to 0. A column is `[places, values]`: the metric has a
# value in the rows `places` (2 bytes each, little-endian; empty means in all), and `values` are doubles,
# little-endian, NaN for null. In a packed block the bytes of the doubles are sorted by significance (all first bytes,
# then all second ones ...), and then compressed with zstd: neighbouring values share sign, exponent and often the low
# bytes, which are zero where a trainer computes in float32.
#
# Each post becomes a small block; many small blocks are folded into a packed one. If blocks have the same metric at
# the same step, the later one counts.

LEVEL = 6
_DOUBLE = 8
# Only the writer's thread compresses.
_compress = zstandard.ZstdCompressor(level=LEVEL).compress


class MetricRow(NamedTuple):
    """The values at a step; NaN stands for null."""

    step: int
    time_ns: int
    values: dict[str, float]


_BOUNDS = struct.Struct(">QQ")


class MetricBlock:
    """A record whose columns are decoded when they are needed."""

    def __init__(self, record: bytes) -> None:
        """Raises one of `codec.DECODE_ERRORS` when it is no block."""
        self.first, self.last = bounds(record)
        found = msgspec.msgpack.decode(memoryview(record)[_BOUNDS.size :])
        self._packed, self._steps, self._times, self.names, self._columns = found
        if not len(self._steps) == len(self._times) or not len(self.names) == len(self._columns):
            raise ValueError("the lists of a block are of different lengths")

    @cached_property
    def steps(self) -> list[int]:
        """The steps of its rows, rising."""
        return list(accumulate(self._steps))

    @cached_property
    def times(self) -> list[int]:
        """The time of each report; ns since the epoch."""
        return list(accumulate(self._times))

    @cached_property
    def _unpacker(self) -> zstandard.ZstdDecompressor:
        """The decompressor of this block alone: one must not be used by two threads at once."""
        return zstandard.ZstdDecompressor()

    def column(self, name: str) -> tuple[Sequence[int], Sequence[float]]:
        """Return (places in `steps`, values) of a metric; empty when the block has none of it."""
        return self._read(name, *self._columns[self.names.index(name)]) if name in self.names else ((), ())

    def _read(self, name: str, places: bytes, stored: bytes) -> tuple[Sequence[int], Sequence[float]]:
        raw = _sorted_back(self._unpacker.decompress(stored)) if self._packed else stored
        values = struct.unpack(f"<{len(raw) // _DOUBLE}d", raw)
        rows = struct.unpack(f"<{len(places) // 2}H", places) if places else range(len(self._steps))
        if len(rows) != len(values):
            raise ValueError(f"the column {name!r} of a block has {len(values)} values in {len(rows)} rows")
        return rows, values

    def rows(self) -> list[MetricRow]:
        """Return all rows of the block."""
        found = [MetricRow(step, at, {}) for step, at in zip(self.steps, self.times, strict=True)]
        for name, column in zip(self.names, self._columns, strict=True):
            for place, value in zip(*self._read(name, *column), strict=True):
                found[place].values[name] = value
        return found


def readable_block(record: bytes, whole: bool = True) -> MetricBlock | None:
    """Return a block; None for a damaged one, so that others need not wait for it. `whole`: True to decode all its
    values as a check."""
    try:
        block = MetricBlock(record)
        for name in block.names if whole else ():
            _ = block.column(name)
    except DECODE_ERRORS:
        return None
    return block


def bounds(record: bytes) -> tuple[int, int]:
    """Return the lowest and the highest step of a record."""
    return _BOUNDS.unpack_from(record)


def encode_block(rows: Sequence[MetricRow], packed: bool) -> bytes:
    """Return the block of these rows, whose steps rise."""
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    columns = [_column(rows, name, packed) for name in names]
    steps, times = _differences(row.step for row in rows), _differences(row.time_ns for row in rows)
    return _BOUNDS.pack(rows[0].step, rows[-1].step) + msgspec.msgpack.encode((packed, steps, times, names, columns))


def merge_rows(rows: Iterable[MetricRow]) -> list[MetricRow]:
    """Return one row for each step, rising; of the same metric at the same step the later value counts, and the later
    time."""
    found: dict[int, MetricRow] = {}
    for row in rows:
        before = found.get(row.step)
        values = row.values if before is None else before.values | row.values
        found[row.step] = MetricRow(row.step, row.time_ns, values)
    return [found[step] for step in sorted(found)]


def _column(rows: Sequence[MetricRow], name: str, packed: bool) -> tuple[bytes, bytes]:
    places = [place for place, row in enumerate(rows) if name in row.values]
    raw = struct.pack(f"<{len(places)}d", *(rows[place].values[name] for place in places))
    rare = b"" if len(places) == len(rows) else struct.pack(f"<{len(places)}H", *places)
    return rare, _compress(_sorted(raw)) if packed else raw


def _sorted(raw: bytes) -> bytes:
    return b"".join(raw[at::_DOUBLE] for at in range(_DOUBLE))


def _sorted_back(planes: bytes) -> bytes:
    count = len(planes) // _DOUBLE
    raw = bytearray(len(planes))
    for at in range(_DOUBLE):
        raw[at::_DOUBLE] = planes[at * count : (at + 1) * count]
    return bytes(raw)


def _differences(numbers: Iterable[int]) -> list[int]:
    def each() -> Iterator[int]:
        before = 0
        for number in numbers:
            yield number - before
            before = number

    return list(each())


class Series(NamedTuple):
    """A metric at every step that has one, rising; NaN stands for null."""

    steps: Sequence[int]
    values: Sequence[float]


def series(blocks: Iterable[MetricBlock], name: str) -> Series:
    """Return a metric from the blocks of a run in the order of their writing: where they overlap the later one
    counts."""
    steps: list[int] = []
    values: list[float] = []
    rising = True
    for block in blocks:
        try:
            places, found = block.column(name)
        except DECODE_ERRORS:
            continue  # readable blocks are shown
        if not found:
            continue
        at = [block.steps[place] for place in places] if len(places) < len(block.steps) else block.steps
        rising = rising and (not steps or at[0] > steps[-1])
        steps += at
        values += found
    if not rising:
        held = dict(zip(steps, values, strict=True))
        steps = sorted(held)
        values = [held[step] for step in steps]
    return Series(steps, values)


def curve(name: str, found: Series, since: int, until: int | None, most: int) -> Curve:
    """Return the points from step `since` to step `until`, both included, in at most `most` buckets."""
    begin = bisect_left(found.steps, since)
    end = len(found.steps) if until is None else bisect_right(found.steps, until)
    steps, values = found.steps[begin:end], found.values[begin:end]
    exact = len(steps) <= most
    cuts = range(len(steps) + 1) if exact else list(_cuts(steps, most))
    # A sum is a number only if all its values are; to count the others is slow.
    nulls = sum(map(math.isnan, values)) if math.isnan(sum(values)) else 0
    buckets = [_bucket(steps[low:high], values[low:high], bool(nulls)) for low, high in pairwise(cuts)]
    columns = list(zip(*buckets, strict=True)) or [()] * 6
    first, last, finite, low, high, mean = map(list, columns)
    return Curve.model_construct(
        metric=name,
        count=len(steps),
        nulls=nulls,
        exact=exact,
        last=_null(values[-1]) if steps else None,
        first_step=first,
        last_step=last,
        finite=finite,
        low=low,
        high=high,
        mean=mean,
    )


def _cuts(steps: Sequence[int], most: int) -> Iterator[int]:
    """Yield the indices in `steps` at which buckets begin, and the end; no bucket is empty."""
    width = -(-(steps[-1] - steps[0] + 1) // most)
    at = 0
    while at < len(steps):
        yield at
        at = bisect_left(steps, steps[0] + ((steps[at] - steps[0]) // width + 1) * width, at)
    yield at


Bucket = tuple[int, int, int, float | None, float | None, float | None]


def _bucket(steps: Sequence[int], values: Sequence[float], holed: bool) -> Bucket:
    finite = [value for value in values if not math.isnan(value)] if holed else values
    if not finite:
        return steps[0], steps[-1], 0, None, None, None
    low, high = min(finite), max(finite)
    # Rounding must not put the mean outside the range of its values.
    return steps[0], steps[-1], len(finite), low, high, min(max(_mean(finite), low), high)


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def _null(value: float) -> float | None:
    return None if math.isnan(value) else value
