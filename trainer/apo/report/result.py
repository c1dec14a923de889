"""`result.json`: what a run keeps of itself when it has ended. The fields are documented in docs/apo-report.md."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.gateway.model.base import Mode, Noun
from penstock.gateway.model.run import RunCandidate
from penstock.trainer.apo.gate import State

FORMAT: Literal[1] = 1


class CandidateTexts(Noun):
    """A candidate's texts."""

    id: str
    """The candidate."""
    texts: dict[str, str]
    """By resource."""
    versions: dict[str, str]
    """Version on the tape, by resource; empty where a text was never run."""

    @property
    def length(self) -> int:
        """Characters of all texts."""
        return sum(map(len, self.texts.values()))


class CandidateRecord(RunCandidate):
    """A candidate, as the tape has it (`RunCandidate`), and what led to it."""

    claim: str = ""
    """The failure that it is to mend; here in full."""
    causes: list[str] = Field(default_factory=list[str])
    """Rollouts that led to it."""


class FinalistRecord(Noun):
    """A finalist of the race."""

    candidate: str
    """Which."""
    state: State
    """Where it stood at the end; `racing`: the rollouts were used up."""
    gain: float
    """Mean of its rewards less those of the seed on the same tasks."""
    e_value: float
    """Evidence against "it is no better than the seed"."""
    needed: float
    """The e-value at which it is better."""
    pairs: int
    """Tasks that both had a reward on, each as often as it was run."""
    rate: float
    """The rate of the bet that fits what the search had seen."""


class TrialRecord(Noun):
    """A rollout of the race or of the test."""

    candidate: str
    """Whose texts it had."""
    task: str
    """Its task."""
    number: int
    """From 0: the how manieth of this candidate and task."""
    reward: float | None
    """Between 0 and 1; None where nobody gave one."""
    rollout: str
    """Its name on the tape."""


class SealedTask(Noun):
    """A task of the test."""

    id: str
    """Its name."""
    key: str
    """What belongs together has one key."""
    input: str
    """The beginning of what the agent is given, as JSON."""


class RunUsage(Noun):
    """What a run has cost."""

    rollouts: dict[Mode, int]
    """By mode: `train` is the search, `val` the race, `test` the test."""
    reflections: int
    """Calls of the reflecting model."""
    tokens: int
    """Tokens of them, in and out, hidden reasoning counted."""
    money: float
    """What they cost, by the configured prices."""


class Leak(Noun):
    """Something in a text that should not be there."""

    kind: Literal["task", "reason", "grader", "slot"]
    """Copied from a task; copied from a grader's reason; a word to the grader; a slot that was lost or added."""
    resource: str
    """Whose text."""
    line: str
    """The line."""
    found: str
    """What of it."""
    where: str = ""
    """A task that it is copied from."""


class RunResult(Noun):
    """A run that has ended."""

    format: Literal[1] = FORMAT
    """Format of this file."""
    run: str
    """Its name on the tape."""
    engine: str
    """Who proposed."""
    settings: str
    """Digest of the settings that decide what a search comes to."""
    draw: int
    """`run.seed`: what everything was drawn from."""
    placebo: bool
    """Whether the search was shown feedback that says nothing."""
    ended_ns: int
    """When it ended; ns since the epoch."""
    why: str
    """Why the search ended, and what came of the race."""
    seed: CandidateTexts
    """What it began with."""
    winner: CandidateTexts | None
    """What is better; None where the seed stays."""
    line_causes: dict[str, list[str]]
    """By line of the winner, or of the seed where it is gone: the rollouts that led to the change."""
    candidates: list[CandidateRecord]
    """All of them, in the order in which they came; the seed is the first."""
    race: list[FinalistRecord]
    """Finalists."""
    validation: list[TrialRecord]
    """Rollouts of the race."""
    tests: list[TrialRecord]
    """Rollouts of the test; none without a winner."""
    tasks: list[SealedTask]
    """Tasks of the test, when it was opened."""
    used: RunUsage
    """What it has cost."""
    leaks: list[Leak]
    """What the leak test has found in the winner."""
    published: list[str] = Field(default_factory=list[str])
    """What became of the winner, for a person."""
