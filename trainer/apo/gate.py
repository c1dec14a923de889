"""The gate: finalists race against the seed on tasks of the validation split, which no engine has seen. Pure.

Every task is run with the seed and with each finalist that is still in the race; the difference of their rewards on
that task counts. A finalist is *better* once the wealth that was bet against "it is no better than the seed"
(`gateway.releases.canary.betting`) reaches K / ALPHA, where K is the number of finalists: so a candidate that is no
better passes the gate with probability ALPHA at most, however many rollouts it takes and however often one looks
(Ville's inequality). It is *out* once the opposite bet reaches 1 / ALPHA, or when `ENOUGH` pairs have shown no gain.

Half of the stake is bet at the rate that fits the results of the search, and half at every rate. The search's rollouts
are of other tasks, so the bet uses nothing of the race: a wrong guess costs a factor of two, a right one saves a third
of the rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from penstock.gateway.releases.canary.betting import Wealth

ALPHA: Final = 0.05
ENOUGH: Final = 64
"""Pairs without any gain after which a finalist is out."""
LEAST_RATE: Final = 0.05
MOST_RATE: Final = 0.9
"""A bet at this rate keeps a tenth of its wealth after the worst pair."""
TINY: Final = 1e-12
State = Literal["racing", "better", "out"]


@dataclass(slots=True)
class Racer:
    """A finalist in the race."""

    candidate: str
    """Candidate id."""
    finalists: int
    """Number of finalists."""
    rate: float
    """Rate of the bet that fits the results of the search (`rate`)."""
    differences: list[float] = field(default_factory=list[float])
    """Its rewards less those of the seed on the same tasks."""
    _guessed: float = 1.0
    """Wealth of the bet at `rate`."""
    _better: Wealth = field(default_factory=Wealth)
    _worse: Wealth = field(default_factory=Wealth)

    def add(self, difference: float) -> None:
        """Add a pair; `difference` lies within -1 and 1."""
        self.differences.append(difference)
        self._guessed *= 1.0 + self.rate * difference
        self._better.bet(difference, 1.0)
        self._worse.bet(-difference, 1.0)

    @property
    def evidence(self) -> float:
        """e-value against "it is no better than the seed"; `needed` makes it better."""
        return (self._guessed + self._better.value) / 2

    @property
    def needed(self) -> float:
        """The e-value at which it is better: 1 / ALPHA for each finalist."""
        return self.finalists / ALPHA

    @property
    def state(self) -> State:
        if self.evidence >= self.needed:
            return "better"
        idle = len(self.differences) >= ENOUGH and self.gain <= 0
        return "out" if idle or self._worse.value >= 1 / ALPHA else "racing"

    @property
    def gain(self) -> float:
        """Mean difference; 0 without any."""
        return sum(self.differences) / len(self.differences) if self.differences else 0.0


def rate(gain: float, variance: float) -> float:
    """Return the rate at which wealth grows fastest, if pairs differ by `gain` on average and with this variance (the
    first two terms of the growth, Kelly 1956)."""
    return min(MOST_RATE, max(LEAST_RATE, gain / max(variance + gain**2, TINY))) if gain > 0 else LEAST_RATE


def winner(racers: Sequence[Racer]) -> Racer | None:
    """Return the finalist that is better, with the highest gain; None when none is."""
    better = [racer for racer in racers if racer.state == "better"]
    return max(better, key=lambda racer: racer.gain, default=None)
