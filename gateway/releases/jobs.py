"""The jobs of the stages before the canary, each of which says whether the candidate passes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.model.release import Release


@dataclass(slots=True)
class JobReport:
    """The result of a job."""

    ok: bool
    why: str
    """The reason, in a sentence."""
    evidence: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class JobProgress:
    """The progress of a job."""

    doing: str
    done: int = 0
    total: int = 0


StageJob = Callable[[Release, JobProgress], Awaitable[JobReport]]
"""The work of a stage before the release moves on: done when it is known whether the candidate passes."""


@dataclass(frozen=True, slots=True)
class StageJobs:
    """The jobs of the stages before the canary."""

    check: StageJob
    replay: StageJob
    shadow: StageJob
