"""Forecasts the rollouts that a run would need, by simulating the race of its finalist against the seed. Pure.

The race bets on the differences of pairs (`trainer.apo.gate`). Races are simulated here with differences that are
normal around a gain and clipped at -1 and 1; each race draws its gain from the probe's estimate, given that it is worth
having. So the forecast assumes that there is something to find, and says how long finding it takes with this noise. The
wealth is that of the gate, for all races at once: half of it bets at the rate that fits the estimated gain, half of it
at those of `gateway.releases.canary.betting`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.gateway.releases.canary.betting import RATES
from penstock.trainer.apo.advice.belief import NormalEstimate
from penstock.trainer.apo.gate import ALPHA, rate

Array = NDArray[np.float64]
RACES: Final = 200
MOST_PAIRS: Final = 2_000
SURE: Final = 0.8
"""Share of the races that must be decided."""
LARGEST_STAKE: Final = 0.9
"""The limit of `Wealth.bet`: the worst difference is 1."""
BLOCK: Final = 100


class RaceForecast(NamedTuple):
    """Figures on the length of races."""

    pairs: int | None
    """Pairs after which 80 % of the races are decided; None when even 2,000 do not suffice."""
    power: float
    """Share of the races that are decided within the pairs of the budget."""


def forecast_race(gain: NormalEstimate, worth: float, variance: float, pairs: int) -> RaceForecast:
    """Return the forecast. `worth`: the least gain that counts; `variance`: of the difference of a pair; `pairs`: pairs
    that the budget covers."""
    source = np.random.default_rng(0)
    ends = race_lengths(gains_above(gain, worth, source), variance, rate(max(gain.mean, worth), variance), source)
    needed = int(np.sort(ends)[int(SURE * RACES) - 1])
    return RaceForecast(needed if needed <= MOST_PAIRS else None, float(np.mean(ends <= pairs)))


def gains_above(gain: NormalEstimate, worth: float, source: np.random.Generator) -> Array:
    """Return draws of a gain, given that it is above `worth`: by inversion of its distribution on a grid."""
    grid = np.linspace(worth, max(worth + 0.01, min(1.0, gain.mean + 5 * gain.sd)), 400)
    spread = max(gain.sd, 1e-6)
    with np.errstate(over="ignore"):
        density = np.exp(-0.5 * ((grid - gain.mean) / spread) ** 2 + 0.5 * ((grid[0] - gain.mean) / spread) ** 2)
    if not np.isfinite(density).all():
        return np.full(RACES, max(worth, gain.mean))
    return source.choice(grid, size=RACES, p=density / density.sum())


def race_lengths(gains: Array, variance: float, guessed: float, source: np.random.Generator) -> Array:
    """Return the number of pairs after which each race is decided; more than `MOST_PAIRS` for one that is not."""
    rates = np.minimum(np.array([*RATES, guessed]), LARGEST_STAKE)
    shares = np.array([*([1 / (2 * len(RATES))] * len(RATES)), 0.5])
    wealth = np.zeros((len(gains), len(rates)))
    ends = np.full(len(gains), MOST_PAIRS + 1)
    for start in range(0, MOST_PAIRS, BLOCK):
        drawn = source.normal(gains[:, None], np.sqrt(variance), (len(gains), BLOCK))
        steps = np.log1p(rates * np.clip(drawn, -1.0, 1.0)[:, :, None]).cumsum(axis=1) + wealth[:, None, :]
        better = (np.exp(steps) * shares).sum(axis=2) >= 1 / ALPHA
        first = np.where(better.any(axis=1), start + better.argmax(axis=1) + 1, MOST_PAIRS + 1)
        ends = np.minimum(ends, first)
        wealth = steps[:, -1]
        if (ends <= start + BLOCK).all():
            break
    return ends
