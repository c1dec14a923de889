"""What operations on the queue return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, get_args

from penstock.gateway.model.base import Mode
from penstock.gateway.model.rollout import Attempt, AttemptStatus, RewardSource, Rollout
from penstock.gateway.store import keys

MODES: tuple[Mode, ...] = get_args(Mode)
"""Their place is their byte in the key of the queue: append, never reorder."""


def queue_key(rollout: Rollout) -> bytes:
    """Where a rollout waits."""
    return keys.queue_key(MODES.index(rollout.mode), rollout.priority, rollout.place or 0)


@dataclass(slots=True)
class Claimed:
    """An attempt that was handed out."""

    rollout: Rollout
    attempt: Attempt


@dataclass(slots=True)
class Finished:
    """An attempt that has ended."""

    rollout: Rollout
    attempt: Attempt
    ended: AttemptStatus | None
    """How it ended; None when it had ended before."""
    rewarded: list[RewardSource]
    """Sources of the rewards that were kept."""
    by: str | None = None
    """The worker that has finished it by this."""


class Looked(NamedTuple):
    """What was found when an attempt's deadline had come."""

    rollout: str
    attempt: str
    again_ns: int | None
    """When to look again; None when there is nothing more to see."""
    requeued: Mode | None = None
    """Set when its rollout waits for another attempt now."""
    ended: AttemptStatus | None = None
    """How it has ended now."""
    rewarded: RewardSource | None = None
    """Source of the reward that its end has brought."""
    unclaimed: bool = False
    """Whether it lives and nobody has claimed it."""
