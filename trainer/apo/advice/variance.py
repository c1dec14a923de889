"""The variance of the reward, split into task, prompt, task x prompt, the agent's own randomness, and the grader. Pure.

    reward = mean + task + prompt + (task x prompt) + agent + grader

Every component is estimated by products or squares of differences whose expectation is that component whatever the
distributions are (moments of a two-way random model; Searle, Casella & McCulloch, Variance Components, 1992, ch. 5).
Cells may be empty, and have different numbers of rollouts. With M the mean reward of a cell, n its rollouts, s2 the
variance within cells:

    within      pooled variance of rollouts of one cell
    prompt      mean over tasks t != u of (M[p,t] - M[q,t]) (M[p,u] - M[q,u]) / 2
    task        covariance over tasks of M[p,.] and M[q,.]
    interaction (variance over tasks of M[p,.] - M[q,.], less s2 (1/n[p,.] + 1/n[q,.])) / 2

each over all pairs of prompts p, q. A component that comes out below 0 is 0.

`within` is the agent and the grader together. They can be separated if the same behaviour was judged more than once:
several rewards of a rollout by the same source, or rollouts of a task with the same output. Otherwise the grader's part
lies anywhere between 0 and `within`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from penstock.trainer.apo.advice.observation import Observation, RewardedObservation, with_rewards

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GraderVariance:
    """Variance of the grader's own judgements."""

    variance: float
    """Variance of rewards of the same behaviour."""
    judgements: int
    """Judgements of a behaviour beyond its first one: 0 when nothing was judged twice."""


@dataclass(frozen=True, slots=True)
class VarianceComponents:
    """Variances of the reward, each 0 or above."""

    task: float
    """Variance between tasks."""
    prompt: float
    """Variance between prompts, on average over tasks."""
    interaction: float
    """Variance between prompts on single tasks, beyond that."""
    within: float
    """Variance of repeats: the agent's own randomness and the grader's."""
    repeats: int
    """Degrees of freedom of `within`: rollouts beyond the first of each cell."""
    grader: GraderVariance | None
    """The grader's variance, a part of `within`; None if nothing was judged twice."""

    @property
    def total(self) -> float:
        return self.task + self.prompt + self.interaction + self.within

    @property
    def of_grader(self) -> float | None:
        """The grader's variance, at most `within`; None if unknown."""
        return None if self.grader is None else min(self.grader.variance, self.within)


def variance_components(observations: Sequence[Observation]) -> VarianceComponents:
    """Return the components; 0 where the observations do not suffice."""
    found = with_rewards(observations)
    means, counts = _cells(found)
    within, repeats = _pooled(_grouped((seen.observation.prompt, seen.observation.task, seen.reward) for seen in found))
    prompt, task, interaction = _between(means, counts, within)
    return VarianceComponents(task, prompt, interaction, within, repeats, grader_variance(observations))


def grader_variance(observations: Sequence[Observation]) -> GraderVariance | None:
    """Return the grader's own variance; None if nothing was judged twice."""
    again = [list(one.judged) for one in observations if len(one.judged) > 1]
    same = _grouped(
        (seen.observation.task, seen.observation.output, seen.reward)
        for seen in with_rewards(observations)
        if seen.observation.output
    )
    variance, judgements = _pooled([*again, *same])
    return GraderVariance(variance, judgements) if judgements else None


def _grouped(rows: Iterable[tuple[str, str, float]]) -> list[list[float]]:
    groups: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for first, second, value in rows:
        groups[first, second].append(value)
    return list(groups.values())


def _pooled(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Return (variance within groups, its degrees of freedom)."""
    squares, freedom = 0.0, 0
    for group in groups:
        squares += float(np.var(group)) * len(group)
        freedom += len(group) - 1
    return (squares / freedom if freedom else 0.0), freedom


def _cells(found: Sequence[RewardedObservation]) -> tuple[Array, Array]:
    """Return (means, counts): prompts by tasks; the mean of an empty cell is NaN."""
    prompts = {name: at for at, name in enumerate(dict.fromkeys(seen.observation.prompt for seen in found))}
    tasks = {name: at for at, name in enumerate(dict.fromkeys(seen.observation.task for seen in found))}
    sums, counts = np.zeros((len(prompts), len(tasks))), np.zeros((len(prompts), len(tasks)))
    for seen in found:
        place = prompts[seen.observation.prompt], tasks[seen.observation.task]
        sums[place] += seen.reward
        counts[place] += 1
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0), counts


def _between(means: Array, counts: Array, within: float) -> tuple[float, float, float]:
    """Return the variances (prompt, task, interaction)."""
    found: list[tuple[float, float, float]] = []
    weights: list[int] = []
    for one, other in combinations(range(len(means)), 2):
        both = (counts[one] > 0) & (counts[other] > 0)
        number = int(both.sum())
        if number < 2:
            continue
        difference = means[one, both] - means[other, both]
        products = (difference.sum() ** 2 - (difference**2).sum()) / (number * (number - 1))
        noise = within * float((1 / counts[one, both] + 1 / counts[other, both]).mean())
        shared = float(np.cov(means[one, both], means[other, both])[0, 1])
        found.append((products / 2, shared, (float(difference.var(ddof=1)) - noise) / 2))
        weights.append(number)
    if not found:
        return 0.0, 0.0, 0.0
    mean = np.maximum(np.average(np.array(found), axis=0, weights=weights), 0.0)
    return float(mean[0]), float(mean[1]), float(mean[2])
