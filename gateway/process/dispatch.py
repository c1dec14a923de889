"""The port: every request of a client comes here and becomes a call, or is answered at once.

Control requests are handed on, and so are an agent's reports about itself below its address (rewards, events,
telemetry). Bytes that are no request, and requests that may not pass, are refused. Every other request is a
`gateway.traffic.proxy.call`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from html import escape
from pathlib import Path
from time import monotonic
from typing import Final
from urllib.parse import quote

import msgspec

from penstock.gateway.api import guard
from penstock.gateway.api.guard import HEADERS
from penstock.gateway.api.lightning import PATH as LIGHTNING
from penstock.gateway.api.lightning import LightningService
from penstock.gateway.api.lightning_server import CALLS, LightningServer
from penstock.gateway.api.lightning_server import PATH as LIGHTNING_SERVER
from penstock.gateway.api.login import PATHS as LOGIN_PATHS
from penstock.gateway.api.login import SCOPE as LOGIN_SCOPE
from penstock.gateway.api.openapi import STYLE
from penstock.gateway.api.operations import Operations
from penstock.gateway.followers.otlp.signals import BASES, is_telemetry
from penstock.gateway.followers.otlp.signals import PATHS as TELEMETRY
from penstock.gateway.model.facts import is_rehearsal
from penstock.gateway.model.stdio_frames import PATH as WRAPPED
from penstock.gateway.process.handover import short_socket_path
from penstock.gateway.process.leader_rpc import RELAY, ForwardedCall, encode_forwarded_call, needs_leader
from penstock.gateway.tape.store.directory import WRITERS
from penstock.gateway.tools.call import McpCall
from penstock.gateway.tools.middleware import McpContext
from penstock.gateway.tools.oauth import metadata_call
from penstock.gateway.traffic.calls.admission import complete_request
from penstock.gateway.traffic.calls.call_request import AddressError, CallRequest, Tunnel, from_path, host_of
from penstock.gateway.traffic.proxy.call import HttpCall
from penstock.gateway.traffic.proxy.call_lifecycle import Relay
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.proxy.rehearsed_call import RehearsedCall
from penstock.gateway.traffic.proxy.websocket.handshake import HandshakeCall
from penstock.gateway.traffic.upstreams.pool import ConnectionPool, Connector, connect_inside
from penstock.gateway.traffic.upstreams.routes import DirectHosts
from penstock.gateway.wire.dialects import by_name, family, find
from penstock.gateway.wire.dialects.family import Family
from penstock.gateway.wire.dialects.mcp import MCP
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.headers import PEER_REQUEST, control_head, frame_body, refusal_body, refusal_head
from penstock.gateway.wire.http.request import ClientFault, HttpRequest, KnownHeads, Refusal, internal_fault
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection

_log = logging.getLogger("penstock.proxy")


class Dispatch:
    """The handler of the requests that connections of clients receive."""

    def __init__(
        self,
        proxy: ProxyContext,
        control: ControlPlane,
        mcp: McpContext,
        wanted: DirectHosts,
        first: LeaderPlane | None = None,
    ) -> None:
        """`first`: the plane of the first of several workers; None in that one."""
        self.clients: set[ClientConnection] = set()
        self.request_bytes = proxy.config.limits.request_bytes
        self.epoch_ns, self.heads = proxy.epoch_ns, KnownHeads()
        self._proxy = proxy
        self.control = control
        self._first = first
        self._mcp = mcp
        self._wanted = wanted
        self.leaving = False
        """True if clients are told to send their next request on another connection."""

    def leave(self) -> None:
        """Make the next request of each client its last here. A WebSocket ends when nothing is under way."""
        self.leaving = True
        for client in list(self.clients):
            if client.switched is not None:
                client.switched.drain()

    def serve(self, client: ClientConnection, request: HttpRequest) -> None:
        """Serve a whole request: refuse it, pass it to the control plane, or begin a call."""
        began = monotonic()
        if self.leaving:
            request.keep_alive = False
        try:
            known = request.head is not None and request.head.decision is not None
            if known and request.refusal is None and client.tunnel is None:
                admitted = self._proxy.admission.admit(request, client.hints)
            else:
                found = self._look(client, request)
                if found is None:
                    return
                admitted = found
            self.run(client, request, admitted, began)
        except Refusal as refusal:
            self._refuse(client, request, refusal)
        except Exception:
            if client.served is not None:
                raise  # a call has begun: the loop closes the connection, which ends it
            _log.exception("a request could not be looked at")
            self._refuse(client, request, internal_fault())

    def _look(self, client: ClientConnection, request: HttpRequest) -> CallRequest | None:
        """Admit a request as a call, or answer it if it is none; raises `Refusal`."""
        if request.refusal is not None:
            raise request.refusal
        if request.method == "CONNECT":
            self._enter(client, request)
            return None
        if isinstance(client.tunnel, Tunnel):
            server = self._mcp.servers.find_direct(client.tunnel.direct_pool.address, request.target.decode("latin-1"))
            return self._proxy.admission.admit_tunnelled(request, client.hints, client.tunnel, server)
        if request.websocket:
            if is_control(request.target):
                raise ClientFault(426, "websocket", "this path has no WebSockets here: use plain HTTP", "upgrade")
            admitted = self._proxy.admission.admit(request, client.hints)
            if agent_target(request, admitted) is not None:
                raise ClientFault(400, "websocket", "telemetry is sent by POST: no WebSocket ends here", "upgrade")
            return admitted
        if request.target.startswith(_CLIENTS) and (target := self._client_target(client, request)) is not None:
            (self._first or self.control).serve(client, request, target)
            return None
        if is_control(request.target):
            plane = self.control if self._first is None or is_answered_locally(request.target) else self._first
            plane.serve(client, request)
            return None
        page = front_page(request)
        if page is not None:
            client.transport.write(page)
            client.finish(request.keep_alive)
            return None
        admitted = metadata_call(request, client.hints) or self._proxy.admission.admit(request, client.hints)
        target = agent_target(request, admitted)
        if target is not None:
            (self._first or self.control).serve(client, request, target)
            return None
        if request.head is not None and is_call_path(admitted.path):
            request.head.decision = admitted.decision
        return admitted

    def _client_target(self, client: ClientConnection, request: HttpRequest) -> bytes | None:
        """The control API's path for a request of Claude Code's gateway contract (`api.login`), or for telemetry of
        Agent Lightning (`api.lightning`); None for any other."""
        path, mark, query = request.target.decode("latin-1").partition("?")
        if path == _TRACES:
            try:
                return b"/agent/none/v1/traces" if self.control.lightning.admit(request) else None
            except guard.ApiError as error:
                raise ClientFault(error.status, "token", str(error), "authorization") from None
        if path not in LOGIN_PATHS:
            return None
        scope = LOGIN_SCOPE.format(scheme=self._mcp.servers.scheme, peer=quote(client.hints.peer or "-", safe=""))
        return f"{scope}{path}{mark}{query}".encode("latin-1")

    def _enter(self, client: ClientConnection, request: HttpRequest) -> None:
        """Note the agent and the host of the calls that follow on a sidecar's connection."""
        target = request.target.decode("latin-1")
        host = host_of(target) if client.tunnel is None else None
        if host is None:
            message = f"{target[:100]!r} is no HOST:PORT, or this connection is a tunnel already"
            raise ClientFault(400, "tunnel", message, "target")
        wanted = self._wanted.find(host)
        if wanted is None:
            known = self._wanted.known
            message = f"no calls go to {target} from here: add an [[upstream]] with that host (there are: {known})"
            raise ClientFault(403, "tunnel", message, "target")
        client.enter(self._proxy.admission.open_tunnel(request, wanted))

    def run(self, client: ClientConnection, request: HttpRequest, admitted: CallRequest, began: float) -> None:
        """Begin a call that may pass."""
        if self._first is not None and not request.websocket and needs_leader(self._proxy, admitted):
            self._first.forward(client, request, request.target, encode_forwarded_call(client, admitted))
            return
        proxy = self._proxy
        if request.websocket:
            call = HandshakeCall(proxy, client, request, admitted)
        elif admitted.dialect.family is MCP:
            call = McpCall(proxy, self._mcp, client, request, admitted)
        elif proxy.pins.catalog.rehearses and is_rehearsal(admitted.address.rollout):
            call = RehearsedCall(proxy, client, request, admitted)
        else:
            call = HttpCall(proxy, client, request, admitted)
        client.served = call
        call.run(began)

    def _refuse(self, client: ClientConnection, request: HttpRequest, refusal: Refusal) -> None:
        """Answer a request that does not become a call: it belongs to no rollout, or is no request at all."""
        if is_control(request.target):
            said = guard.ApiError(refusal.status, refusal.message, refusal.field)
            body = guard.refusal(said)[3]
        else:
            body = refusal_body(_spoken(request), refusal)
        head = refusal_head(refusal, len(body), request.keep_alive)
        client.transport.write(head if request.method == "HEAD" else head + body)
        if request.refusal is None:
            client.finish(request.keep_alive)
        else:
            client.linger()


def _spoken(request: HttpRequest) -> Family:
    """Return the API family of a request that has not become a call."""
    path = request.target.decode("latin-1").partition("?")[0]
    try:
        path = from_path(path)[1]
    except AddressError:
        path = path[path.find("/v1") :] if "/v1" in path else path
    return family(find("POST", path), path, request.headers)


# The control API is an aiohttp server at the other end of a socket pair. A control request passes the same parser and
# the same queue as a call, so both kinds can follow each other on a keep-alive connection. A request that changes
# something or wants a transcript is an operation and answered at once (`gateway.api.operations`). Every other goes to
# aiohttp unchanged, on a connection that nobody else uses until it is answered. Neither is recorded.
#
# With several workers (`process.workers`) the first one answers control requests, and some calls
# (`process.leader_rpc`): the others pass them on to it in the same way, by a Unix socket.

_READS = frozenset({"GET", "HEAD"})
_AGENT_PATHS = frozenset({"/rewards", "/events", WRAPPED, *TELEMETRY, *BASES})
_CLIENTS = (*(path.encode() for path in LOGIN_PATHS), b"/v1/traces")
"""Paths at which some clients send requests that are no calls."""
_OWN_PATHS = (b"/healthz", b"/readyz")
"""Paths that each of several workers answers itself."""
_LIGHTNING: Final = (LIGHTNING, LIGHTNING_SERVER)
_PATHS = (b"/api", b"/metrics", *_LIGHTNING, *_OWN_PATHS)
_TRACES: Final = "/v1/traces"


def is_control(target: bytes) -> bool:
    """True when a request target belongs to the control API."""
    if not target.startswith(_PATHS) or target.startswith(CALLS):
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

    def __init__(
        self,
        server: Callable[[], asyncio.Protocol],
        operations: Operations,
        lightning: LightningService,
        lightning_server: LightningServer,
    ) -> None:
        """`server` makes the protocols of the embedded server."""
        super().__init__("control plane")
        self._server = server
        self._operations = operations
        self.lightning = lightning
        self._lightning_server = lightning_server

    def serve(self, client: ClientConnection, request: HttpRequest, target: bytes | None = None) -> None:
        """Begin a request as `Plane.serve` does, or an operation."""
        agl = None
        if target is None and request.target.startswith(_LIGHTNING):
            agl = self.lightning if request.target.startswith(LIGHTNING) else self._lightning_server
        operations = self._operations if agl is None else agl
        found = operations.find(request.method, request.target if target is None else target)
        if found is None and agl is not None:
            agl.refuse(client, request)
        elif found is None:
            super().serve(client, request, target)
        else:
            operations.serve(client, request, *found, trusted=target is not None)

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


# Other workers connect to the first one for control requests, and for some calls (`process.leader_rpc`). The worker
# that passes a request on has checked it and knows its rollout. Only the user that runs the gateway can connect to
# the socket for these requests.

_AGENTS: Final = b"/agent/"
"""Prefix of control requests that only a dispatch can send (`agent_target`)."""


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
        dialect, wanted = find(request.method, told.path.partition("?")[0]), None
        if dialect.name != told.dialect:
            dialect = by_name(told.dialect)
        if told.host is not None and dialect.family is MCP:
            wanted: ConnectionPool | None = self._mcp.servers.find_direct(told.host, told.path)
        elif told.host is not None:
            wanted = self._wanted.find(told.host)
        return complete_request(
            request, CallRequest(told.address, dialect, told.path, b"", wanted, told.token, told.key)
        )


# The page that explains the gateway: the answer to `GET /` and `HEAD /`.
#
# A person opens the gateway's address, or an agent's base URL, in a browser, which also asks for an icon. Claude Code
# sends `HEAD /` before its first call. None of these requests goes to a provider, and none makes a rollout. The page
# shows nothing that needs a key.


def front_page(request: HttpRequest) -> bytes | None:
    """The whole answer, head and body, also below an agent's address; None for any other request."""
    if request.method not in ("GET", "HEAD"):
        return None
    try:
        path = from_path(request.target.partition(b"?")[0].decode("latin-1"))[1]
    except AddressError:
        return None
    if path == "/favicon.ico":
        return _answer(b"204 No Content", {}, b"", request)
    if path.strip("/"):
        return None
    headers = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(_PAGE))}
    return _answer(b"200 OK", headers, _PAGE, request)


def _answer(status: bytes, headers: dict[str, str], body: bytes, request: HttpRequest) -> bytes:
    close = {} if request.keep_alive else {"Connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers | HEADERS | close).items())
    return b"HTTP/1.1 %b\r\n%b\r\n%b" % (status, lines.encode("ascii"), b"" if request.method == "HEAD" else body)


_LINKS: Final = (
    ("/api/docs", "the control API: what was recorded, the queue, releases and training runs"),
    ("/healthz", "does the gateway live?"),
    ("/readyz", "does it take calls, and can it record them?"),
    ("/metrics", "figures for Prometheus"),
)
_PAGE: Final = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Penstock</title>
<link rel="icon" href="data:,"><style>{STYLE}</style></head><body>
<h1>Penstock</h1>
<p>This is a Penstock gateway. It stands between agents and their model endpoint, passes every call on as it is, and
records it.</p>
<p>To record an agent, give it this address, http:// or https:// included, as its base URL, with a name of your choice
for the rollout:</p>
<pre>OPENAI_BASE_URL=THIS-ADDRESS/rollout/r1/v1 python my_agent.py
ANTHROPIC_BASE_URL=THIS-ADDRESS/rollout/r1 python my_agent.py</pre>
<p>To see what was recorded:</p>
<pre>penstock rollouts
penstock show r1</pre>
<ul>
{"".join(f'<li><a href="{path}"><code>{path}</code></a> {escape(text)}</li>' for path, text in _LINKS)}
</ul></body></html>
""".encode()
