"""The report on every choice of every call: in a sample, or left out with a reason. Nothing is left out silently.

A choice is either in exactly one sample (for conversations: has weight 1 in exactly one) or in `dropped`. Most reasons
are those of `penstock doctor` (`gateway.model.codes.FindingCode`); `SamplingReason` has those that occur only
when samples are made.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Final, Literal, get_args

from penstock.gateway.model.codes import FindingCode, SequenceStart
from penstock.gateway.model.span import Span
from penstock.gateway.model.toml import pluralized

SamplingReason = Literal[
    "other_agent",
    "other_attempt",
    "empty",
    "nan_reward",
    "prompt_too_long",
    "response_too_long",
]
Reason = FindingCode | SamplingReason
"""The reason why a choice is in no sample."""
REASONS: Final = frozenset({*get_args(FindingCode), *get_args(SamplingReason)})

Start = Literal[SequenceStart, "too_long"]
"""The reason why a call begins a sample, and does not continue another."""

Unpaired = Literal["alone", "no_reward", "equal", "too_close", "branch"]
"""The reason why a group has no pair: one rollout only, fewer than two rewards, equal or too close rewards; or why a
conversation is in none: its rollout has a longer one (`branch`).
"""

Note = Literal["late_reward", "odd_reward", "turn_rewards_only"]
"""Oddities of rewards that exclude nothing."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A choice, or a whole call, that is in no sample."""

    rollout: str
    attempt: str
    sequence: int
    """Sequence of the call's span."""
    choice: int | None
    """Index of the choice; None for the whole call, with all its choices."""
    reason: Reason
    detail: str
    """The reason in words."""


@dataclass(slots=True)
class SampleReport:
    """Counts, and everything that was left out. `add` sums the reports of several rollouts."""

    rollouts: int = 0
    """Rollouts that were read."""
    calls: int = 0
    """Recorded calls of these rollouts."""
    samples: int = 0
    """Samples or conversations that were made."""
    choices: int = 0
    """Choices in these samples."""
    tokens: int = 0
    """Sampled tokens in these samples."""
    starts: Counter[Start] = field(default_factory=Counter[Start])
    """Samples by the reason why they begin; ideally only `first`."""
    notes: Counter[Note] = field(default_factory=Counter[Note])
    """Odd rewards by kind."""
    pairs: int = 0
    """Pairs of conversations, for preferences."""
    unpaired: Counter[Unpaired] = field(default_factory=Counter[Unpaired])
    """Groups and conversations that are in no pair."""
    hints: list[str] = field(default_factory=list[str])
    """Advice for more pairs."""
    dropped: list[Exclusion] = field(default_factory=list[Exclusion])
    """Choices and calls in no sample, of this report alone."""
    elsewhere: Counter[Reason] = field(default_factory=Counter[Reason])
    """Choices and calls in no sample, by reason, of reports that were added."""

    @property
    def reasons(self) -> Counter[Reason]:
        """Choices and calls in no sample, by reason, with those of added reports."""
        return self.elsewhere + Counter[Reason](one.reason for one in self.dropped)

    def drop(self, span: Span, choice: int | None, reason: Reason, detail: str) -> None:
        """Record that a choice is left out, or a whole call."""
        self.dropped.append(Exclusion(span.rollout, span.attempt, span.sequence, choice, reason, detail))

    def add(self, other: SampleReport) -> None:
        """Add the counts of another report. Of what it left out only the reasons are counted, because a tape has no
        bound.
        """
        for count in fields(self):
            if count.name != "dropped":
                mine = getattr(self, count.name)
                mine += other.reasons if count.name == "elsewhere" else getattr(other, count.name)
                setattr(self, count.name, mine)

    def lines(self) -> list[str]:
        """The report for a person: one line of sums, and one for each kind of count."""
        asked = f"{pluralized(self.rollouts, 'rollout')}, {pluralized(self.calls, 'call')}"
        made = f"{pluralized(self.samples, 'row')} of {pluralized(self.choices, 'answer')}"
        counts = (("rows begin", self.starts), ("left out", self.reasons), ("rewards", self.notes))
        counts = (*counts, (f"{pluralized(self.pairs, 'pair')}, not in one", self.unpaired))
        return [
            f"{asked}: {made}, {pluralized(self.tokens, 'sampled token')}",
            *(f"{title}: " + ", ".join(f"{name} {n:,}" for name, n in c.most_common()) for title, c in counts if c),
            *self.hints,
        ]
