"""The data that all calls on a WebSocket share, and the check whether WebSockets are possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.request import ClientFault, HttpRequest, Refusal


@dataclass(frozen=True, slots=True)
class WebSocketContext:
    """The connection of a client to an upstream."""

    admitted: CallRequest
    """The request that opened the WebSocket."""
    dialect: Dialect
    """The dialect of its messages."""
    request: HttpRequest
    pool: ConnectionPool
    sent: bytes
    """The head of the opening, as in `CallRecord.sent`."""
    head: bytes
    """The head of the answer to the opening."""


class WebSocketChannel(Protocol):
    """An open WebSocket, as a call on it sees it."""

    context: WebSocketContext
    client: ClientConnection

    touched: float
    """When the upstream last sent anything; monotonic seconds."""

    @property
    def held(self) -> bool:
        """True while nothing is read from the upstream."""
        ...

    def send(self) -> None:
        """Send the held request of the client to the upstream."""
        ...

    def on_recorded(self, passes: bool) -> None:
        """Called when the tape has an answer that waited for it. `passes`: whether its end may go to the client."""
        ...

    def refusal(self, refusal: Refusal, call: object) -> bytes:
        """Return the message of a refusal for the client, in the lane of the call."""
        ...

    def refuse(self, refusal: Refusal, said: bytes, sent: bool) -> None:
        """Send the client a refusal. The connection goes on, unless the request was sent or none may pass any more."""
        ...

    def drain(self) -> None:
        """End the connection as soon as nothing is under way."""
        ...


def check_passthrough(shared: ProxyContext, why: str | None = None) -> None:
    """Raise `ClientFault` if calls cannot pass unchanged. `why`: another reason to refuse."""
    if why is None and not shared.pins.catalog.empty:
        why = "prompts or weights are released here, which requests may have to be changed for"
    elif why is None and shared.routes:
        why = "routes here go by the model of each request"
    if why is not None:
        raise ClientFault(426, "websocket", f"{why}: use plain HTTP, which streams events", "upgrade")
