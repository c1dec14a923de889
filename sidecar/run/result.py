"""The result of an attempt, as a runner reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from penstock.gateway.model.rollout import Outcome

AT_ONCE_S = 10.0
"""The longest time of a failure at once; a later one comes from the work. Imports on a busy machine may take seconds;
s.
"""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The result of an attempt, for the tally."""

    rollout: str
    """Rollout id."""
    attempt: str
    """Attempt id."""
    worker: str
    """The worker that held it."""
    end: Literal["succeeded", "failed", "timeout", "lost", "returned", "environment"]
    """Its end, as this runner saw it."""
    seconds: float
    """Time from claim to end; s."""
    reward: float | None = None
    """Its reward; None without one."""
    reason: str | None = None
    """The reason of its end; None when there is none."""
    outcome: Outcome | None = None
    """The outcome that the gateway got; None when the attempt was lost or returned."""
    calls: int = 0
    """Model calls of the attempt at the gateway."""
    last_lines: tuple[str, ...] = ()
    """The last lines that the agent printed."""

    @property
    def name(self) -> str:
        """The attempt as `ROLLOUT/ATTEMPT`, for messages to people."""
        return f"{self.rollout}/{self.attempt}"

    @property
    def at_once(self) -> bool:
        """True if it failed before it did anything: soon, and without a model call."""
        took = 0 if self.outcome is None else self.outcome.duration_ns or 0
        return self.end == "failed" and not self.calls and took < AT_ONCE_S * 1e9
