"""Held-out suites and their metrics.

    evaluation/NAME/reward        mean reward of the suite's rollouts that have one
    .../reward_low, reward_high   its 95 % interval where all rewards are between 0 and 1, tasks counting once each
    evaluation/NAME/pass@K        probability that at least one of K rollouts of a task passes; mean over the tasks
    evaluation/NAME/failed        share of the rollouts that failed or ran out of time

K is 1 and the suite's `samples`. A rollout passes with a reward of `passed` or more; one without a reward does not.
The agent sets the sampling: with temperature 0 it is greedy, and more than one rollout of a task says nothing new.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import fmean
from typing import NamedTuple

from penstock.trainer.config import TrainConfig
from penstock.trainer.config_evaluate import SuiteSettings as Settings
from penstock.trainer.data.collector import RolloutBatch, RolloutOrder
from penstock.trainer.data.tasks import RolloutTask, read_tasks
from penstock.trainer.mathematics.interval import wilson


class EvaluationSuite(NamedTuple):
    """A suite with its tasks."""

    settings: Settings
    tasks: Sequence[RolloutTask]

    @property
    def reward(self) -> str:
        return reward_of(self.settings)


class PendingEvaluation(NamedTuple):
    """The queued held-out tasks of a step."""

    step: int
    orders: Sequence[RolloutOrder]
    """Order of each suite."""


def reward_of(settings: Settings) -> str:
    """Return the name of the metric of a suite's mean reward."""
    return f"evaluation/{settings.name}/reward"


def read_suites(config: TrainConfig) -> list[EvaluationSuite]:
    """Read all suites of a run. Raises `ConfigError`."""
    return [EvaluationSuite(one, read_tasks(f"evaluate.suite {one.name}", one.tasks)) for one in config.evaluate.suite]


def figures(suite: EvaluationSuite, found: RolloutBatch) -> dict[str, float]:
    """Return the metrics of a suite's rollouts; empty where none has a reward."""
    if found.mean is None:
        return {}
    made = {suite.reward: found.mean}
    rewards = list(found.rewards.values())
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
