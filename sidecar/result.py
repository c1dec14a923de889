"""How an attempt went, as a runner reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.gateway.model.rollout import Outcome

AT_ONCE_S = 10.0
"""A failure that took longer comes from the work. Imports on a busy machine may take some seconds; s."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an attempt, for the tally."""

    rollout: str
    """The rollout."""
    attempt: str
    """The attempt."""
    worker: str
    """Who has held it."""
    end: Literal["succeeded", "failed", "timeout", "lost", "returned", "environment"]
    """How it ended here."""
    seconds: float
    """From claim to end."""
    reward: float | None = None
    """Its reward, if it has one."""
    reason: str | None = None
    """Why it ended like this."""
    outcome: Outcome | None = None
    """What the gateway was told of its end."""
    calls: int = 0
    """Model calls that the gateway has seen of it."""
    last_lines: tuple[str, ...] = ()
    """What it said at last."""

    @property
    def name(self) -> str:
        """ROLLOUT/ATTEMPT."""
        return f"{self.rollout}/{self.attempt}"

    @property
    def at_once(self) -> bool:
        """Whether it failed before it had done anything."""
        took = 0 if self.outcome is None else self.outcome.duration_ns or 0
        return self.end == "failed" and not self.calls and took < AT_ONCE_S * 1e9
