"""The request that opens a WebSocket. If the server does not agree, it is a call like any other; if the server does,
only the calls on the WebSocket are recorded.

Only unchanged messages can pass on a WebSocket. If a body may have to change, or a call's destination depends on its
model, the client is told to use plain HTTP (426), which clients do that can speak both.
"""

from __future__ import annotations

from time import monotonic

from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call import HttpCall
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.proxy.state import CallState
from penstock.gateway.traffic.proxy.websocket.connection import WebSocketConnection
from penstock.gateway.traffic.proxy.websocket.websocket_context import WebSocketContext, check_passthrough
from penstock.gateway.wire.dialects import find
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.request import HttpRequest
from penstock.gateway.wire.http.upstream_connection import Headers, UpstreamConnection
from penstock.gateway.wire.http.websocket import supports_extensions


class HandshakeCall(HttpCall):
    """The call that opens a WebSocket."""

    __slots__ = ("_spoken",)

    def __init__(
        self, shared: ProxyContext, client: ClientConnection, request: HttpRequest, admitted: CallRequest
    ) -> None:
        """Raises `ClientFault` if no WebSocket is possible."""
        admitted.dialect = self._spoken = _dialect(shared, request, admitted)
        super().__init__(shared, client, request, admitted)
        # It is recorded only if it fails.
        self._announced = True

    def on_switched(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bool:
        """Called when the server agrees: start the `WebSocketConnection`. False if the call has already ended."""
        shared, pool, now = self._shared, self.record.pool, self.state is CallState.SENT
        assert pool is not None
        if not now:
            return False
        pool.health.answered(monotonic())
        del shared.running[self]
        shared.metrics.inflight_calls -= 1
        self._move(CallState.ENDING)
        self._move(CallState.ENDED)
        self.connection = None
        way = WebSocketContext(self._admitted, self._spoken, self.request, pool, self.record.sent, _headers(head))
        made = WebSocketConnection(shared, self.client, connection, way)
        connection.switch(made)
        self.client.transport.write(self.own.hide(head))
        self.client.switch(made)
        if raw:
            made.on_upstream_data(raw)
        return True


def _dialect(shared: ProxyContext, request: HttpRequest, admitted: CallRequest) -> Dialect:
    """The dialect of its messages; raises `ClientFault` if no WebSocket is possible."""
    dialect, why = find("POST", admitted.path.partition("?")[0]), None
    offers = [value for low, _, value in request.headers if low == b"sec-websocket-extensions"]
    if request.method != "GET" or request.http10 or not dialect.websocket:
        why = "this path has no WebSockets here"
    elif not supports_extensions(offers):
        why = "only permessage-deflate is understood of WebSocket extensions"
    check_passthrough(shared, why)
    return dialect


def _headers(head: bytes) -> Headers:
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:-2])
    return [(name, value.strip()) for name, _, value in lines]
