"""Chooses the rollouts of production that a step learns from. Pure.

Nobody queues production's rollouts, most of them repeat no task, and their rewards come late. A rollout can be used
when all calls to its model were served by weights of this run that are not too old. A step takes the oldest of these,
and only rollouts whose rewards it can compare: if all rewards are the same, it waits for one that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.trainer.serving.publisher import step_of

EPS: Final = 1e-6
"""Rewards that differ by less are equal; as in `trainer.mathematics.advantage`."""


@dataclass(frozen=True, slots=True)
class TrainableRollout:
    """A rollout that training can use."""

    rollout: str
    """Rollout id."""
    group: str | None
    """Its group, which is the task that it repeats; None without one."""
    created_ns: int
    """Time when the gateway first saw it, in ns."""
    version: int
    """Step of the oldest weights that served it."""
    reward: float
    seen: Mapping[str, int]
    """Its attempts, each with its highest span at the inspection: later spans are not learnt from."""


@dataclass(frozen=True, slots=True)
class RunVersions:
    """The age of versions of the model."""

    run: str
    """Name of the run, whose versions are RUN.STEP."""
    start: frozenset[str]
    """Versions of the resource with the weights that the run began from."""

    def step(self, version: str | None) -> int | None:
        """Return the step that made a version; 0 for the weights that the run began from, None if it is not of this
        run."""
        return 0 if version in self.start else step_of(self.run, version or "")

    def oldest(self, versions: Iterable[str | None]) -> int | None:
        """Return the step of the oldest version; None when there is none, or one is not of this run."""
        steps = [self.step(version) for version in versions]
        return None if not steps or None in steps else min(step for step in steps if step is not None)


def pick(ready: Iterable[TrainableRollout], enough: int, least: int | None) -> list[TrainableRollout]:
    """Return the rollouts that a step learns from, oldest first; none when there are not enough. If `least` is None:
    `enough` rollouts, not all of the same reward, which are compared with each other. Else whole groups of at least
    `least` rollouts whose rewards differ, as many groups as it takes to have `enough` rollouts."""
    order = sorted(ready, key=lambda one: (one.created_ns, one.rollout))
    if least is None:
        return _batch(order, enough)
    chosen: list[TrainableRollout] = []
    for group in _groups(order):
        if len(group) >= least and _differ(group):
            chosen += group
        if len(chosen) >= enough:
            return chosen
    return []


def _batch(order: Sequence[TrainableRollout], enough: int) -> list[TrainableRollout]:
    first = list(order[:enough])
    if len(first) < enough:
        return []
    if _differ(first):
        return first
    other = next((one for one in order[enough:] if _differ([first[0], one])), None)
    return [] if other is None else [*first[:-1], other]


def _groups(order: Iterable[TrainableRollout]) -> Iterable[list[TrainableRollout]]:
    """Group the candidates, in the order of each group's first."""
    groups: dict[str, list[TrainableRollout]] = {}
    for one in order:
        if one.group is not None:
            groups.setdefault(one.group, []).append(one)
    return groups.values()


def _differ(some: Sequence[TrainableRollout]) -> bool:
    rewards = [one.reward for one in some]
    return max(rewards) - min(rewards) >= EPS
