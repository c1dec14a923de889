"""Trials: what came of a candidate on a task, and the pool that keeps all of them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.trainer.apo.candidate import Candidate


class Order(NamedTuple):
    """A rollout that is wanted."""

    candidate: str
    """Which candidate's texts it has."""
    task: str
    """Its task."""
    number: int
    """From 0: the how manieth of this candidate and task."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A rollout that has ended."""

    candidate: str
    """Whose texts it had."""
    task: str
    """Its task."""
    number: int
    """From 0: the how manieth of this candidate and task."""
    reward: float | None
    """Between 0 and 1; None where nobody gave one: it is then left out, not counted as 0."""
    reason: str = ""
    """Why, in the grader's words."""
    transcript: str = ""
    """What the agent did, for the reflecting model."""
    steps: int = 0
    """Calls of the model."""
    rollout: str = ""
    """Its name on the tape."""


class Pool:
    """Candidates and their trials, oldest first. The first candidate is the seed."""

    def __init__(self, seed: Candidate) -> None:
        self.seed = seed
        self.candidates: dict[str, Candidate] = {}
        self.trials: list[Trial] = []
        self._by_candidate: defaultdict[str, list[Trial]] = defaultdict(list)
        self._ordered: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.add(seed)

    def add(self, candidate: Candidate) -> Candidate:
        """Keeps a candidate; the one that is there already where the texts are the same."""
        return self.candidates.setdefault(candidate.id, candidate)

    def order(self, candidate: str, task: str) -> Order:
        """The next trial of a candidate on a task."""
        number = self._ordered[candidate, task]
        self._ordered[candidate, task] += 1
        return Order(candidate, task, number)

    def keep(self, trials: Iterable[Trial]) -> None:
        """Adds results."""
        for trial in trials:
            self.trials.append(trial)
            self._by_candidate[trial.candidate].append(trial)

    def of(self, candidate: str) -> Sequence[Trial]:
        """The trials of a candidate that have a reward."""
        return [trial for trial in self._by_candidate[candidate] if trial.reward is not None]

    def mean(self, candidate: str) -> float | None:
        """Mean reward; None without one."""
        rewards = [trial.reward for trial in self.of(candidate) if trial.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None
