"""Reads the whole history of a release from a gateway."""

from __future__ import annotations

from typing import NamedTuple

from penstock.gateway.client.releases import ReleaseClient
from penstock.gateway.model.release import Assignment, AssignmentEvidence, AuditTrailEntry


class ReleaseHistory(NamedTuple):
    """The audit chain of a release, its assignments, and their outcomes."""

    audit: list[AuditTrailEntry]
    assigned: list[Assignment]
    seen: list[AssignmentEvidence]


async def read_history(client: ReleaseClient, release: str, after: int = 0) -> ReleaseHistory:
    """The chain, and the assignments after number `after` with their outcomes."""
    audit = await client.audit(release)
    rows = [row async for row in client.assignments(release, after)]
    return ReleaseHistory(audit, [one for one, _ in rows], [one for _, one in rows if one is not None])
