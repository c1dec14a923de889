"""Trials: the results of candidates on tasks, and the pool that keeps all of them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.trainer.apo.candidate import Candidate


class TrialSpec(NamedTuple):
    """A rollout to run, as candidate, task and number."""

    candidate: str
    """Candidate id."""
    task: str
    """Task id."""
    number: int
    """Number among the rollouts of this candidate and task, from 0."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A rollout that has ended."""

    candidate: str
    """Candidate id."""
    task: str
    """Task id."""
    number: int
    """Number among the rollouts of this candidate and task, from 0."""
    reward: float | None
    """Between 0 and 1; None without one: the trial is then left out, not counted as 0."""
    reason: str = ""
    """Reason of the reward, in the grader's words."""
    transcript: str = ""
    """The conversation, for the reflecting model."""
    steps: int = 0
    """Number of calls of the model."""
    rollout: str = ""
    """Rollout id on the tape."""


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
        """Add a candidate and return it; if one has the same texts, return that one."""
        return self.candidates.setdefault(candidate.id, candidate)

    def next_trial(self, candidate: str, task: str) -> TrialSpec:
        """Return the next trial of a candidate on a task."""
        number = self._ordered[candidate, task]
        self._ordered[candidate, task] += 1
        return TrialSpec(candidate, task, number)

    def keep(self, trials: Iterable[Trial]) -> None:
        for trial in trials:
            self.trials.append(trial)
            self._by_candidate[trial.candidate].append(trial)

    def of(self, candidate: str) -> Sequence[Trial]:
        """Return the trials of a candidate that have a reward."""
        return [trial for trial in self._by_candidate[candidate] if trial.reward is not None]

    def mean(self, candidate: str) -> float | None:
        """Return a candidate's mean reward; None without one."""
        rewards = [trial.reward for trial in self.of(candidate) if trial.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None
