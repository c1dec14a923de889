"""Figures of one run, and of several together. Pure.

A run whose seed stays has changed nothing: its gain is 0 exactly, its test stays sealed, and it counts. A run whose
test was left out has no gain, and is counted as untested.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.trainer.apo.report.result import RunResult
from penstock.trainer.apo.report.statistics import MeanEstimate, estimate


class TaskComparison(NamedTuple):
    """A task of the test with a reward of both the seed and the winner."""

    task: str
    key: str
    before: float
    """The seed's mean."""
    after: float
    """The winner's mean."""
    rollouts: tuple[str, ...]
    """Rollouts of the winner."""

    @property
    def gain(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class RunFigures:
    """The figures of one run."""

    result: RunResult
    pairs: Sequence[TaskComparison]
    before: MeanEstimate | None
    """The seed's mean on the test."""
    after: MeanEstimate | None
    """The winner's mean on the test."""
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
        """Characters of the texts before and after."""
        winner = self.result.winner
        return self.result.seed.length, (self.result.seed if winner is None else winner).length


@dataclass(frozen=True)
class AggregateFigures:
    """The figures of several runs together."""

    runs: Sequence[RunFigures]
    gain: MeanEstimate | None
    """Mean gain over runs; of a single run its own."""
    gap: float | None
    """Mean gap of the runs with a winner that was tested."""
    better: int
    """Runs with a gain above 0 on the test."""
    worse: int
    """Runs with a gain below 0."""
    same: int
    """Runs whose seed stays, or whose winner is just as good on the test."""
    untested: int
    """Runs with a winner and without a test."""


def figures(result: RunResult) -> RunFigures:
    pairs = _pairs(result)
    if result.winner is None:
        return RunFigures(result, pairs, None, None, MeanEstimate(0.0, None, None, 0), None)
    before = estimate([(pair.key, pair.before) for pair in pairs])
    after = estimate([(pair.key, pair.after) for pair in pairs])
    gain = _within(estimate([(pair.key, pair.gain) for pair in pairs]))
    raced = next((one.gain for one in result.race if one.candidate == result.winner.id), None)
    return RunFigures(result, pairs, before, after, gain, raced)


def aggregate_figures(results: Sequence[RunResult]) -> AggregateFigures:
    runs = [figures(result) for result in results]
    known = [(run.result.run, run.gain.mean) for run in runs if run.gain is not None]
    gaps = [run.gap for run in runs if run.gap is not None]
    return AggregateFigures(
        runs,
        gain=runs[0].gain if len(runs) == 1 else _within(estimate(known)),
        gap=math.fsum(gaps) / len(gaps) if gaps else None,
        better=sum(gain > 0 for _, gain in known),
        worse=sum(gain < 0 for _, gain in known),
        same=sum(gain == 0 for _, gain in known),
        untested=len(runs) - len(known),
    )


def _within(found: MeanEstimate | None) -> MeanEstimate | None:
    """Return a gain's interval limited to -1 and 1, as all gains are."""
    if found is None or found.low is None or found.high is None:
        return found
    return found._replace(low=max(-1.0, found.low), high=min(1.0, found.high))


def _pairs(result: RunResult) -> list[TaskComparison]:
    if result.winner is None:
        return []
    rewards: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    names: defaultdict[str, list[str]] = defaultdict(list)
    for one in result.tests:
        if one.reward is not None:
            rewards[one.candidate, one.task].append(one.reward)
        if one.candidate == result.winner.id:
            names[one.task].append(one.rollout)
    found: list[TaskComparison] = []
    for task in result.tasks:
        both = rewards[result.seed.id, task.id], rewards[result.winner.id, task.id]
        if all(both):
            before, after = (math.fsum(values) / len(values) for values in both)
            found.append(TaskComparison(task.id, task.key, before, after, tuple(names[task.id])))
    return found
