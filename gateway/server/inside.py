"""Serves the connections that other workers make to the first one: control requests, and some calls (`server.passing`).

The worker that passes a request on has checked it and knows its rollout. Only the user that runs the gateway can
connect to the socket for these requests.
"""

from __future__ import annotations

from time import monotonic
from typing import Final

import msgspec

from penstock.gateway.calls.admission import checked
from penstock.gateway.calls.admitted import Admitted
from penstock.gateway.dialects import by_name
from penstock.gateway.dialects.mcp import MCP
from penstock.gateway.http.client_connection import ClientConnection
from penstock.gateway.http.headers import TOLD
from penstock.gateway.http.request import Request
from penstock.gateway.mcp.features import Mcp
from penstock.gateway.server.dispatch import Dispatch
from penstock.gateway.server.passing import Told
from penstock.gateway.upstreams.pool import Pool
from penstock.gateway.upstreams.wanted import WantedHosts

_AGENTS: Final = b"/agent/"
"""Prefix of control requests that only a dispatch can send (`bridge.agent_target`)."""


class Inside:
    """The counterpart of `Dispatch` for connections of other workers."""

    def __init__(self, dispatch: Dispatch, mcp: Mcp, wanted: WantedHosts) -> None:
        self._dispatch, self._mcp, self._wanted = dispatch, mcp, wanted
        self.clients = set[ClientConnection]()
        self.request_bytes = dispatch.request_bytes
        self.epoch_ns = dispatch.epoch_ns

    def serve(self, client: ClientConnection, request: Request) -> None:
        """Serve a request that another worker has checked."""
        told = next((value for low, _, value in request.headers if low == TOLD), None)
        if told is not None:
            request.headers = [one for one in request.headers if one[0] != TOLD]
            self._dispatch.run(
                client, request, self._admitted(request, msgspec.json.decode(told, type=Told)), monotonic()
            )
        elif request.target.startswith(_AGENTS):
            self._dispatch.control.serve(client, request, request.target)
        else:
            self._dispatch.serve(client, request)

    def _admitted(self, request: Request, told: Told) -> Admitted:
        dialect, wanted = by_name(told.dialect), None
        if told.host is not None and dialect.family is MCP:
            wanted: Pool | None = self._mcp.servers.wanted(told.host, told.path)
        elif told.host is not None:
            wanted = self._wanted.find(told.host)
        return checked(request, Admitted(told.address, dialect, told.path, b"", wanted, told.token, told.key))
