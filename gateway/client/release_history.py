"""Reads the whole history of a release from a gateway."""

from __future__ import annotations

from typing import NamedTuple

from penstock.gateway.client.releases import ReleaseClient
from penstock.gateway.model.release import Assignment, Entry, Seen


class Recorded(NamedTuple):
    """The audit chain of a release, its assignments, and their outcomes."""

    audit: list[Entry]
    assigned: list[Assignment]
    seen: list[Seen]


async def read_history(client: ReleaseClient, release: str, after: int = 0) -> Recorded:
    """The chain, and the assignments after number `after` with their outcomes."""
    audit = await client.audit(release)
    rows = [row async for row in client.assignments(release, after)]
    return Recorded(audit, [one for one, _ in rows], [one for _, one in rows if one is not None])
