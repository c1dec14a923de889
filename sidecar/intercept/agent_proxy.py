"""The proxy that an agent has in its environment: listens, and knows the rollout of its connections. `visit` handles
each connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from penstock.sidecar.intercept.agent_connection import (
    AgentConnection,
    ConnectionRecord,
    ProxyState,
    UnixSocketConnection,
)
from penstock.sidecar.intercept.certificate_store import CertificateStore
from penstock.sidecar.intercept.egress import EgressConnector, ProxyTimeouts, RolloutBinding
from penstock.sidecar.intercept.dns_addresses import DnsTable, NameServer
from penstock.sidecar.intercept.namespace import BACKLOG
from penstock.sidecar.intercept.rules import InterceptPolicy
from penstock.sidecar.intercept.transparent_connection import TransparentListener, listen_sockets


class AgentProxy:
    """The proxy of one agent."""

    def __init__(
        self,
        gateway: str,
        policy: InterceptPolicy,
        authority: CertificateStore,
        on_passed: Callable[[ConnectionRecord], None],
        limits: ProxyTimeouts | None = None,
        ours: set[int] | None = None,
    ) -> None:
        """`gateway`: its URL. `on_closed`: called with each connection that is closed. `ours`: ports of this machine
        that no agent may reach through a front.
        """
        limits = limits or ProxyTimeouts()
        self.authority = authority
        self._ways = EgressConnector(gateway, limits, set() if ours is None else ours)
        self._setting = ProxyState(policy, authority, self._ways, limits, on_passed)
        self._servers: list[asyncio.Server | asyncio.DatagramTransport | TransparentListener] = []

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen as a proxy; return the port."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: AgentConnection(self._setting), host, port, backlog=BACKLOG)
        self._servers.append(server)
        port = server.sockets[0].getsockname()[1]
        self._ways.reserved_ports.add(port)
        return port

    def start_redirected(self, port: int = 0) -> int:
        """Listen for connections that the kernel redirects here; return the port."""
        sockets = listen_sockets(port)
        self._servers.append(TransparentListener(self._setting, sockets))
        port = sockets[0].getsockname()[1]
        self._ways.reserved_ports.add(port)
        return port

    async def start_in_namespace(self, sockets: list[socket.socket]) -> None:
        """Listen in the network of an agent: on the first socket for DNS, on the others for connections."""
        names = DnsTable()
        first, *others = sockets
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: NameServer(names), sock=first)
        self._servers += [transport, TransparentListener(self._setting, others, names)]

    async def start_socket(self, path: Path, host: str) -> None:
        """Listen on a Unix socket too, for calls of one host without TLS."""
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: UnixSocketConnection(self._setting, host), path, backlog=BACKLOG)
        self._servers.append(server)
        await asyncio.to_thread(path.chmod, 0o600)

    @property
    def redirect_loop(self) -> str | None:
        """The reason why our own connections are redirected back to us; None when they are not."""
        return self._setting.redirect_loop

    def bind(self, binding: RolloutBinding) -> None:
        """Let calls pass from now on, as those of this rollout."""
        self._ways.bind(binding)

    async def release(self) -> None:
        """End the rollout: close its open connections; calls wait for the next rollout."""
        self._ways.bind(None)
        visits = list(self._setting.connections)
        for visit in visits:
            visit.abort()
        for visit in visits:
            await visit.closed.wait()

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        for server in self._servers:
            server.close()
        await self.release()
