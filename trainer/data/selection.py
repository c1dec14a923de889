"""Chooses the rollouts of production that a step learns from. Pure.

Nobody queues production's rollouts, most of them repeat no task, and their rewards come late. A rollout can be used
when weights of this run that are not too old have served all calls of its model. A step takes the oldest of these, and
only what it can compare: rewards that are all the same wait for one that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.trainer.serving.pruning import step_of

EPS: Final = 1e-6
"""Rewards that differ by less are equal; as in `trainer.mathematics.advantage`."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rollout that can be learnt from."""

    rollout: str
    """Its name."""
    group: str | None
    """The task that it repeats."""
    created_ns: int
    """When it was first seen."""
    version: int
    """The step that the oldest weights which served it are of."""
    reward: float
    """Its reward."""
    seen: Mapping[str, int]
    """Its attempts, each with its highest span when it was looked at: what comes later is not learnt from."""


@dataclass(frozen=True, slots=True)
class Versions:
    """How old a version of the model is."""

    run: str
    """Name of the run, whose versions are RUN.STEP."""
    start: frozenset[str]
    """Versions of the resource that are the weights which the run began from."""

    def step(self, version: str | None) -> int | None:
        """The step that a version is of; None where it is not of this run."""
        return 0 if version in self.start else step_of(self.run, version or "")

    def oldest(self, versions: Iterable[str | None]) -> int | None:
        """The step of the oldest; None when there is none, or one is not of this run."""
        steps = [self.step(version) for version in versions]
        return None if not steps or None in steps else min(step for step in steps if step is not None)


def pick(ready: Iterable[Candidate], enough: int, least: int | None) -> list[Candidate]:
    """The rollouts that a step learns from, oldest first; none when there are not enough. `least` is None: `enough`
    rollouts, not all of the same reward, which are compared with each other. Else whole groups of at least `least`
    rollouts whose rewards differ, as many as it takes to have `enough` rollouts.
    """
    order = sorted(ready, key=lambda one: (one.created_ns, one.rollout))
    if least is None:
        return _batch(order, enough)
    chosen: list[Candidate] = []
    for group in _groups(order):
        if len(group) >= least and _differ(group):
            chosen += group
        if len(chosen) >= enough:
            return chosen
    return []


def _batch(order: Sequence[Candidate], enough: int) -> list[Candidate]:
    first = list(order[:enough])
    if len(first) < enough:
        return []
    if _differ(first):
        return first
    other = next((one for one in order[enough:] if _differ([first[0], one])), None)
    return [] if other is None else [*first[:-1], other]


def _groups(order: Iterable[Candidate]) -> Iterable[list[Candidate]]:
    """By group, in the order of their oldest."""
    groups: dict[str, list[Candidate]] = {}
    for one in order:
        if one.group is not None:
            groups.setdefault(one.group, []).append(one)
    return groups.values()


def _differ(some: Sequence[Candidate]) -> bool:
    rewards = [one.reward for one in some]
    return max(rewards) - min(rewards) >= EPS
