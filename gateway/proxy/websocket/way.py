"""What the calls on a WebSocket have in common, and whether there may be any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.gateway.calls.admitted import Admitted
from penstock.gateway.dialects.base import Dialect
from penstock.gateway.http.client_connection import ClientConnection
from penstock.gateway.http.errors import ClientFault, Refusal
from penstock.gateway.http.request import Request
from penstock.gateway.http.upstream_connection import Headers
from penstock.gateway.proxy.shared import Shared
from penstock.gateway.upstreams.pool import Pool


@dataclass(frozen=True, slots=True)
class Way:
    """From a client to an upstream."""

    admitted: Admitted
    """Its opening."""
    dialect: Dialect
    """What is spoken on it."""
    request: Request
    pool: Pool
    sent: list[bytes]
    """Header lines of the opening, as in `Record.sent`."""
    headers: Headers
    """Of the answer to it."""


class Carrier(Protocol):
    """An open WebSocket, as a call on it sees it."""

    way: Way
    client: ClientConnection

    touched: float
    """When anything was last heard from the upstream; monotonic seconds."""

    @property
    def held(self) -> bool:
        """Whether nothing is read from the upstream for now."""
        ...

    def send(self) -> None:
        """The request that waits may pass."""
        ...

    def kept(self, passes: bool) -> None:
        """The tape has an answer that has waited for it. `passes`: whether its end may go to the client."""
        ...

    def refusal(self, refusal: Refusal, call: object) -> bytes:
        """What the client is told of a refusal, in the lane of the call."""
        ...

    def refuse(self, refusal: Refusal, said: bytes, sent: bool) -> None:
        """Tells it. The connection goes on, but where the request was sent, or none may pass any more."""
        ...

    def drain(self) -> None:
        """Ends as soon as nothing is under way."""
        ...


def check_passing(shared: Shared, why: str | None = None) -> None:
    """Raises `ClientFault` where calls cannot pass as they are. `why`: another reason for that."""
    if why is None and not shared.pins.catalog.empty:
        why = "prompts or weights are released here, which requests may have to be changed for"
    elif why is None and shared.routes:
        why = "routes here go by the model of each request"
    if why is not None:
        raise ClientFault(426, "websocket", f"{why}: use plain HTTP, which streams events", "upgrade")
