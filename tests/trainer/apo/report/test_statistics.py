"""Intervals: they are those of Student's t, they cover what they promise, and they do not claim what nobody knows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.apo.report import estimate, t_quantile

VALUES = st.lists(st.tuples(st.sampled_from("abcdefg"), st.floats(-1, 1)), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706205), (2, 4.302653), (3, 3.182446), (4, 2.776445), (9, 2.262157), (30, 2.042272), (120, 1.979930)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, abs=1e-6)


def test_with_a_key_for_each_value_it_is_the_t_interval() -> None:
    found = estimate([("a", 0.1), ("b", 0.4), ("c", 0.2), ("d", 0.5)])
    assert found is not None
    assert found.low is not None
    assert found.mean == pytest.approx(0.3)
    error = math.sqrt(((0.2**2) * 2 + (0.1**2) * 2) / 3 / 4)
    assert found.mean - found.low == pytest.approx(t_quantile(0.975, 3) * error)


@given(VALUES)
def test_the_mean_is_inside_and_the_interval_is_symmetric(values: list[tuple[str, float]]) -> None:
    found = estimate(values)
    assert found is not None
    assert found.units == len({unit for unit, _ in values})
    if found.low is not None and found.high is not None:
        assert found.low <= found.mean <= found.high
        assert found.mean - found.low == pytest.approx(found.high - found.mean, abs=1e-9)


@given(VALUES, st.floats(-1, 1))
def test_what_is_added_to_all_moves_the_interval(values: list[tuple[str, float]], by: float) -> None:
    before, after = estimate(values), estimate([(unit, value + by) for unit, value in values])
    assert before is not None
    assert after is not None
    assert after.mean == pytest.approx(before.mean + by, abs=1e-9)
    if before.low is not None and after.low is not None:
        assert after.low == pytest.approx(before.low + by, abs=1e-6)


@pytest.mark.parametrize("values", [[("a", 0.5)], [("a", 0.1), ("a", 0.9)], [("a", 0.5), ("b", 0.5)]])
def test_one_unit_or_values_that_are_alike_give_no_interval(values: list[tuple[str, float]]) -> None:
    found = estimate(values)
    assert found is not None
    assert (found.low, found.high) == (None, None)


def test_without_values_there_is_nothing_to_say() -> None:
    assert estimate([]) is None


def test_it_covers_the_truth_as_often_as_it_says_although_tasks_of_a_key_go_together() -> None:
    draw = np.random.default_rng(7)
    covered = tasks_covered = 0
    for _ in range(600):
        customers = draw.normal(0, 0.2, 8)
        values = [(str(at), mean + noise) for at, mean in enumerate(customers) for noise in draw.normal(0, 0.2, 6)]
        found = estimate(values)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0 <= found.high
        alone = estimate([(f"{at}", value) for at, (_, value) in enumerate(values)])
        assert alone is not None
        assert alone.low is not None
        assert alone.high is not None
        tasks_covered += alone.low <= 0 <= alone.high
    assert 0.92 <= covered / 600 <= 0.98
    assert tasks_covered / 600 < 0.8, "who takes tasks of a key for independent promises too much"
