"""Estimates the effect of each edit from rollouts of prompts that have several edits at once.

Every rollout of a prompt with a subset of the edits is evidence about each of them. The reward is modelled as a sum,

    reward = task + sum of the effects of the edits in the prompt + noise

with normal priors on every term (a Bayesian linear regression with random effects of tasks; Gelman et al., Bayesian
Data Analysis). So N rollouts measure each of K edits as well as N / 2 pairs of prompts with and without it would,
instead of N / 2K: a screening design (Plackett & Burman 1946). The model need not be exact: the race at the end decides
about whole prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
EFFECT_SD: Final = 0.08
"""Prior standard deviation of an edit's effect."""
TASK_SD: Final = 0.25
LEAST_NOISE: Final = 0.1


class DesignRow(NamedTuple):
    """A rollout with its reward."""

    task: str
    reward: float
    edits: frozenset[int]
    """Numbers of the edits in its prompt."""


@dataclass(frozen=True)
class EffectPosterior:
    """The posterior of the edits' effects: a joint normal distribution."""

    mean: Array
    """Mean effect, by edit."""
    covariance: Array
    """Covariance, edits by edits."""

    def draw(self, source: np.random.Generator) -> Array:
        """Return a draw of all effects."""
        return source.multivariate_normal(self.mean, self.covariance, method="cholesky")

    @property
    def sd(self) -> Array:
        return np.sqrt(np.diag(self.covariance))


def estimate_effects(rows: Sequence[DesignRow], prior: Sequence[float]) -> EffectPosterior:
    """Return the posterior. `prior`: mean of each edit's effect before any rollout."""
    count = len(prior)
    start = EffectPosterior(np.array(prior, dtype=np.float64), np.eye(count) * EFFECT_SD**2)
    if not rows or not count:
        return start
    tasks: Mapping[str, int] = {task: at for at, task in enumerate(dict.fromkeys(row.task for row in rows))}
    design = np.zeros((len(rows), count + len(tasks) + 1))
    for at, row in enumerate(rows):
        design[at, list(row.edits)] = 1.0
        design[at, count + tasks[row.task]] = 1.0
    design[:, -1] = 1.0
    rewards = np.array([row.reward for row in rows])
    centre = np.concatenate([start.mean, np.zeros(len(tasks)), [0.5]])
    spread = np.concatenate([np.full(count, EFFECT_SD), np.full(len(tasks), TASK_SD), [0.5]])
    noise = max(LEAST_NOISE, float(np.std(rewards)))
    found = (centre, np.diag(spread**2))
    # Twice: the second fit uses the residuals of the first as its noise.
    for _ in range(2):
        found = _fit(design, rewards, centre, spread, noise)
        noise = max(LEAST_NOISE, float(np.sqrt(np.mean((rewards - design @ found[0]) ** 2))))
    return EffectPosterior(found[0][:count], found[1][:count, :count])


def _fit(design: Array, rewards: Array, centre: Array, spread: Array, noise: float) -> tuple[Array, Array]:
    """Return (mean, covariance) of all terms."""
    precision = np.diag(spread**-2.0) + design.T @ design / noise**2
    covariance: Array = np.linalg.inv(precision).astype(np.float64)
    return centre + covariance @ (design.T @ (rewards - design @ centre)) / noise**2, covariance
