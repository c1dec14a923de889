"""Results of the operations on the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, get_args

from penstock.gateway.model.base import Mode
from penstock.gateway.model.rollout import Attempt, AttemptStatus, RewardSource, Rollout
from penstock.gateway.tape.store import keys

MODES: tuple[Mode, ...] = get_args(Mode)
"""The index of a mode is its byte in the queue's keys: append, never reorder."""


def queue_key(rollout: Rollout) -> bytes:
    """The key of a rollout in the database `queue`."""
    return keys.queue_key(MODES.index(rollout.mode), rollout.priority, rollout.place or 0)


@dataclass(slots=True)
class ClaimedAttempt:
    """An attempt that was handed out."""

    rollout: Rollout
    attempt: Attempt


@dataclass(slots=True)
class FinishResult:
    """An attempt that has ended."""

    rollout: Rollout
    attempt: Attempt
    ended: AttemptStatus | None
    """The state in which it ended; None when it had ended before."""
    rewarded: list[RewardSource]
    """Sources of the rewards that were kept."""
    by: str | None = None
    """The worker that finished it by this request; None if none did."""


class DeadlineCheck(NamedTuple):
    """The result of a check of an attempt at its deadline."""

    rollout: str
    attempt: str
    again_ns: int | None
    """The time of the next check; None when none is needed."""
    requeued: Mode | None = None
    """The mode of its rollout, if that waits for another attempt now."""
    ended: AttemptStatus | None = None
    """The state in which the check has ended it."""
    rewarded: RewardSource | None = None
    """Source of the reward that its end has brought."""
    unclaimed: bool = False
    """True if it lives and nobody has claimed it."""
