"""How many more groups of a step have a difference when tasks are chosen by what they were worth? A simulation without
a model and without a gateway; seconds. `python -m bench.curriculum [--seeds 20]`.

Every task has a difficulty, normal around the policy's skill with a standard deviation of 4, so that half of the groups
have equal rewards at first. A rollout is right with probability 1 / (1 + exp(difficulty - skill)).
Groups of eight, sixteen tasks a step, eighty steps, 400 tasks. What is told, of the same simulated policies:

* *fixed skill*: nothing is learnt, so that both ways of choosing meet the same tasks;
* *growing skill*: each group with a difference adds a little to the skill, so that tasks become easy as others did.

It does not say how a real policy learns: that more groups have a difference is all that is measured here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from bench.store import HERE, Figure, report
from penstock.trainer.data.tasks import Curriculum, RolloutTask, draw_tasks

OUT = HERE / "out" / "curriculum.json"
TASKS, GROUPS, SIZE, STEPS = 400, 16, 8, 80
SPREAD = 4.0
GAIN = 0.005
"""Skill that a group with a difference adds, where skill grows: about three in eighty steps."""


@dataclass(slots=True)
class Played:
    """The figures of one simulated run."""

    differ: float
    """Share of the groups with a difference."""
    skill: float
    """Skill at the end; 0 at the start."""
    tried: float
    """Share of the tasks that were tried."""


def played(seed: int, chosen: bool, gain: float) -> Played:
    """Simulate a run. `chosen`: tasks are chosen by the rewards of their rollouts; else in turn."""
    random = np.random.default_rng((seed, 1))
    difficulty = np.random.default_rng(seed).normal(0.0, SPREAD, TASKS)
    tasks = [RolloutTask(number, None) for number in range(TASKS)]
    curriculum, skill, differ, tried = Curriculum(tasks, seed), 0.0, 0, set[int]()
    for step in range(1, STEPS + 1):
        start = (step - 1) * GROUPS
        taken = curriculum.draw(step, 0, GROUPS) if chosen else draw_tasks(tasks, start, GROUPS, seed)
        tried |= {task.number for task in taken}
        curriculum.register_groups({str(place): task for place, task in enumerate(taken)})
        likely = 1 / (1 + np.exp([difficulty[task.number] - skill for task in taken]))
        rewards = (random.random((GROUPS, SIZE)) < likely[:, None]).astype(float)
        curriculum.record_rewards({str(place): group for place, group in enumerate(rewards.tolist())})
        useful = int((rewards.min(axis=1) < rewards.max(axis=1)).sum())
        differ, skill = differ + useful, skill + gain * useful
    return Played(differ / (STEPS * GROUPS), skill, len(tried) / TASKS)


def told(name: str, runs: Sequence[Played]) -> list[Figure]:
    """Return the mean of some runs, with its standard error."""
    error = 100 * stdev(one.differ for one in runs) / len(runs) ** 0.5
    return [
        Figure(
            f"{name}: groups with a difference (standard error {error:.1f})", 100 * fmean(r.differ for r in runs), "%"
        ),
        Figure(f"{name}: tasks that were tried", 100 * fmean(r.tried for r in runs), "%"),
        Figure(f"{name}: skill at the end", fmean(r.skill for r in runs), ""),
    ]


def main() -> None:
    """Compare both ways of choosing, with and without learning."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    seeds = range(parser.parse_args().seeds)
    figures: list[Figure] = []
    for about, gain in (("fixed skill", 0.0), ("growing skill", GAIN)):
        for how, chosen in (("in turn", False), ("by worth", True)):
            figures += told(f"{about}, {how}", [played(seed, chosen, gain) for seed in seeds])
    report(figures, OUT)


if __name__ == "__main__":
    main()
