"""Records the lists of servers, and holds them to their approved versions. The versions are in `gateway.definitions`.

With `warn` an answer passes unchanged and is read afterwards. With `hold` an answer is read before it passes: a changed
definition is replaced by its approved version, a new one is left out. With `deny` a list that differs is refused, and
so are calls of changed definitions. An answer that cannot be read is then refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from penstock.gateway.definitions.operations import Whose, described
from penstock.gateway.definitions.reading import LISTS, Change, Unreadable, asked_for, cursor_of, lists
from penstock.gateway.definitions.service import Definitions, Exchange
from penstock.gateway.dialects.mcp import Sent
from penstock.gateway.http.errors import ClientFault, UpstreamFault
from penstock.gateway.mcp.features import Asking
from penstock.gateway.mcp.interests import Noted
from penstock.gateway.metrics import Metrics
from penstock.gateway.model.definitions import Kind
from penstock.gateway.proxy.parts import Send

HELD: Final = "penstock.mcp.held"
"""Attribute of a span: the definitions that were replaced by their approved versions, or left out."""
_USES: Final[dict[str, Kind]] = {"tools/call": "tools", "prompts/get": "prompts", "resources/read": "resources"}
"""Requests that use a listed definition."""
_ANY_PAGE: Final = "\0"
"""A cursor that matches no request."""
_REFUSED: Final = 200
"""Status of a refusal: the exchange itself is in order, and clients look for the error of JSON-RPC in its body."""


class HeldDefinitions:
    """The feature that records lists, and holds or denies changed definitions."""

    def __init__(self, definitions: Definitions, metrics: Metrics) -> None:
        self._definitions, self._metrics = definitions, metrics

    def changes(self, server: str) -> bool:
        """True if the server's changes are held or denied."""
        return self._definitions.reads(server)

    def plan(self, asking: Asking, send: Send) -> asyncio.Future[None] | None:
        """Watches or changes the answers to list requests; raises `ClientFault` for a call of a denied definition."""
        server, address = asking.server.name, asking.address
        whose = Whose(address.rollout, address.attempt, address.origin, address.mode)
        denies = self._definitions.on_change.get(server) == "deny"
        if self._definitions.reads(server):
            asking.change_unasked(partial(self._unasked, server, whose))
        for one in asking.messages:
            if one.kind == "request" and one.method in LISTS:
                exchange = Exchange(server, one.method, cursor_of(one.raw), whose)
                if self._definitions.reads(server):
                    asking.change(one.id, partial(self._held, exchange))
                else:
                    asking.watch(one.id, partial(self._definitions.heard, exchange))
            elif denies and (one.method in _USES or one.kind == "unreadable"):
                self._check(server, one)
        return None

    def _unasked(self, server: str, whose: Whose, answer: bytes) -> bytes | Noted:
        """Holds a list in an answer whose request is unknown."""
        method = lists(answer)
        return answer if method is None else self._held(Exchange(server, method, _ANY_PAGE, whose), answer)

    def _held(self, exchange: Exchange, answer: bytes) -> bytes | Noted:
        server, on_change = exchange.server, self._definitions.on_change[exchange.server]
        try:
            found = self._definitions.held_to(exchange, answer)
        except Unreadable as error:
            said = f"server {server!r}: its answer to {exchange.method} cannot be read and is not passed on"
            why = f'mcp.servers.{server}.on_change = "{on_change}"'
            raise UpstreamFault(502, "unreadable", f"{said} ({why}): {error}") from None
        if found is None or not found.changes:
            return answer
        if on_change == "deny":
            raise self._denied(server, exchange.kind, found.changes)
        self._metrics.mcp_definitions[(server, "held")] += 1
        return Noted(found.answer, {HELD: described(found.changes) or "instructions"})

    def _check(self, server: str, one: Sent) -> None:
        """Raises `ClientFault` for a call of a changed definition."""
        try:
            name = asked_for(one.method, one.raw)
        except Unreadable as error:
            said = f"server {server!r} is asked for something that cannot be read, so it may be what is denied"
            raise ClientFault(400, "unreadable", f"{said}: {error}") from None
        kind = _USES.get(one.method)
        change = None if kind is None or name is None else self._definitions.difference(server, kind, name)
        if kind is not None and change is not None:
            raise self._denied(server, kind, [change])

    def _denied(self, server: str, kind: Kind, changes: Sequence[Change]) -> ClientFault:
        self._metrics.mcp_definitions[(server, "denied")] += 1
        what = "its instructions" if kind == "instructions" else f"{kind} that it lists"
        which = "" if kind == "instructions" else f" ({described(list(changes))})"
        why = f'mcp.servers.{server}.on_change = "deny"'
        message = (
            f"server {server!r}: {what} are not as they were approved{which}, and {why}; "
            f"see `penstock mcp definitions {server} --diff`, then `penstock mcp approve {server}`"
        )
        return ClientFault(_REFUSED, "definitions", message)
