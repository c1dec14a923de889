"""The interface of features of exchanges with servers, such as policies and versions of definitions.

A `McpFeature` plans every exchange before it is sent to its server. It may refuse it, change the request, make it wait
for a person, and subscribe to the answer of a request: to read it (`Asking.watch`) or to change it (`Asking.change`).
Both hold wherever the answer passes: as a document, in the stream of its exchange, or in a later stream of the session.
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
    """An exchange before it is sent to its server."""

    server: ServerPool
    address: Address
    """Its rollout, attempt, agent and mode."""
    request: Request
    messages: list[Sent]
    """The client's messages, unreadable ones included; empty if it only listens."""
    record: Record
    """The record of the exchange; features may add attributes."""
    interests: Interests

    def watch(self, id: bytes, watch: Watch) -> None:
        """Has the answer to a request read after it has passed."""
        self.interests.of(id).watches.append(watch)

    def change(self, id: bytes, change: Change) -> None:
        """Has the answer to a request changed. Only for a feature that `changes` answers of this server."""
        self.interests.of(id).changes.append(change)

    def change_unasked(self, change: Change) -> None:
        """Has every other answer in this exchange changed, whatever request it answers."""
        self.interests.unasked.append(change)


class McpFeature(Protocol):
    """A feature of exchanges with servers."""

    def changes(self, server: str) -> bool:
        """True if the feature may change answers of a server: these are then requested without content encoding, and
        refused if they cannot be read."""
        ...

    def plan(self, asking: Asking, send: Send) -> asyncio.Future[None] | None:
        """Plans an exchange: may change what is sent, or raise `Refusal`. The exchange waits for the future that is
        returned: its result continues the exchange, a `Refusal` as its exception ends it. None: the exchange need not
        wait."""
        ...


@dataclass(slots=True)
class Mcp:
    """The state that all exchanges with servers share."""

    servers: Servers
    sessions: Sessions
    features: tuple[McpFeature, ...] = ()
    """In the order in which they plan an exchange."""

    def changes(self, server: str) -> bool:
        """True if a feature may change answers of a server."""
        return any(feature.changes(server) for feature in self.features)
