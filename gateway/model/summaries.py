"""A rollout together with the sums of its attempts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from penstock.gateway.model.rollout import Attempt, Rollout, RolloutSummary, Totals


def summarised(rollout: Rollout, attempts: Sequence[Attempt]) -> RolloutSummary:
    """A rollout with its attempts, oldest first, and their sums."""
    return RolloutSummary(
        **dict(rollout),
        attempts=list(attempts),
        totals=reduce(add_totals, (attempt.totals for attempt in attempts), Totals()),
        last_seen_ns=last_seen_ns(rollout, attempts),
        reward=reward(attempts),
    )


def last_seen_ns(rollout: Rollout, attempts: Sequence[Attempt]) -> int:
    """The time of the rollout's last sign of life; ns since the epoch."""
    return max((attempt.last_seen_ns for attempt in attempts), default=rollout.created_ns)


def reward(attempts: Sequence[Attempt]) -> float | None:
    """The reward of the newest attempt that has one; None if none has."""
    return next((attempt.reward for attempt in reversed(attempts) if attempt.reward is not None), None)


def add_totals(a: Totals, b: Totals) -> Totals:
    """The sum of two totals, field by field."""
    return Totals(**{name: (getattr(a, name) or 0) + (getattr(b, name) or 0) for name in Totals.model_fields})
