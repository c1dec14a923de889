"""Classifies the rollouts of a step that teach nothing. Pure.

A rollout has one reason: the first that applies of

    late, cancelled    it had not ended when the step's time was over, or somebody cancelled it
    failed             its agent failed or ran out of time
    no_calls           its agent made no call to a model through the gateway
    REASON             it has no sample; the reason of `penstock doctor` that most of its calls have

Rollouts that have a sample and no other reason have none. Rollouts that credit assignment leaves out later are counted
by `learn`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.adapters.episode import Episode
from penstock.adapters.report import SampleReport
from penstock.adapters.samples import Sample
from penstock.gateway.model.rollout import RolloutStatus


class ExampleRollout(NamedTuple):
    """A rollout that stands for all with the same reason."""

    rollout: str
    """Rollout id."""
    detail: str
    """The tape's words about it; empty if there are none."""


@dataclass(slots=True)
class RolloutOutcomes:
    """The reasons why rollouts of a step teach nothing."""

    lost: Counter[str] = field(default_factory=Counter[str])
    """Number of rollouts by reason."""
    examples: dict[str, ExampleRollout] = field(default_factory=dict[str, ExampleRollout])
    """First rollout by reason."""
    truncated: int = 0
    """Rollouts with a sample in which the model was cut off at the limit of tokens."""

    def record(self, episode: Episode, made: Sequence[Sample], report: SampleReport) -> None:
        """Add a rollout with its samples and the report of its calls that are in no sample."""
        self.truncated += any(segment.truncated for sample in made for segment in sample.segments)
        found = untrainable_reason(episode, made, report)
        if found is not None:
            reason, detail = found
            self.lost[reason] += 1
            self.examples.setdefault(reason, ExampleRollout(episode.rollout.id, detail))

    def add(self, other: RolloutOutcomes) -> None:
        self.lost += other.lost
        self.examples = other.examples | self.examples
        self.truncated += other.truncated


def untrainable_reason(episode: Episode, made: Sequence[Sample], report: SampleReport) -> tuple[str, str] | None:
    """Return why a rollout teaches nothing, as a reason and in words; None while no reason is known."""
    rollout = episode.rollout
    ends = [one.outcome.reason for one in rollout.attempts if one.outcome is not None and one.outcome.reason]
    if rollout.status == RolloutStatus.CANCELLED:
        return "cancelled", ends[-1] if ends else ""
    if rollout.status == RolloutStatus.FAILED:
        return "failed", ends[-1] if ends else str(rollout.attempts[-1].status) if rollout.attempts else ""
    if made:
        return None
    if not any(one.calls for one in episode.attempts):
        return "no_calls", ""
    reason = max(report.reasons, key=lambda name: report.reasons[name], default=None)
    return None if reason is None else (reason, next(one.detail for one in report.dropped if one.reason == reason))
