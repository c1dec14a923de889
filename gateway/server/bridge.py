"""Reaches the control API from the port of the calls: an aiohttp server at the other end of a socket pair.

A control request passes the same parser and the same queue as a call, so both kinds can follow each other on a
keep-alive connection. A request that changes something or wants a transcript is an operation and answered at once
(`gateway.api.operations`). Every other goes to aiohttp unchanged, on a connection that nobody else uses until it is
answered. Neither is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.gateway.api.operations import Operations
from penstock.gateway.calls.admission import Admitted
from penstock.gateway.http.client_connection import ClientConnection
from penstock.gateway.http.errors import ClientFault
from penstock.gateway.http.headers import control_head, framed
from penstock.gateway.http.request import Request
from penstock.gateway.http.upstream_connection import UpstreamConnection
from penstock.gateway.model.passed import PATH as WRAPPED
from penstock.gateway.proxy.relay import Relay
from penstock.gateway.upstreams.pool import Connector, connect_inside

TRACES = "/v1/traces"
_AGENT_PATHS = frozenset({"/rewards", "/events", TRACES, WRAPPED})
_PATHS = (b"/api", b"/metrics", b"/healthz", b"/readyz")


def is_control(target: bytes) -> bool:
    """True when a request target belongs to the control API."""
    if not target.startswith(_PATHS):
        return False
    path = target.partition(b"?")[0]
    return any(path == name or path.startswith(name + b"/") for name in _PATHS)


def agent_target(method: str, call: Admitted) -> bytes | None:
    """The control API's path for what an agent says of itself; None for a call. The path contains the checked scope,
    and no client can ask for such paths itself.
    """
    path = call.path.partition("?")[0]
    if method != "POST" or path not in _AGENT_PATHS:
        return None
    if call.key is not None and not call.token:
        message = f"the key {call.key!r} opens calls and nothing else; rewards, events and traces need an agent token"
        raise ClientFault(403, "token", message, "authorization")
    if call.address.origin == "implicit":
        return b"/agent/none" + path.encode() if path in (TRACES, WRAPPED) else None
    kind = "token" if call.token else "open"
    return f"/agent/{kind}/{call.address.rollout}/{call.address.attempt}{path}".encode()


class ControlPlane(Connector):
    """Makes connections to the embedded server."""

    def __init__(self, server: Callable[[], asyncio.Protocol], operations: Operations) -> None:
        """`server` makes its protocols."""
        super().__init__("control plane")
        self._server = server
        self._operations = operations
        self._idle: list[UpstreamConnection] = []

    def serve(self, client: ClientConnection, request: Request, target: bytes | None = None) -> None:
        """Begins a request; `target` replaces its own target if the dispatch has checked it."""
        found = self._operations.find(request.method, request.target if target is None else target)
        if found is not None:
            self._operations.serve(client, request, *found, trusted=target is not None)
            return
        client.served = call = ControlCall(client, request)
        call.target = request.target if target is None else target
        if self._idle:
            connection = self._idle.pop()
            connection.reused = True
            call.on_connected(connection)
        else:
            call.connecting = self.connect(call)

    def put_back(self, connection: UpstreamConnection) -> None:
        """Keeps a connection for the next request: making one costs as much as serving one."""
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """The connection is gone."""
        if connection in self._idle:
            self._idle.remove(connection)

    async def open(self, connection: UpstreamConnection) -> None:
        """Connects by a socket pair."""
        await connect_inside(self._server, connection)


class ControlCall(Relay):
    """One request of the control plane."""

    __slots__ = ("target",)

    target: bytes

    def on_client_gone(self) -> None:
        """Cancels the handler."""
        self.cancel_upstream()

    def on_connected(self, connection: UpstreamConnection) -> None:
        """Sends the request."""
        self.send(connection, control_head(self.request, self.target), framed(self.request, self.request.body()))

    def on_unreachable(self, reason: str, detail: str) -> None:
        """Out of file descriptors, or stopping."""
        self.connecting = None
        self.break_off()

    def on_answer(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Passes on the head."""
        self._pass_on(connection, self.begin_answer(connection, head, raw))

    def on_data(self, connection: UpstreamConnection, raw: bytes) -> None:
        """Passes on a read."""
        self._pass_on(connection, self.continue_answer(connection, raw))

    def _pass_on(self, connection: UpstreamConnection, out: bytes) -> None:
        connection.pieces = []
        self.client.transport.write(out)
        if connection.done:
            self.release_upstream()
            self.end_answer()

    def on_broken(self, connection: UpstreamConnection, reason: str) -> None:
        """The handler was cancelled."""
        self.connection = None
        self.break_off()
