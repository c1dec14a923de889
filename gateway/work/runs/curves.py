"""A metric over the steps, exactly or in buckets. Pure.

Buckets are of equal width in steps, not in points, so that gaps stay gaps. Each has the lowest, the highest and the
mean of its finite values, so a drawing of them hides no spike (M. Jugel et al., M4, VLDB 2014, keep extremes for the
same reason).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.gateway.model.run import Curve
from penstock.gateway.tape.store.codec import DECODE_ERRORS
from penstock.gateway.work.runs.blocks import MetricBlock


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
