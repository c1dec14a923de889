"""What else is done with the exchanges of servers: policies, versions of definitions. Here is where it plugs in.

A `McpFeature` looks at every exchange before it goes to its server. It may refuse it, change what is sent, let it wait
for somebody, and ask for the answer to a request: to read it (`Asking.watch`) or to change it (`Asking.change`). Both
hold wherever the answer passes: as a document, in the stream of its exchange, or in a later stream of the session.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from penstock.gateway.calls.address import Address
from penstock.gateway.calls.record import Record
from penstock.gateway.dialects.mcp import Sent
from penstock.gateway.http.request import Request
from penstock.gateway.mcp.interests import Change, Interests, Watch
from penstock.gateway.mcp.servers import ServerPool, Servers
from penstock.gateway.mcp.sessions import Sessions
from penstock.gateway.proxy.parts import Send


@dataclass(slots=True)
class Asking:
    """An exchange before it goes to its server."""

    server: ServerPool
    address: Address
    """Its rollout, attempt, agent and mode."""
    request: Request
    messages: list[Sent]
    """What the client sends; empty where it only listens. One that is unreadable is among them."""
    record: Record
    """Attributes may be added."""
    interests: Interests

    def watch(self, id: bytes, watch: Watch) -> None:
        """Reads the answer to a request, after it has passed."""
        self.interests.of(id).watches.append(watch)

    def change(self, id: bytes, change: Change) -> None:
        """Changes the answer to a request. Only for a feature that `changes` answers of this server."""
        self.interests.of(id).changes.append(change)


class McpFeature(Protocol):
    """Something that is done with exchanges."""

    def changes(self, server: str) -> bool:
        """Whether it may change answers of a server: they are then asked for without content encoding, and one that
        cannot be read is refused."""
        ...

    def plan(self, asking: Asking, send: Send) -> asyncio.Future[None] | None:
        """Looks at an exchange, and changes what is sent; raises `Refusal`. What it gives is waited for: its result
        lets the exchange go on, a `Refusal` as its exception ends it."""
        ...


@dataclass(slots=True)
class Mcp:
    """What all exchanges with servers share."""

    servers: Servers
    sessions: Sessions
    features: tuple[McpFeature, ...] = ()
    """In the order in which they are asked."""

    def changes(self, server: str) -> bool:
        """Whether answers of a server may be changed."""
        return any(feature.changes(server) for feature in self.features)
