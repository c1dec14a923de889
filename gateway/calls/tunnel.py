"""Connections of a sidecar: it takes the TLS of an agent off, and says once whose calls follow and where they go.

    CONNECT api.anthropic.com:443 HTTP/1.1
    Proxy-Authorization: Bearer pst_...         the agent token; also x-rollout-id, x-attempt-id, x-agent-id, baggage

After the gateway's `200` the agent's own bytes follow, in plain text. Nothing in them can name another rollout, reach
the control API or go to another host, so a sidecar need not look into them. They go on as they came: an agent behind a
sidecar sends its model what it would send without one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from penstock.gateway.calls.address import Address
from penstock.gateway.upstreams.pool import Pool

_AUTHORITY: Final = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


@dataclass(slots=True, frozen=True)
class Tunnel:
    """What the calls of one connection have in common."""

    address: Address | None
    """Whose they are; None where their conversation tells."""
    token: bool
    """Whether its agent token was shown."""
    wanted: Pool
    """The host that the agent has called."""
    key: str | None = None
    """Name of the key that was shown."""


def host_of(target: str) -> tuple[str, int] | None:
    """The host and the port that a CONNECT names; None where it names none."""
    found = _AUTHORITY.fullmatch(target)
    return None if found is None else (found[1].strip("[]").lower(), int(found[2]))
