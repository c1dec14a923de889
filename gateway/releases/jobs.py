"""The jobs of the stages before the canary, each of which says whether the candidate passes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.model.release import Release


@dataclass(slots=True)
class Report:
    """What a job found."""

    ok: bool
    why: str
    """In a sentence."""
    evidence: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Progress:
    """How far a job has come."""

    doing: str
    done: int = 0
    total: int = 0


Job = Callable[[Release, Progress], Awaitable[Report]]
"""What a stage asks for before the release moves on: done when it is known whether the candidate passes."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """One for each stage before the canary."""

    check: Job
    replay: Job
    shadow: Job
