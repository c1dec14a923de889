"""Records the lists of servers, and holds them to their approved versions. The versions are in `tools.definitions`.

With `warn` an answer passes unchanged and is read afterwards. With `hold` an answer is read before it passes: a changed
definition is replaced by its approved version, a new one is left out. With `deny` a list that differs is refused, and
so are calls of changed definitions. An answer that cannot be read is then refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from penstock.gateway.model.definitions import DefinitionKind
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.tools.definitions.list_answer import (
    LISTS,
    DefinitionChange,
    UnreadableMessage,
    cursor_of,
    method_of_answer,
    requested_name,
)
from penstock.gateway.tools.definitions.operations import AttemptRef, describe_changes
from penstock.gateway.tools.definitions.service import DefinitionService, ListRequest
from penstock.gateway.tools.middleware import McpRequest
from penstock.gateway.tools.response_handlers import TransformResult
from penstock.gateway.traffic.proxy.call_filter import CallPlan
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage
from penstock.gateway.wire.http.errors import ClientFault, UpstreamFault

HELD: Final = "penstock.mcp.held"
"""Attribute of a span: the definitions that were replaced by their approved versions, or left out."""
_USES: Final[dict[str, DefinitionKind]] = {
    "tools/call": "tools",
    "prompts/get": "prompts",
    "resources/read": "resources",
}
"""Requests that use a listed definition."""
_ANY_PAGE: Final = "\0"
"""A cursor that matches no request."""
_REFUSED: Final = 200
"""Status of a refusal: the exchange itself is in order, and clients look for the error of JSON-RPC in its body."""


class DefinitionMiddleware:
    """The feature that records lists, and holds or denies changed definitions."""

    def __init__(self, definitions: DefinitionService, metrics: Metrics) -> None:
        self._definitions, self._metrics = definitions, metrics

    def changes(self, server: str) -> bool:
        """True if the server's changes are held or denied."""
        return self._definitions.enforces_approval(server)

    def plan(self, asking: McpRequest, send: CallPlan) -> asyncio.Future[None] | None:
        """Watches or changes the answers to list requests; raises `ClientFault` for a call of a denied definition."""
        server, address = asking.server.name, asking.address
        whose = AttemptRef(address.rollout, address.attempt, address.origin, address.mode)
        denies = self._definitions.on_change.get(server) == "deny"
        if self._definitions.enforces_approval(server):
            asking.transform_other_responses(partial(self._unasked, server, whose))
        for one in asking.messages:
            if one.kind == "request" and one.method in LISTS:
                exchange = ListRequest(server, one.method, cursor_of(one.raw), whose)
                if self._definitions.enforces_approval(server):
                    asking.transform_response(one.id, partial(self._held, exchange))
                else:
                    asking.observe_response(one.id, partial(self._definitions.observe, exchange))
            elif denies and (one.method in _USES or one.kind == "unreadable"):
                self._check(server, one)
        return None

    def _unasked(self, server: str, whose: AttemptRef, answer: bytes) -> bytes | TransformResult:
        """Holds a list in an answer whose request is unknown."""
        method = method_of_answer(answer)
        return answer if method is None else self._held(ListRequest(server, method, _ANY_PAGE, whose), answer)

    def _held(self, exchange: ListRequest, answer: bytes) -> bytes | TransformResult:
        server, on_change = exchange.server, self._definitions.on_change[exchange.server]
        try:
            found = self._definitions.approved_answer(exchange, answer)
        except UnreadableMessage as error:
            said = f"server {server!r}: its answer to {exchange.method} cannot be read and is not passed on"
            why = f'mcp.servers.{server}.on_change = "{on_change}"'
            raise UpstreamFault(502, "unreadable", f"{said} ({why}): {error}") from None
        if found is None or not found.changes:
            return answer
        if on_change == "deny":
            raise self._denied(server, exchange.kind, found.changes)
        self._metrics.mcp_definitions[(server, "held")] += 1
        return TransformResult(found.answer, {HELD: describe_changes(found.changes) or "instructions"})

    def _check(self, server: str, one: JsonRpcMessage) -> None:
        """Raises `ClientFault` for a call of a changed definition."""
        try:
            name = requested_name(one.method, one.raw)
        except UnreadableMessage as error:
            said = f"server {server!r} is asked for something that cannot be read, so it may be what is denied"
            raise ClientFault(400, "unreadable", f"{said}: {error}") from None
        kind = _USES.get(one.method)
        change = None if kind is None or name is None else self._definitions.difference(server, kind, name)
        if kind is not None and change is not None:
            raise self._denied(server, kind, [change])

    def _denied(self, server: str, kind: DefinitionKind, changes: Sequence[DefinitionChange]) -> ClientFault:
        self._metrics.mcp_definitions[(server, "denied")] += 1
        what = "its instructions" if kind == "instructions" else f"{kind} that it lists"
        which = "" if kind == "instructions" else f" ({describe_changes(list(changes))})"
        why = f'mcp.servers.{server}.on_change = "deny"'
        message = (
            f"server {server!r}: {what} are not as they were approved{which}, and {why}; "
            f"see `penstock mcp definitions {server} --diff`, then `penstock mcp approve {server}`"
        )
        return ClientFault(_REFUSED, "definitions", message)
