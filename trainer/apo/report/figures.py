"""Figures of one run, and of several together, with their intervals. Pure.

Rollouts of one task, and tasks of one key, are alike: a test of 60 tasks of 3 customers has 3 independent units. So the
unit within a run is the key, with the variance of a mean over clusters (Cameron & Miller, "A practitioner's guide to
cluster-robust inference", 2015, the correction K / (K - 1)), and over several runs it is the run. Both intervals are
Student's t with one degree of freedom less than there are units: rewards are bounded, but units are often few, and a
bootstrap of few units is too narrow.

    mean +- t(0.975, K - 1) * sqrt(K / (K - 1) * sum_k (sum_i in k (x_i - mean))^2) / n

A run whose seed stays has changed nothing: its gain is 0 exactly, its test stays sealed, and it counts. A run whose
test was left out has no gain, and is counted as untested.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.trainer.apo.protocol import means
from penstock.trainer.apo.report.result import RunResult
from penstock.trainer.apo.search import Racer

COVERAGE: Final = 0.95


class MeanEstimate(NamedTuple):
    mean: float
    low: float | None
    """None, as is `high`, without an interval: one unit only, or equal values."""
    high: float | None
    units: int


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


class TaskComparison(NamedTuple):
    task: str
    key: str
    before: float
    after: float
    rollouts: tuple[str, ...]

    @property
    def gain(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class RunFigures:
    result: RunResult
    pairs: Sequence[TaskComparison]
    before: MeanEstimate | None
    after: MeanEstimate | None
    gain: MeanEstimate | None
    """Paired, over the tasks of the test, by key. 0 if the seed stays; None if there was no test."""
    raced: float | None
    """The winner's gain in the race; None without a winner."""

    @property
    def gap(self) -> float | None:
        """Gain in the race less gain on the test: the part of the gain that is due to the choice of the winner."""
        return None if self.raced is None or self.gain is None else self.raced - self.gain.mean

    @property
    def lengths(self) -> tuple[int, int]:
        return self.result.seed.length, (self.result.winner or self.result.seed).length


@dataclass(frozen=True)
class AggregateFigures:
    runs: Sequence[RunFigures]
    gain: MeanEstimate | None
    """Mean gain over runs; of a single run its own."""
    gap: float | None
    better: int
    worse: int
    same: int
    """Runs whose seed stays, or whose winner is just as good on the test."""
    untested: int


def figures(result: RunResult) -> RunFigures:
    winner = result.winner
    if winner is None:
        return RunFigures(result, [], None, None, MeanEstimate(0.0, None, None, 0), None)
    rewards: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    names: defaultdict[str, list[str]] = defaultdict(list)
    for one in result.tests:
        if one.reward is not None:
            rewards[one.candidate, one.task].append(one.reward)
        if one.candidate == winner.id:
            names[one.task].append(one.rollout)
    pairs: list[TaskComparison] = []
    for task in result.tasks:
        both = rewards[result.seed.id, task.id], rewards[winner.id, task.id]
        if all(both):
            before, after = map(_mean, both)
            pairs.append(TaskComparison(task.id, task.key, before, after, tuple(names[task.id])))
    return RunFigures(
        result, pairs, before=estimate([(pair.key, pair.before) for pair in pairs]),
        after=estimate([(pair.key, pair.after) for pair in pairs]),
        gain=_within(estimate([(pair.key, pair.gain) for pair in pairs])),
        raced=next((one.gain for one in result.race if one.candidate == winner.id), None),
    )  # fmt: skip


def aggregate_figures(results: Sequence[RunResult]) -> AggregateFigures:
    runs = [figures(result) for result in results]
    known = [(run.result.run, run.gain.mean) for run in runs if run.gain is not None]
    gaps = [run.gap for run in runs if run.gap is not None]
    return AggregateFigures(
        runs, gain=runs[0].gain if len(runs) == 1 else _within(estimate(known)), gap=_mean(gaps) if gaps else None,
        better=sum(gain > 0 for _, gain in known), worse=sum(gain < 0 for _, gain in known),
        same=sum(gain == 0 for _, gain in known), untested=len(runs) - len(known),
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _within(found: MeanEstimate | None) -> MeanEstimate | None:
    """Return a gain's interval limited to -1 and 1, as all gains are."""
    if found is None or found.low is None or found.high is None:
        return found
    return found._replace(low=max(-1.0, found.low), high=min(1.0, found.high))


def wealth(result: RunResult, candidate: str, rate: float) -> list[tuple[float, float]]:
    """Return (tasks, e-value) of a finalist after each task, computed again: the race keeps the last value only."""
    mean = means(((one.candidate, one.task), one.reward) for one in result.validation)
    again, found = Racer(candidate, len(result.race), rate), list[tuple[float, float]]()
    for task in dict.fromkeys(one.task for one in result.validation):
        mine, theirs = mean.get((candidate, task)), mean.get((result.seed.id, task))
        if mine is not None and theirs is not None:
            again.add(mine - theirs)
            found.append((float(len(found) + 1), again.e_value))
    return found
