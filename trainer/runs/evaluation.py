"""Held-out suites and their metrics.

    evaluation/NAME/reward        mean reward of the suite's rollouts that have one
    .../reward_low, reward_high   its 95 % interval where all rewards are between 0 and 1, tasks counting once each
    evaluation/NAME/tasks         the number of tasks with a reward
    evaluation/NAME/pass@K        probability that at least one of K rollouts of a task passes; mean over the tasks
    evaluation/NAME/failed        share of the rollouts that failed or ran out of time

K is 1 and the suite's `samples`. A rollout passes with a reward of `passed` or more; one without a reward does not.
The agent sets the sampling: with temperature 0 it is greedy, and more than one rollout of a task says nothing new.

Evaluations also choose the best weights of a run, and stop an unattended run when they fall.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb, sqrt
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from penstock.trainer.config import SuiteSettings, TrainConfig
from penstock.trainer.data.collector import RolloutBatch, RolloutOrder
from penstock.trainer.data.tasks import RolloutTask, read_tasks

# The best weights of a run: those with the highest mean reward on the first held-out suite. Their directory is kept
# however many versions follow, the link `best` in the run's directory leads to it, and a release takes them.
#
# The highest of several means overestimates the reward on other tasks, the more so the more evaluations and the fewer
# held-out tasks there are. A release's canary measures the weights anew.

LINK: Final = "best"


@dataclass(slots=True)
class TrainingProgress:
    """The progress of a run; the next step follows from this and the engine's state."""

    step: int = 0
    """Number of steps done."""
    tasks: int = 0
    """Number of tasks taken by these steps."""
    trained: int = 0
    """Step of the newest update."""
    version: int = 0
    """Step of the newest published weights."""
    best: int | None = None
    """Step of the best weights; None before the first evaluation."""
    best_reward: float | None = None
    """Mean reward of the best weights on the held-out tasks."""
    owed: bool = False
    """True if the held-out tasks of `step` run beside the next step and have not ended."""

    def publish_due(self, last: bool, every: int) -> bool:
        """True if weights must be published now: new ones every `every` steps, and the last ones always."""
        return self.trained > self.version and (last or self.step % every == 0)

    def record_evaluation(self, reward: float) -> bool:
        """Note an evaluation of the newest published weights; return True if they are the best so far."""
        if self.best_reward is not None and reward <= self.best_reward:
            return False
        self.best, self.best_reward = self.version, reward
        return True


def link_best(directory: Path, version: Path) -> None:
    """Let `best` in a run's directory lead to a version; atomically, so that it always leads to one. Raises OSError."""
    beside = directory / f".{LINK}"
    beside.unlink(missing_ok=True)
    beside.symlink_to(os.path.relpath(version, directory))
    os.replace(beside, directory / LINK)


def choose_release(place: TrainingProgress) -> tuple[int, str]:
    """Return (the step of the weights to release, the reason for a person); step 0 if there are none to release."""
    if place.best is None:
        return place.version, "the last weights"
    reward = f"reward {place.best_reward:.4g}"
    if place.best == 0:
        return 0, f"no later weights were better on the held-out tasks than those that the run began with ({reward})"
    return place.best, f"the best on the held-out tasks ({reward})"


# Wilson's score interval: how far a measured share may be from the true one (E. B. Wilson, Probable inference, JASA
# 22, 1927). Unlike the mean plus or minus its standard error it stays between 0 and 1, and has a width even if all
# tasks went well.
#
# It holds for a mean of rewards between 0 and 1 as well, where tasks are independent: such a reward varies no more
# than one that is 0 or 1 with the same mean, so the interval is wide enough.

Z: Final = 1.959964
"""95 % of a normal distribution lie within this many standard deviations."""


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, 0 to 1, of `count` independent observations, 1 or more."""
    if not 0 <= share <= 1 or count < 1:
        raise ValueError(f"a share of {count} observations cannot be {share}")
    spread = Z * Z / count
    middle = (share + spread / 2) / (1 + spread)
    reach = Z / (1 + spread) * sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, middle - reach), min(1.0, middle + reach)


class EvaluationSuite(NamedTuple):
    """A suite with its tasks."""

    settings: SuiteSettings
    tasks: Sequence[RolloutTask]

    @property
    def reward(self) -> str:
        return suite_reward(self.settings)


class PendingEvaluation(NamedTuple):
    """The queued held-out tasks of a step."""

    step: int
    orders: Sequence[RolloutOrder]
    """Order of each suite."""


def suite_reward(settings: SuiteSettings) -> str:
    """Return the name of the metric of a suite's mean reward."""
    return f"evaluation/{settings.name}/reward"


def read_suites(config: TrainConfig) -> list[EvaluationSuite]:
    """Read all suites of a run. Raises `ConfigError`."""
    return [EvaluationSuite(one, read_tasks(f"evaluate.suite {one.name}", one.tasks)) for one in config.evaluate.suite]


def suite_metrics(suite: EvaluationSuite, found: RolloutBatch) -> dict[str, float]:
    """Return the metrics of a suite's rollouts; empty where none has a reward."""
    if found.mean is None:
        return {}
    rewards = list(found.rewards.values())
    made = {suite.reward: found.mean, f"evaluation/{suite.settings.name}/tasks": float(len(rewards))}
    if all(0 <= reward <= 1 for task in rewards for reward in task):
        made[f"{suite.reward}_low"], made[f"{suite.reward}_high"] = wilson(found.mean, len(rewards))
    name, samples, passed = suite.settings.name, suite.settings.samples, suite.settings.passed
    counts = [sum(reward >= passed for reward in task) for task in rewards]
    # Tasks none of whose rollouts has a reward have passed none.
    counts += [0] * (len(suite.tasks) - len(counts))
    for k in sorted({1, samples}):
        made[f"evaluation/{name}/pass@{k}"] = fmean(pass_at(samples, count, k) for count in counts)
    return made | {f"evaluation/{name}/failed": found.failed}


def pass_at(samples: int, passed: int, k: int) -> float:
    """Return the probability that at least one of `k` rollouts of a task passes, when `passed` of `samples` did;
    unbiased where `k` <= `samples`. Chen et al. 2021, arXiv:2107.03374, equation 1. Raises ValueError for other
    numbers."""
    if not (0 <= passed <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {passed} in {samples} rollouts is not defined")
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


# The end of an unattended run: it stops itself when its evaluation falls, and stays low.
#
# An evaluation is *low* when it is more than `max_drop` below the best so far, which may be the one before any
# training. One may be bad luck; two in a row are not.


@dataclass(slots=True)
class EvaluationHistory:
    """The evaluations of a run, in their order."""

    max_drop: float
    """Evaluations further than this below the best are low, in units of reward."""
    patience: int = 2
    """Number of low evaluations in a row that stops the run."""
    best: tuple[int, float] | None = None
    """Step and mean reward of the best evaluation, the first of equal ones."""
    low: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Low evaluations since the last one that was not: (step, mean reward)."""

    def add(self, step: int, reward: float) -> None:
        """Add the mean reward of the next evaluation."""
        if self.best is not None and reward < self.best[1] - self.max_drop:
            self.low.append((step, reward))
            return
        self.low.clear()
        if self.best is None or reward > self.best[1]:
            self.best = step, reward

    @property
    def stop_reason(self) -> str | None:
        """Why the run must stop, in a sentence; None while it may go on."""
        if self.best is None or len(self.low) < self.patience:
            return None
        values = ", ".join(f"{reward:.4g} after step {step}" for step, reward in self.low)
        step, reward = self.best
        best = f"the best was {reward:.4g} after step {step} (online.max_drop = {self.max_drop:g})"
        return f"evaluation fell: {values}; {best}"
