"""Reaches the control API from the port of the calls: an aiohttp server at the other end of a socket pair.

A control request passes the same parser and the same queue as a call, so both kinds can follow each other on a
keep-alive connection. A request that changes something or wants a transcript is an operation and answered at once
(`gateway.api.operations`). Every other goes to aiohttp unchanged, on a connection that nobody else uses until it is
answered. Neither is recorded.

With several workers (`process.workers`) the first one answers control requests, and some calls
(`process.leader_rpc`): the others pass them on to it in the same way, by a Unix socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penstock.gateway.api.operations import Operations
from penstock.gateway.followers.otlp.signals import BASES, is_telemetry
from penstock.gateway.followers.otlp.signals import PATHS as TELEMETRY
from penstock.gateway.model.stdio_frames import PATH as WRAPPED
from penstock.gateway.process.handover import short_socket_path
from penstock.gateway.process.leader_rpc import RELAY
from penstock.gateway.tape.store.directory import WRITERS
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call_lifecycle import Relay
from penstock.gateway.traffic.upstreams.pool import Connector, connect_inside
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.headers import control_head, frame_body
from penstock.gateway.wire.http.request import ClientFault, HttpRequest
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection

_READS = frozenset({"GET", "HEAD"})
_AGENT_PATHS = frozenset({"/rewards", "/events", WRAPPED, *TELEMETRY, *BASES})
_OWN_PATHS = (b"/healthz", b"/readyz")
"""Paths that each of several workers answers itself."""
_PATHS = (b"/api", b"/metrics", *_OWN_PATHS)


def is_control(target: bytes) -> bool:
    """True when a request target belongs to the control API."""
    if not target.startswith(_PATHS):
        return False
    path = target.partition(b"?")[0]
    return any(path == name or path.startswith(name + b"/") for name in _PATHS)


def is_answered_locally(target: bytes) -> bool:
    """True for a control request that each of several workers answers itself."""
    return target.partition(b"?")[0] in _OWN_PATHS


def is_call_path(path: str) -> bool:
    """True if requests to a path below an agent's address are calls, whatever they hold."""
    return path.partition("?")[0] not in _AGENT_PATHS


def agent_target(request: HttpRequest, call: CallRequest) -> bytes | None:
    """Return the control API's path for an agent's report about itself; None for a call. The path contains the checked
    scope, and no client can ask for such paths itself. Telemetry is no call whatever its method."""
    path = call.path.partition("?")[0]
    if path not in _AGENT_PATHS or (request.method != "POST" and path not in TELEMETRY):
        return None
    if path in BASES:
        kind = next((value for low, _, value in request.headers if low == b"content-type"), b"")
        return b"/agent/none/v1/base" if is_telemetry(kind, call.body) else None
    told = TELEMETRY.get(path)
    if call.key is not None and not call.token:
        if told is not None:
            return f"/agent/key{told}".encode()
        message = (
            f"the key {call.key!r} opens calls and nothing else; rewards, events and telemetry need an agent token"
        )
        raise ClientFault(403, "token", message, "authorization")
    address = call.address
    if address.origin == "implicit" and not (address.session and told is not None):
        return f"/agent/none{told or path}".encode() if told is not None or path == WRAPPED else None
    kind = "token" if call.token else "session" if address.session else "open"
    return f"/agent/{kind}/{address.rollout}/{address.attempt}{told or path}".encode()


class Plane(Connector):
    """Passes requests on to a server of the gateway's own."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._idle: list[UpstreamConnection] = []
        self._changed = asyncio.Event()

    def serve(self, client: ClientConnection, request: HttpRequest, target: bytes | None = None) -> None:
        """Begin a request; `target` replaces its own target if the dispatch has checked it."""
        self.forward(client, request, request.target if target is None else target)

    def forward(self, client: ClientConnection, request: HttpRequest, target: bytes, told: bytes | None = None) -> None:
        """Send a request to the server. `told`: the facts that the dispatch has found out about a call
        (`process.leader_rpc`)."""
        client.served = call = ControlCall(client, request)
        call.plane, call.target, call.forwarded_call = self, target, told
        if self._idle:
            connection = self._idle.pop()
            connection.reused = True
            call.on_connected(connection)
        else:
            call.connecting = self.connect(call)

    def put_back(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request: making one costs as much as serving one."""
        self._idle.append(connection)
        self._changed.set()

    def forget(self, connection: UpstreamConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)
        self._changed.set()

    async def finish(self, seconds: float) -> None:
        """Wait for requests that are under way, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.connections > len(self._idle):
                    self._changed.clear()
                    await self._changed.wait()


class ControlPlane(Plane):
    """The plane of the embedded server, which also begins operations."""

    def __init__(self, server: Callable[[], asyncio.Protocol], operations: Operations) -> None:
        """`server` makes the protocols of the embedded server."""
        super().__init__("control plane")
        self._server = server
        self._operations = operations

    def serve(self, client: ClientConnection, request: HttpRequest, target: bytes | None = None) -> None:
        """Begin a request as `Plane.serve` does, or an operation."""
        found = self._operations.find(request.method, request.target if target is None else target)
        if found is None:
            super().serve(client, request, target)
        else:
            self._operations.serve(client, request, *found, trusted=target is not None)

    async def open(self, connection: UpstreamConnection) -> None:
        """Connect by a socket pair."""
        await connect_inside(self._server, connection)


class LeaderPlane(Plane):
    """The plane of the first of several workers, for the others."""

    def __init__(self, data: Path) -> None:
        """`data`: the directory of the tape."""
        super().__init__("first worker")
        self._data = data

    async def open(self, connection: UpstreamConnection) -> None:
        """Connect by the first worker's socket. While its successor is being started, the request waits at that
        socket."""
        with short_socket_path(self._data, f"{WRITERS}/{RELAY}") as path:
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, path)


class ControlCall(Relay):
    """One request to the control API, or one that is passed on to the first worker."""

    __slots__ = ("forwarded_call", "plane", "target")

    plane: Plane
    target: bytes
    forwarded_call: bytes | None

    def on_client_gone(self) -> None:
        """Cancel the handler that serves the request."""
        self.cancel_upstream()

    def on_connected(self, connection: UpstreamConnection) -> None:
        head = control_head(self.request, self.target, self.forwarded_call)
        self.connecting, self.connection = None, connection
        connection.send(self, head, frame_body(self.request, self.request.body()))
        if self.held:
            connection.transport.pause_reading()

    def on_unreachable(self, reason: str, detail: str) -> None:
        """Break off: the gateway is out of file descriptors, or stopping."""
        self.connecting = None
        self.break_off()

    def on_answer(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        self._pass_on(connection, self.begin_answer(connection, head, raw))

    def on_data(self, connection: UpstreamConnection, raw: bytes) -> None:
        self._pass_on(connection, self.changed(connection, raw) if self.changes else raw)

    def _pass_on(self, connection: UpstreamConnection, out: bytes) -> None:
        connection.pieces = []
        self.client.transport.write(out)
        if connection.done:
            self.release_upstream()
            self.end_answer()

    def on_broken(self, connection: UpstreamConnection, reason: str) -> None:
        """The handler was cancelled, or the worker that was to answer has died. A read is sent again, to the worker
        that is started in its place; a change is not, because nobody knows whether it was done."""
        self.connection = None
        if connection.reused and not self.started and self.request.method in _READS:
            self.connecting = self.plane.connect(self)
        else:
            self.break_off()
