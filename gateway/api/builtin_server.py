"""`/mcp/penstock`: Penstock's own MCP server, `penstock mcp serve` against this gateway, hosted like any other.

It requires the right to change things at the control API: the read key does not open it. It gets the admin key by its
environment, never from a call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

from penstock.gateway.api import guard
from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.settings import ADMIN_KEY, McpServer
from penstock.gateway.tools.bridge import Bridge
from penstock.gateway.tools.servers import HostedServerPool, ServerRegistry
from penstock.gateway.traffic.calls.admission import Auth
from penstock.gateway.wire.http.request import ClientFault

NAME: Final = "penstock"


class BuiltinServerPool(HostedServerPool):
    """The connections to Penstock's own server."""

    def __init__(self, config: McpServer, bridge: Bridge, auth: Auth) -> None:
        super().__init__(NAME, config, bridge, auth.own_keys)
        self._auth = auth

    def check(self, headers: Mapping[bytes, bytes], token: bool) -> None:
        """Raises `ClientFault` for a client that may not use the control API."""
        if token:
            raise ClientFault(403, "control", "agent tokens and keys for calls never open Penstock's own tools")
        named = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        try:
            asked = {**named, "Host": named.get("host", ""), "Origin": named.get("origin", "")}
            guard.check(asked, "/api", self._auth, needs="admin", what="Penstock's own tools")
        except guard.ApiError as error:
            raise ClientFault(error.status, "control", str(error), error.problem.field) from None


def host_builtin_server(servers: ServerRegistry, bridge: Bridge, config: GatewayConfig, auth: Auth, url: str) -> None:
    """Adds Penstock's own server, unless one of that name is configured. `url`: the gateway's URL for the server."""
    if NAME in servers.pools:
        return
    env = {"PENSTOCK_GATEWAY": url}
    if auth.admin_key is not None:
        env[ADMIN_KEY] = auth.admin_key
    if "PYTHONPATH" in os.environ:
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    command = [sys.executable, "-P", "-m", "penstock", "mcp", "serve", *(["--write"] if config.mcp.write else [])]
    own = McpServer(command=command, env=env)
    bridge.add(NAME, own)
    servers.pools[NAME] = BuiltinServerPool(own, bridge, auth)
