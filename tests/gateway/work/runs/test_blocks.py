"""Points become records and come back, bit for bit; curves agree with a plain model of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.tape.store.codec import DECODE_ERRORS
from penstock.gateway.work.curves import (
    MetricBlock,
    MetricRow,
    Series,
    bounds,
    curve,
    encode_block,
    merge_rows,
    series,
)

NAMES = st.sampled_from(["reward", "loss/kl", "clip.high", "tokens:s"])
STEPS = st.integers(0, 2**53 - 1) | st.integers(0, 40)
ROWS = st.lists(
    st.builds(MetricRow, STEPS, st.integers(0, 2**62 - 1), st.dictionaries(NAMES, st.floats(), min_size=1)),
    min_size=1,
    max_size=30,
)


def bits(values: dict[str, float]) -> dict[str, object]:
    return {name: "nan" if math.isnan(value) else (value, math.copysign(1, value)) for name, value in values.items()}


def plain(rows: Sequence[MetricRow]) -> dict[int, dict[str, float]]:
    """What is known after these rows were reported in order."""
    known: dict[int, dict[str, float]] = {}
    for row in rows:
        known.setdefault(row.step, {}).update(row.values)
    return known


@given(ROWS, st.booleans())
def test_rows_come_back(rows: list[MetricRow], packed: bool) -> None:
    kept = merge_rows(rows)
    stored = encode_block(kept, packed)
    block = MetricBlock(stored)
    found = block.rows()
    assert [(row.step, row.time_ns) for row in found] == [(row.step, row.time_ns) for row in kept]
    assert [bits(row.values) for row in found] == [bits(row.values) for row in kept]
    assert bounds(stored) == (block.first, block.last) == (kept[0].step, kept[-1].step)


@given(ROWS)
def test_of_a_step_the_newest_value_is_kept(rows: list[MetricRow]) -> None:
    known = plain(rows)
    assert [row.step for row in merge_rows(rows)] == sorted(known)
    assert {row.step: bits(row.values) for row in merge_rows(rows)} == {step: bits(known[step]) for step in known}
    newest = {row.step: row.time_ns for row in rows}
    assert {row.step: row.time_ns for row in merge_rows(rows)} == newest


@given(ROWS, st.lists(st.integers(1, 29)), st.booleans())
def test_a_series_is_read_through_all_blocks(rows: list[MetricRow], cuts: list[int], packed: bool) -> None:
    edges = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    blocks = [MetricBlock(encode_block(merge_rows(rows[a:b]), packed)) for a, b in pairwise(edges)]
    known = plain(rows)
    for name in {name for row in rows for name in row.values}:
        found = series(blocks, name)
        steps = sorted(step for step in known if name in known[step])
        assert list(found.steps) == steps
        assert [bits({"": value}) for value in found.values] == [bits({"": known[step][name]}) for step in steps]


def test_a_block_has_no_column_of_what_it_does_not_hold() -> None:
    assert MetricBlock(encode_block([MetricRow(1, 2, {"a": 3.0})], packed=True)).column("b") == ((), ())


@pytest.mark.parametrize("cut", [1, 17, 25, 40])
def test_a_broken_record_is_no_block(cut: int) -> None:
    stored = encode_block([MetricRow(step, step, {"a": 1.5, "b": 2.5}) for step in range(4)], packed=True)
    with pytest.raises(DECODE_ERRORS):
        MetricBlock(stored[:cut]).rows()


def test_lists_of_different_lengths_are_no_block() -> None:
    whole = encode_block([MetricRow(1, 2, {"a": 3.0}), MetricRow(2, 3, {"a": 4.0})], packed=False)
    # A value is cut out of the column: its length byte and its bytes.
    with pytest.raises(DECODE_ERRORS):
        MetricBlock(whole.replace(b"\xc4\x10", b"\xc4\x08")[:-8]).rows()


# -- curves ------------------------------------------------------------------------------------------------------------

FINITE = st.floats(allow_nan=False, allow_infinity=False)
POINTS = st.dictionaries(STEPS, FINITE | st.just(math.nan), max_size=60)


@given(POINTS, st.integers(1, 20), STEPS, st.none() | STEPS)
def test_buckets_agree_with_a_plain_model(points: dict[int, float], most: int, since: int, until: int | None) -> None:
    steps = sorted(points)
    made = curve("m", Series(steps, [points[step] for step in steps]), since, until, most)
    wanted = [step for step in steps if since <= step and (until is None or step <= until)]
    assert made.count == len(wanted)
    assert made.nulls == sum(math.isnan(points[step]) for step in wanted)
    assert made.exact == (len(wanted) <= most)
    assert made.last == (None if not wanted or math.isnan(points[wanted[-1]]) else points[wanted[-1]])
    assert len(made.first_step) == len(wanted) if made.exact else len(made.first_step) <= most
    left = iter(wanted)
    width = 1 if made.exact else -(-(wanted[-1] - wanted[0] + 1) // most)
    for at, (first, last) in enumerate(zip(made.first_step, made.last_step, strict=True)):
        mine = [next(left)]
        while mine[-1] != last:
            mine.append(next(left))
        assert mine[0] == first
        if not made.exact:
            assert {(step - wanted[0]) // width for step in mine} == {(first - wanted[0]) // width}
        finite = [points[step] for step in mine if not math.isnan(points[step])]
        assert made.finite[at] == len(finite)
        low, high, mean = made.low[at], made.high[at], made.mean[at]
        assert (low, high) == ((min(finite), max(finite)) if finite else (None, None))
        if low is not None and high is not None and mean is not None:
            assert low <= mean <= high
            scale = max(abs(low), abs(high))
            exact = math.fsum(value / len(finite) for value in finite)
            assert math.isclose(mean, exact, rel_tol=1e-9, abs_tol=scale * 1e-9)
        else:
            assert mean is None
    assert next(left, None) is None
