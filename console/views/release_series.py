"""The evidence of a release over time: computed again from the tape, as decisions are. Pure.

The same observations step the same `Canary` as in `gateway.releases.canary.verification`, and its figures are taken on
the way. So the charts show the evidence that decisions were made from, and nothing has to be stored to draw them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.gateway.model.release import Assignment, AssignmentEvidence, AuditTrailEntry, Release
from penstock.gateway.releases.canary.decision import Canary, figures, replay_steps
from penstock.gateway.releases.canary.display import interval
from penstock.gateway.releases.canary.outcomes import as_of

MOST = 300
"""Maximum number of points of a series: more cannot be told apart on a page."""


class History(NamedTuple):
    """The audit chain, assignments and outcomes of a release at a certain revision and count."""

    audit: Sequence[AuditTrailEntry]
    assigned: Sequence[Assignment]
    seen: Sequence[AssignmentEvidence]

    @classmethod
    def of(
        cls,
        release: Release,
        audit: Sequence[AuditTrailEntry],
        assigned: Sequence[Assignment],
        seen: Sequence[AssignmentEvidence],
        after: int = 0,
    ) -> History:
        """The part that belongs to this state of the release, if more has been read: each list only ever grows.
        `after`: number of the assignment behind which `assigned` and `seen` begin."""
        until, counted = max(0, release.assigned - after), max(0, release.counted - after)
        return cls(audit[: release.revision], as_of(release, assigned[:until]), seen[:counted])


class EvidencePoint(NamedTuple):
    """The evidence after some rollouts."""

    counted: int
    """Number of the assignment that was counted last."""
    figures: dict[str, float]
    """The figures that decisions read, by name."""
    interval: tuple[float, float] | None
    """Confidence sequence of candidate less stable."""


def series(release: Release, history: History, most: int = MOST) -> list[EvidencePoint]:
    """The evidence over time, evenly thinned to about `most` points; the last one is always included."""
    canary, points = Canary.of(release), list[EvidencePoint]()
    every = max(1, -(-len(history.seen) // most))
    looks = sum(one.early is not None for one in history.assigned)
    last = 0
    for number, early, _, person in replay_steps(canary, history.assigned, history.seen, history.audit):
        ended = (number, early) == (len(history.seen), looks)
        if not person and (ended or (number > last and number % every == 0)):
            evidence, last = canary.evidence, number
            points.append(EvidencePoint(number, figures(evidence), interval(evidence.latest.reward)))
    return points
