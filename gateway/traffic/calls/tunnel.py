"""Connections of a sidecar, which ends an agent's TLS, and names once the rollout and the host of the calls that
follow.

    CONNECT api.anthropic.com:443 HTTP/1.1
    Proxy-Authorization: Bearer pst_...         the agent token; also x-rollout-id, x-attempt-id, x-agent-id, baggage

After the gateway's `200` the agent's own bytes follow, in plain text. Nothing in them can name another rollout, reach
the control API or go to another host, so a sidecar need not look into them. They are forwarded unchanged: an agent
behind a sidecar sends its model the same bytes as without one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from penstock.gateway.traffic.calls.address import CallAddress
from penstock.gateway.traffic.upstreams.pool import ConnectionPool

_AUTHORITY: Final = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


@dataclass(slots=True, frozen=True)
class Tunnel:
    """The data that all calls of one connection share."""

    address: CallAddress | None
    """Address of the calls; None if their conversation decides."""
    token: bool
    """True if its agent token was presented."""
    direct_pool: ConnectionPool
    """The host that the agent has called."""
    key: str | None = None
    """Name of the key that was presented."""


def host_of(target: str) -> tuple[str, int] | None:
    """The host and the port of a CONNECT target; None if it names none."""
    found = _AUTHORITY.fullmatch(target)
    return None if found is None else (found[1].strip("[]").lower(), int(found[2]))
