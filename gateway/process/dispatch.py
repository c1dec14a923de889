"""The port: every request of a client comes here and becomes a call, or is answered at once.

Control requests are handed on, and so are an agent's reports about itself below its address (rewards, events,
telemetry). Bytes that are no request, and requests that may not pass, are refused. Every other request is a
`gateway.traffic.proxy.call`.
"""

from __future__ import annotations

import logging
from time import monotonic

from penstock.gateway.api import guard
from penstock.gateway.api.front_page import front_page
from penstock.gateway.model.facts import is_rehearsal
from penstock.gateway.process.control_plane import (
    ControlPlane,
    LeaderPlane,
    agent_target,
    is_answered_locally,
    is_call_path,
    is_control,
)
from penstock.gateway.process.leader_rpc import encode_forwarded_call, needs_leader
from penstock.gateway.tools.call import McpCall
from penstock.gateway.tools.middleware import McpContext
from penstock.gateway.tools.oauth import metadata_call
from penstock.gateway.traffic.calls.address import AddressError, Tunnel, from_path, host_of
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call import HttpCall
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.proxy.rehearsed_call import RehearsedCall
from penstock.gateway.traffic.proxy.websocket.connection import HandshakeCall
from penstock.gateway.traffic.upstreams.routes import DirectHosts
from penstock.gateway.wire.dialects import family, find
from penstock.gateway.wire.dialects.family import Family
from penstock.gateway.wire.dialects.mcp import MCP
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.headers import refusal_body, refusal_head
from penstock.gateway.wire.http.request import ClientFault, HttpRequest, KnownHeads, Refusal, internal_fault

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
