"""The requests that a worker passes on to the first one, and the facts of a call that go with them.

The first one answers control requests, and calls whose state only it has: of servers of tools (their sessions, streams
and open questions), of agents in rehearsal, and of exact routes.
"""

from __future__ import annotations

import msgspec

from penstock.gateway.model.release_calls import is_rehearsal
from penstock.gateway.traffic.calls.address import CallAddress
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.calls.tunnel import Tunnel
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.wire.dialects.mcp import MCP
from penstock.gateway.wire.http.client_connection import ClientConnection


class ForwardedCall(msgspec.Struct):
    """The facts of a call that the worker which received it has found out."""

    address: CallAddress
    dialect: str
    path: str
    host: tuple[str, int] | None
    """The host that its agent has called, behind a sidecar."""
    token: bool
    key: str | None


def encode_forwarded_call(client: ClientConnection, call: CallRequest) -> bytes:
    """Return the facts of a call as a header's value."""
    host = client.tunnel.direct_pool.address if isinstance(client.tunnel, Tunnel) else None
    return msgspec.json.encode(ForwardedCall(call.address, call.dialect.name, call.path, host, call.token, call.key))


def needs_leader(shared: ProxyContext, call: CallRequest) -> bool:
    """True if only the first worker can answer a call."""
    if call.dialect.family is MCP:
        return True
    if shared.pins.catalog.rehearses and is_rehearsal(call.address.rollout):
        return True
    if not shared.exact or not call.dialect.generates:
        return False
    if call.encodings is not None:
        # Its body has not been read yet.
        return True
    route = shared.routes.find(call.model or "")
    return route is not None and route.train == "exact"
