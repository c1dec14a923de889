"""Serves the connections that other workers make to the first one: control requests, and some calls
(`process.leader_rpc`).

The worker that passes a request on has checked it and knows its rollout. Only the user that runs the gateway can
connect to the socket for these requests.
"""

from __future__ import annotations

from time import monotonic
from typing import Final

import msgspec

from penstock.gateway.process.dispatch import Dispatch
from penstock.gateway.process.leader_rpc import ForwardedCall
from penstock.gateway.tools.middleware import McpContext
from penstock.gateway.traffic.calls.admission import complete_request
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.traffic.upstreams.routes import DirectHosts
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.mcp import MCP
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.headers import PEER_REQUEST
from penstock.gateway.wire.http.request import HttpRequest, KnownHeads

_AGENTS: Final = b"/agent/"
"""Prefix of control requests that only a dispatch can send (`control_plane.agent_target`)."""


class PeerDispatch:
    """The counterpart of `Dispatch` for connections of other workers."""

    def __init__(self, dispatch: Dispatch, mcp: McpContext, wanted: DirectHosts) -> None:
        self._dispatch, self._mcp, self._wanted = dispatch, mcp, wanted
        self.clients = set[ClientConnection]()
        self.request_bytes = dispatch.request_bytes
        self.epoch_ns, self.heads = dispatch.epoch_ns, KnownHeads()

    def serve(self, client: ClientConnection, request: HttpRequest) -> None:
        """Serve a request that another worker has checked."""
        told = next((value for low, _, value in request.headers if low == PEER_REQUEST), None)
        if told is not None:
            request.headers = [one for one in request.headers if one[0] != PEER_REQUEST]
            self._dispatch.run(
                client, request, self._admitted(request, msgspec.json.decode(told, type=ForwardedCall)), monotonic()
            )
        elif request.target.startswith(_AGENTS):
            self._dispatch.control.serve(client, request, request.target)
        else:
            self._dispatch.serve(client, request)

    def _admitted(self, request: HttpRequest, told: ForwardedCall) -> CallRequest:
        dialect, wanted = by_name(told.dialect), None
        if told.host is not None and dialect.family is MCP:
            wanted: ConnectionPool | None = self._mcp.servers.find_direct(told.host, told.path)
        elif told.host is not None:
            wanted = self._wanted.find(told.host)
        return complete_request(
            request, CallRequest(told.address, dialect, told.path, b"", wanted, told.token, told.key)
        )
