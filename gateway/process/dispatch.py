"""The port: every request of a client comes here and becomes a call, or is answered at once.

Control requests are handed on, and so are an agent's reports about itself below its address (rewards, events,
telemetry). Bytes that are no request, and requests that may not pass, are refused. Every other request is a
`gateway.traffic.proxy.call`.
"""

from __future__ import annotations

import logging
from html import escape
from time import monotonic
from typing import Final

import msgspec

from penstock.gateway.api import guard
from penstock.gateway.api.guard import HEADERS
from penstock.gateway.api.openapi import STYLE
from penstock.gateway.model.facts import is_rehearsal
from penstock.gateway.process.control_plane import (
    ControlPlane,
    LeaderPlane,
    agent_target,
    is_answered_locally,
    is_call_path,
    is_control,
)
from penstock.gateway.process.leader_rpc import ForwardedCall, encode_forwarded_call, needs_leader
from penstock.gateway.tools.call import McpCall
from penstock.gateway.tools.middleware import McpContext
from penstock.gateway.tools.oauth import metadata_call
from penstock.gateway.traffic.calls.address import AddressError, Tunnel, from_path, host_of
from penstock.gateway.traffic.calls.admission import complete_request
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call import HttpCall
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.proxy.rehearsed_call import RehearsedCall
from penstock.gateway.traffic.proxy.websocket.connection import HandshakeCall
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.traffic.upstreams.routes import DirectHosts
from penstock.gateway.wire.dialects import by_name, family, find
from penstock.gateway.wire.dialects.family import Family
from penstock.gateway.wire.dialects.mcp import MCP
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.headers import PEER_REQUEST, refusal_body, refusal_head
from penstock.gateway.wire.http.request import ClientFault, HttpRequest, Refusal, internal_fault
from penstock.gateway.wire.http.request_parser import KnownHeads

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
            admitted = self._proxy.admission.admit(request, client.hints)
            if agent_target(request, admitted) is not None:
                raise ClientFault(400, "websocket", "telemetry is sent by POST: no WebSocket ends here", "upgrade")
            return admitted
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


# Other workers connect to the first one for control requests, and for some calls (`process.leader_rpc`). The worker
# that passes a request on has checked it and knows its rollout. Only the user that runs the gateway can connect to
# the socket for these requests.

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
