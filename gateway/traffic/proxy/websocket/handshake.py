"""The request that opens a WebSocket. If the server does not agree, it is a call like any other; if the server does,
only the calls on the WebSocket are recorded.

Where each message is a request that also has a form over HTTP (`Dialect.session` is False), only unchanged messages can
pass: if a body may have to change, or a call's destination depends on its model, the client is told to use plain HTTP
(426), which clients do that can speak both. A session has no other form, so it always opens: the opening chooses the
upstream, by a model that it names itself, and no release reaches its messages (`UNRELEASED`).
"""

from __future__ import annotations

from time import monotonic

from penstock.gateway.model.facts import is_rehearsal
from penstock.gateway.traffic.budgets.service import Settlement
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call import HttpCall
from penstock.gateway.traffic.proxy.call_lifecycle import CallState
from penstock.gateway.traffic.proxy.proxy_context import CallPlan, ProxyContext
from penstock.gateway.traffic.proxy.websocket.connection import WebSocketConnection
from penstock.gateway.traffic.proxy.websocket.session import SessionConnection
from penstock.gateway.traffic.proxy.websocket.websocket_call import WebSocketContext, check_passthrough
from penstock.gateway.traffic.trials.rehearsal import OVER
from penstock.gateway.wire.dialects import find
from penstock.gateway.wire.dialects.loose_json import RequestFields
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.request import ClientFault, HttpRequest
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.http.websocket import supports_extensions

_EXTENSIONS = b"sec-websocket-extensions"


class HandshakeCall(HttpCall):
    """The call that opens a WebSocket."""

    __slots__ = ("_spoken",)

    def __init__(
        self, shared: ProxyContext, client: ClientConnection, request: HttpRequest, admitted: CallRequest
    ) -> None:
        """Raises `ClientFault` if no WebSocket is possible."""
        admitted.dialect = self._spoken = find("WEBSOCKET", admitted.path.partition("?")[0])
        _check(shared, request, admitted)
        if self._spoken.session:
            # Most that the first answer may use is not known; that one is asked for is.
            admitted.peeked = RequestFields(model=admitted.model, n=1)
        super().__init__(shared, client, request, admitted)
        # It is recorded only if it fails.
        self._announced = True

    def _start(self) -> None:
        if self._shared.recorder.failing is not None:
            self._shared.check_gap(self._admitted)
        pools, _ = self._shared.route(self._admitted, self.request)
        self._carry_out(CallPlan(pools, self._admitted, self._admitted.body, self.request.headers))

    def on_switched(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bool:
        """Called when the server agrees: start the connection. False if the call has already ended."""
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
        way = WebSocketContext(self._admitted, self._spoken, self.request, pool, self.record.sent, head)
        if not self._spoken.session:
            made = WebSocketConnection(shared, self.client, connection, way)
        else:
            settle = None
            if self._spoken.undivided:
                settle = self.record.settle
                if isinstance(settle, Settlement):
                    settle.opened = True
            elif shared.budgets is not None:
                # Each answer reserves for itself.
                shared.budgets.recorded(self.record, False)
            made = SessionConnection(shared, self.client, connection, way, settle)
        connection.switch(made)
        self.client.transport.write(self.own.hide(head))
        self.client.switch(made)
        if raw:
            made.on_upstream_data(raw)
        return True


def _check(shared: ProxyContext, request: HttpRequest, admitted: CallRequest) -> None:
    """Raise `ClientFault` if no WebSocket is possible."""
    dialect, why = admitted.dialect, None
    if shared.pins.catalog.rehearses and is_rehearsal(admitted.address.rollout):
        message = "a rehearsal asks models over HTTP and does nothing else: no WebSocket is opened"
        raise ClientFault(400, OVER, message, "upgrade")
    offers = [value for low, _, value in request.headers if low == _EXTENSIONS]
    if request.method != "GET" or request.http10 or not dialect.websocket:
        why = "this path has no WebSockets here"
    elif not supports_extensions(offers):
        if dialect.session:
            # No client needs one, and frames with other extensions could not be read.
            request.headers = [header for header in request.headers if header[0] != _EXTENSIONS]
        else:
            why = "only permessage-deflate is understood of WebSocket extensions"
    if why is not None or not dialect.session:
        check_passthrough(shared, why)
    elif (name := admitted.model) is not None and name in shared.pins.catalog.models:
        message = (
            f"the versions of model {name!r} are released here, and which one a rollout has cannot be written into a "
            "session on a WebSocket: name the model as its server does"
        )
        raise ClientFault(400, "websocket", message, "model")
