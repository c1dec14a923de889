"""The interface of features of exchanges with servers, such as policies and versions of definitions.

A `McpMiddleware` plans every exchange before it is sent to its server. It may refuse it, change the request, make it
wait for a person, and subscribe to the answer of a request: to read it (`McpRequest.observe_response`) or to change it
(`McpRequest.transform_response`). Both hold wherever the answer passes: as a document, in the stream of its exchange,
or in a later stream of the session.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from penstock.gateway.tools.servers import ServerPool, ServerRegistry
from penstock.gateway.tools.sessions import ResponseHandlers, ResponseObserver, ResponseTransform, SessionTable
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.calls.call_request import CallAddress
from penstock.gateway.traffic.proxy.proxy_context import CallPlan
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage
from penstock.gateway.wire.http.request import HttpRequest


@dataclass(slots=True)
class McpRequest:
    """An exchange before it is sent to its server."""

    server: ServerPool
    address: CallAddress
    """Its rollout, attempt, agent and mode."""
    request: HttpRequest
    messages: list[JsonRpcMessage]
    """The client's messages, unreadable ones included; empty if it only listens."""
    record: CallRecord
    """The record of the exchange; features may add attributes."""
    interests: ResponseHandlers

    def observe_response(self, id: bytes, watch: ResponseObserver) -> None:
        """Has the answer to a request read after it has passed."""
        self.interests.handler_of(id).observers.append(watch)

    def transform_response(self, id: bytes, change: ResponseTransform) -> None:
        """Has the answer to a request changed. Only for a feature that `changes` answers of this server."""
        self.interests.handler_of(id).transforms.append(change)

    def transform_other_responses(self, change: ResponseTransform) -> None:
        """Has every other answer in this exchange changed, whatever request it answers."""
        self.interests.default_transforms.append(change)


class McpMiddleware(Protocol):
    """A feature of exchanges with servers."""

    def changes(self, server: str) -> bool:
        """True if the feature may change answers of a server: these are then requested without content encoding, and
        refused if they cannot be read."""
        ...

    def plan(self, asking: McpRequest, send: CallPlan) -> asyncio.Future[None] | None:
        """Plans an exchange: may change what is sent, or raise `Refusal`. The exchange waits for the future that is
        returned: its result continues the exchange, a `Refusal` as its exception ends it. None: the exchange need not
        wait."""
        ...


@dataclass(slots=True)
class McpContext:
    """The state that all exchanges with servers share."""

    servers: ServerRegistry
    sessions: SessionTable
    features: tuple[McpMiddleware, ...] = ()
    """In the order in which they plan an exchange."""

    def changes(self, server: str) -> bool:
        """True if a feature may change answers of a server."""
        return any(feature.changes(server) for feature in self.features)
