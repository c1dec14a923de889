"""An operation on its way to the tape, what comes back from it, and why it may be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar, get_args

from penstock.gateway.model.span import Attempt, AttemptStatus, Mode, RewardSource, Rollout
from penstock.gateway.store import keys

if TYPE_CHECKING:
    from penstock.gateway.queue.operations import Work

T = TypeVar("T")

MODES: tuple[Mode, ...] = get_args(Mode)
"""Their place is their byte in the key of the queue: append, never reorder."""


def queue_key(rollout: Rollout) -> bytes:
    """Where a rollout waits."""
    return keys.queue_key(MODES.index(rollout.mode), rollout.priority, rollout.place or 0)


class Refused(Exception):
    """An operation that cannot be done; what was asked for was not written."""

    def __init__(
        self,
        kind: Literal["not_found", "conflict", "invalid"],
        message: str,
        field: str | None = None,
        value: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind, self.field, self.value = kind, field, value


class Task(Generic[T]):
    """An operation on its way to the tape; `run` may be called again when the transaction was."""

    def __init__(self, do: Callable[[Work], T]) -> None:
        self._do = do
        self.result: T | None = None
        self.refusal: Refused | None = None

    def run(self, work: Work) -> None:
        """Does it, or notes why it cannot be done."""
        self.result = self.refusal = None
        try:
            self.result = self._do(work)
        except Refused as refusal:
            self.refusal = refusal


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


class Looked(NamedTuple):
    """What was found when an attempt's time had come."""

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
