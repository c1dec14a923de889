"""Estimates the gains of a probe's prompts, and the cost of wrongly used tools. Pure.

A Bayesian linear model, whose variances come from the split:

    reward = level of the seed + effect of the prompt + task + (task x prompt) + noise

Effects of prompts have normal priors around 0; prompts with instructions from the graders' reasons share a part of
their effect, so each is evidence about the others. So the highest mean of several is not taken at face value: a prompt
that was picked because it was lucky is drawn back towards 0 as much as its few rollouts and the noise require
(empirical Bayes; Efron & Morris 1975), and the interval of the best prompt's gain needs no further correction for the
picking.

The cost of wrongly used tools is the coefficient of "a tool call of this rollout was misused" in the same model, times
the share of the seed's rollouts with misuse. Rollouts are compared within their tasks, because tasks that need a tool
may be the harder ones anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import erf, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.trainer.apo.advice.observation import Arm, Observation, RewardedObservation, Stance, with_rewards
from penstock.trainer.apo.advice.variance import VarianceComponents

Array = NDArray[np.float64]
LEVEL: Final = (0.5, 0.5)
"""Prior mean and standard deviation of the seed's level."""
MENDING_SD: Final = 0.15
"""Prior standard deviation of the effect that all prompts with the reasons' instructions share."""
OWN_SD: Final[dict[Stance, float]] = {"terse": 0.07, "steps": 0.07, "checklist": 0.1, "mended": 0.1, "scratch": 0.25}
"""Prior standard deviation of a prompt's own effect."""
MENDING: Final[tuple[Stance, ...]] = ("checklist", "mended")
MISUSE: Final = (-0.2, 0.3)
"""Prior mean and standard deviation of the effect of misuse on a rollout's reward."""
USUAL_NOISE: Final = 0.06
"""Usual variance within cells; it counts as `DOUBT` repeats, because few repeats may be alike by chance."""
DOUBT: Final = 4
LEAST_TASK: Final = 0.01
LEAST_INTERACTION: Final = 0.002
Z90: Final = 1.645


@dataclass(frozen=True, slots=True)
class NormalEstimate:
    """An estimate with a normal distribution."""

    mean: float
    sd: float

    @property
    def low(self) -> float:
        """Lower end of its 90 % interval."""
        return self.mean - Z90 * self.sd

    @property
    def high(self) -> float:
        """Upper end of its 90 % interval."""
        return self.mean + Z90 * self.sd

    def above(self, value: float) -> float:
        """Return the probability that it is higher than `value`."""
        if self.sd == 0:
            return float(self.mean > value)
        return 0.5 * (1 + erf((self.mean - value) / (self.sd * sqrt(2))))


@dataclass(frozen=True, slots=True)
class Belief:
    """The estimates from a probe."""

    seed: NormalEstimate
    """Mean reward of the seed, on tasks like these."""
    gains: dict[str, NormalEstimate]
    """Gain over the seed by id of the other prompts."""
    best: str | None
    """Id of the prompt with the highest gain; None without any other prompt."""
    tools: NormalEstimate
    """Loss of the seed's mean reward by wrongly used tools."""

    @property
    def gain(self) -> NormalEstimate:
        """Gain of the best prompt; 0 without one."""
        return NormalEstimate(0.0, 0.0) if self.best is None else self.gains[self.best]


def noise(split: VarianceComponents) -> float:
    """Return the variance within cells, mixed with `USUAL_NOISE`."""
    return (split.within * split.repeats + USUAL_NOISE * DOUBT) / (split.repeats + DOUBT)


def fit_belief(arms: Sequence[Arm], observations: Sequence[Observation], split: VarianceComponents) -> Belief:
    """Return the estimates from observations; `arms`: the seed first."""
    found = with_rewards(observations)
    model = _GainRegression(arms, found, split)
    gains = {arm.candidate.id: model.gain(arm) for arm in arms[1:]}
    best = max(gains, key=lambda name: gains[name].mean, default=None)
    return Belief(model.quantity("level"), gains, best, _tools(arms, found, split))


def _tools(arms: Sequence[Arm], found: Sequence[RewardedObservation], split: VarianceComponents) -> NormalEstimate:
    """Return the seed's loss by wrongly used tools."""
    mine = [seen.observation for seen in found if seen.observation.prompt == arms[0].candidate.id]
    share = sum(one.misused > 0 for one in mine) / len(mine) if mine else 0.0
    if not share:
        return NormalEstimate(0.0, 0.0)
    effect = _GainRegression(arms, found, split, tools=MISUSE).quantity("tools")
    return NormalEstimate(-effect.mean * share, effect.sd * share)


class _GainRegression:
    """The regression. `tools`: prior mean and standard deviation of the effect of misuse; None leaves it out."""

    def __init__(
        self,
        arms: Sequence[Arm],
        found: Sequence[RewardedObservation],
        split: VarianceComponents,
        tools: tuple[float, float] | None = None,
    ) -> None:
        self._stances = {arm.candidate.id: arm.stance for arm in arms}
        self._prior = {"level": LEVEL, "mending": (0.0, MENDING_SD), "tools": tools or (0.0, 1e-6)}
        self._prior |= {f"prompt {arm.candidate.id}": (0.0, OWN_SD[arm.stance]) for arm in arms[1:]}
        rows = [self._row(seen, split) for seen in found]
        self._places = {name: at for at, name in enumerate(self._prior)}
        design = np.zeros((len(rows), len(self._prior)))
        for at, row in enumerate(rows):
            design[at, [self._places[name] for name in row]] = 1.0
        rewards = np.array([seen.reward for seen in found])
        self._mean, self._covariance = _fit(design, rewards, np.array(list(self._prior.values())), noise(split))

    def _row(self, seen: RewardedObservation, split: VarianceComponents) -> list[str]:
        """Return the terms of a rollout's reward."""
        one = seen.observation
        task, cell = f"task {one.task}", f"cell {one.prompt} {one.task}"
        self._prior.setdefault(task, (0.0, sqrt(max(split.task, LEAST_TASK))))
        self._prior.setdefault(cell, (0.0, sqrt(max(split.interaction, LEAST_INTERACTION))))
        return ["level", task, cell, *self._of(one.prompt), *(["tools"] if one.misused else [])]

    def _of(self, prompt: str) -> list[str]:
        """Return the terms of a prompt; the seed has none."""
        own = [name for name in (f"prompt {prompt}",) if name in self._prior]
        return own + (["mending"] if self._stances[prompt] in MENDING else [])

    def gain(self, arm: Arm) -> NormalEstimate:
        """Return the estimate of a prompt's gain: the sum of its terms."""
        return self.quantity(*self._of(arm.candidate.id))

    def quantity(self, *terms: str) -> NormalEstimate:
        """Return the estimate of the sum of terms."""
        at = [self._places[name] for name in terms]
        return NormalEstimate(float(self._mean[at].sum()), float(np.sqrt(self._covariance[np.ix_(at, at)].sum())))


def _fit(design: Array, rewards: Array, prior: Array, noise: float) -> tuple[Array, Array]:
    """Return (mean, covariance) of all terms."""
    centre, spread = prior[:, 0], prior[:, 1]
    precision = np.diag(spread**-2.0) + design.T @ design / noise
    covariance: Array = np.linalg.inv(precision).astype(np.float64)
    return centre + covariance @ (design.T @ (rewards - design @ centre)) / noise, covariance
