"""Intervals for means of few values. Pure.

Rollouts of one task, and tasks of one key, are alike: a test of 60 tasks of 3 customers has 3 independent units. So the
unit within a run is the key, with the variance of a mean over clusters (Cameron & Miller, "A practitioner's guide to
cluster-robust inference", 2015, the correction K / (K - 1)), and over several runs it is the run. Both intervals are
Student's t with one degree of freedom less than there are units: rewards are bounded, but units are often few, and a
bootstrap of few units is too narrow.

    mean +- t(0.975, K - 1) * sqrt(K / (K - 1) * sum_k (sum_i in k (x_i - mean))^2) / n
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

COVERAGE: Final = 0.95


class MeanEstimate(NamedTuple):
    """A mean and an interval around it."""

    mean: float
    low: float | None
    """None, as is `high`, without an interval: one unit only, or equal values."""
    high: float | None
    units: int
    """Independent units that it was computed from."""


def estimate(values: Sequence[tuple[str, float]], coverage: float = COVERAGE) -> MeanEstimate | None:
    """Return the mean of values and its interval; each value comes with its unit. None without values."""
    if not values:
        return None
    mean = math.fsum(value for _, value in values) / len(values)
    residues: defaultdict[str, float] = defaultdict(float)
    for unit, value in values:
        residues[unit] += value - mean
    units = len(residues)
    spread = math.fsum(residue**2 for residue in residues.values())
    if units < 2 or spread < 1e-12:
        return MeanEstimate(mean, None, None, units)
    error = math.sqrt(units / (units - 1) * spread) / len(values)
    reach = t_quantile((1 + coverage) / 2, units - 1) * error
    return MeanEstimate(mean, mean - reach, mean + reach, units)


def t_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t, above the median, by bisection; to 1e-9 of its value."""
    low, high = 0.0, 1.0
    while _below(high, freedom) < probability:
        low, high = high, 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _below(t: float, freedom: int) -> float:
    """Return P(T <= t), t >= 0, for whole degrees of freedom (Abramowitz & Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for at in range(2 + odd, freedom - 1, 2):
        term *= square * (at - 1) / at
        total += term
    if not odd:
        return (1 + sine * total) / 2
    return 0.5 + (angle + (sine * total if freedom > 1 else 0.0)) / math.pi
