"""Compares two small samples of rewards: an interval for the difference of their means, or None if it is too early.
Pure.

Welch's interval with Student's t. It is right for one look at independent rollouts; it is not the anytime-valid test of
releases, which is valid however often one looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from statistics import NormalDist, variance
from typing import NamedTuple

from penstock.gateway.reading.policy.report import mean

FEWEST = 10
"""Fewest rewards of each version for an interval."""


class MeanDifference(NamedTuple):
    """Mean of the other less mean of the one, with its 95 % interval."""

    value: float
    low: float
    high: float


def difference(one: Sequence[float], other: Sequence[float]) -> MeanDifference | None:
    """The difference of the means. None with too few rewards, without variance, or if it cannot be computed."""
    if min(len(one), len(other)) < FEWEST:
        return None
    try:
        parts = [variance(values) / len(values) for values in (one, other)]
        error = sum(parts)
        if not 0 < error**2 < inf:
            return None
    except OverflowError:
        return None
    freedom = error**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (one, other), strict=True))
    value, reach = mean(other) - mean(one), student(0.975, freedom) * sqrt(error)
    return MeanDifference(value, value - reach, value + reach)


def student(probability: float, freedom: float) -> float:
    """Quantile of Student's t by its expansion around the normal one: right to 0.1 % from 9 degrees of freedom on."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
