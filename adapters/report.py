"""What happened to every choice of every call, with its reason: nothing is left out silently.

A choice is either in exactly one sample (or, for conversations, marked in exactly one) or in `dropped`. Most reasons
are those of `penstock doctor` (`gateway.model.answers.Trouble`); `Reason` adds those that only the making of samples
knows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Final, Literal, get_args

from penstock.gateway.model.span import Span
from penstock.gateway.model.trouble import Begins, Trouble
from penstock.gateway.model.wording import counted

Own = Literal[
    "other_agent",
    "other_attempt",
    "empty",
    "nan_reward",
    "prompt_too_long",
    "response_too_long",
]
Reason = Trouble | Own
"""Why a choice is in no sample."""
REASONS: Final = frozenset({*get_args(Trouble), *get_args(Own)})

Start = Literal[Begins, "too_long"]
"""Why a sample begins, and does not continue another."""

Unpaired = Literal["alone", "no_reward", "equal", "too_close", "branch"]
"""Why a group gives no pair: one rollout only, nobody judged it, rewards that are equal or too close; or why a
conversation is in none: its rollout has a longer one."""

Note = Literal["late_reward", "odd_reward", "turn_rewards_only"]
"""Odd rewards that keep nothing out."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A choice, or a whole call, that is in no sample."""

    rollout: str
    attempt: str
    sequence: int
    """Of the call's span."""
    choice: int | None
    """None when it is the whole call, with all the choices it may have."""
    reason: Reason
    detail: str
    """The same for a person."""


@dataclass(slots=True)
class Report:
    """Counts, and everything that was left out. `add` sums reports of several rollouts."""

    rollouts: int = 0
    """Rollouts that were looked at."""
    calls: int = 0
    """Their recorded calls."""
    samples: int = 0
    """Samples, or conversations, that were made."""
    choices: int = 0
    """Choices that are in them."""
    tokens: int = 0
    """Sampled tokens in them."""
    starts: Counter[Start] = field(default_factory=Counter[Start])
    """Why samples begin; ideally only `first`."""
    notes: Counter[Note] = field(default_factory=Counter[Note])
    """Odd rewards."""
    pairs: int = 0
    """Pairs of conversations, when preferences were asked for."""
    unpaired: Counter[Unpaired] = field(default_factory=Counter[Unpaired])
    """Groups and conversations that are in no pair."""
    hints: list[str] = field(default_factory=list[str])
    """What would give more pairs."""
    dropped: list[Dropped] = field(default_factory=list[Dropped])
    """What is in no sample, of this report alone."""
    elsewhere: Counter[Reason] = field(default_factory=Counter[Reason])
    """How often each reason left something out in reports that were added."""

    @property
    def reasons(self) -> Counter[Reason]:
        """How often each reason left something out."""
        return self.elsewhere + Counter[Reason](one.reason for one in self.dropped)

    def drop(self, span: Span, choice: int | None, reason: Reason, detail: str) -> None:
        """Leave out a choice, or a whole call."""
        self.dropped.append(Dropped(span.rollout, span.attempt, span.sequence, choice, reason, detail))

    def add(self, other: Report) -> None:
        """Count what another report has as well. Of what it left out only the reasons are kept: a tape has no bound."""
        for count in fields(self):
            if count.name != "dropped":
                mine = getattr(self, count.name)
                mine += other.reasons if count.name == "elsewhere" else getattr(other, count.name)
                setattr(self, count.name, mine)

    def lines(self) -> list[str]:
        """For a person: one line of sums, and one for each kind of count."""
        asked = f"{counted(self.rollouts, 'rollout')}, {counted(self.calls, 'call')}"
        made = f"{counted(self.samples, 'row')} of {counted(self.choices, 'answer')}"
        counts = (("rows begin", self.starts), ("left out", self.reasons), ("rewards", self.notes))
        counts = (*counts, (f"{counted(self.pairs, 'pair')}, not in one", self.unpaired))
        return [
            f"{asked}: {made}, {counted(self.tokens, 'sampled token')}",
            *(f"{title}: " + ", ".join(f"{name} {n:,}" for name, n in c.most_common()) for title, c in counts if c),
            *self.hints,
        ]
