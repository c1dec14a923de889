"""The requests that a worker passes on to the first one, and the facts of a call that go with them.

The first one answers control requests, and calls whose state only it has: of servers of tools (their sessions, streams
and open questions), of agents in rehearsal, and of exact routes.
"""

from __future__ import annotations

import msgspec

from penstock.gateway.calls.address import Address
from penstock.gateway.calls.admitted import Admitted
from penstock.gateway.calls.tunnel import Tunnel
from penstock.gateway.dialects.mcp import MCP
from penstock.gateway.http.client_connection import ClientConnection
from penstock.gateway.model.release_calls import rehearsed
from penstock.gateway.proxy.shared import Shared


class Told(msgspec.Struct):
    """The facts of a call that the worker which received it has found out."""

    address: Address
    dialect: str
    path: str
    host: tuple[str, int] | None
    """The host that its agent has called, behind a sidecar."""
    token: bool
    key: str | None


def told_of(client: ClientConnection, call: Admitted) -> bytes:
    """Return the facts of a call as a header's value."""
    host = client.tunnel.wanted.address if isinstance(client.tunnel, Tunnel) else None
    return msgspec.json.encode(Told(call.address, call.dialect.name, call.path, host, call.token, call.key))


def only_first(shared: Shared, call: Admitted) -> bool:
    """True if only the first worker can answer a call."""
    if call.dialect.family is MCP:
        return True
    if shared.pins.catalog.rehearses and rehearsed(call.address.rollout):
        return True
    if not shared.exact or not call.dialect.generates:
        return False
    if call.encodings is not None:
        # Its body has not been read yet.
        return True
    route = shared.routes.find(call.model or "")
    return route is not None and route.train == "exact"
