"""Records the lists of servers, and holds them to their approved versions. The versions are in `tools.definitions`.

With `warn` an answer passes unchanged and is read afterwards. With `hold` an answer is read before it passes: a changed
definition is replaced by its approved version, a new one is left out. With `deny` a list that differs is refused, and
so are calls of changed definitions. An answer that cannot be read is then refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Final

from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import Pin
from penstock.gateway.model.resource import Template
from penstock.gateway.model.tools import DefinitionKind
from penstock.gateway.reading.diagnosis.tool_results import MatchDegree, match_name
from penstock.gateway.releases.catalog import find_tools, write_versions
from penstock.gateway.releases.prompt_recogniser import Recogniser
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
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call_filter import CallPlan
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.versions import ResourceUse
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, McpDialect
from penstock.gateway.wire.http.request import ClientFault, GatewayFault, UpstreamFault

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


# Descriptions of tools in the version that a rollout is given: releases of tool texts, in `tools/list`.
#
# The description of a tool is changed if it is the text of a resource of kind `tool-text`; its name and its schema
# never are. The rollout is pinned before the list is requested: to the resources of tools that the server has listed
# before or, if these are unknown, to all. In requests to models the same resources are found and written by
# `releases.catalog`, as prompts are.

_LIST: Final = "tools/list"
_DIALECT: Final = McpDialect()


class ToolTextMiddleware:
    """The feature that changes descriptions of tools to released versions."""

    def __init__(self, shared: ProxyContext, definitions: DefinitionService) -> None:
        self._shared, self._definitions = shared, definitions
        self._found: dict[str, tuple[Recogniser, frozenset[str], list[str]]] = {}
        """Resources by server, with the recogniser and the list of tools that they were found by."""

    def changes(self, server: str) -> bool:
        """True if a resource may describe a tool of this server."""
        return bool(self._resources(server))

    def _resources(self, server: str) -> list[str]:
        """Resources that describe a tool of this server."""
        recogniser = self._shared.pins.catalog.recogniser
        if not recogniser.tools:
            return []
        listed = self._definitions.tools(server)
        found = self._found.get(server)
        if found is None or found[0] is not recogniser or found[1] != listed:
            tools = [one for one in recogniser.known if one.tool is not None]
            mine = [one for one in tools if not listed or any(_called(server, one.tool or "", name) for name in listed)]
            found = self._found[server] = recogniser, listed, sorted({one.resource for one in mine})
        return found[2]

    def plan(self, asking: McpRequest, send: CallPlan) -> asyncio.Future[None] | None:
        """Pins the rollout, and has the list changed when it comes."""
        asked = [one.id for one in asking.messages if one.kind == "request" and one.method == _LIST]
        found = ResourceUse(self._resources(asking.server.name) if asked else [], None, None)
        if not found.resources:
            return None
        shared, call = self._shared, send.call
        pins = shared.pins.pinned(call, found)
        if pins is not None:
            self._give(asking, send, asked, found, pins)
            return None
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def pinned(pinning: asyncio.Future[list[Pin]]) -> None:
            if done.done():
                return
            try:
                self._give(asking, send, asked, found, self._pins_of(call, found, pinning.exception()))
                done.set_result(None)
            except GatewayFault as refusal:
                done.set_exception(refusal)

        now = shared.epoch_ns + int(monotonic() * 1e9)
        shared.pins.pin(call, found, now).add_done_callback(pinned)
        return done

    def _pins_of(self, call: CallRequest, found: ResourceUse, error: BaseException | None) -> Mapping[str, Pin]:
        """The pins of the rollout. `error`: the reason why the tape did not take them."""
        shared = self._shared
        if error is not None and shared.refuses_gaps(call.address.mode):
            raise GatewayFault(503, "tape", f"this rollout cannot be given its versions: {error}")
        pins = shared.pins.pinned(call, found) if error is None else None
        return pins or shared.pins.fallback_pins(call, found, error or RuntimeError("it was rolled back meanwhile"))

    def _give(
        self, asking: McpRequest, send: CallPlan, asked: list[bytes], found: ResourceUse, pins: Mapping[str, Pin]
    ) -> None:
        catalog, server = self._shared.pins.catalog, asking.server.name
        send.versions = {name: pins[name].version for name in found.resources}
        arms = {f"{pin.release}:{pin.arm}" for name in found.resources if (pin := pins[name]).release is not None}
        send.arm = ",".join(sorted(arms)) or None
        templates = {name: catalog.templates[name][version] for name, version in send.versions.items()}
        for id in asked:
            asking.transform_response(
                id, partial(self._written, send.call.address.rollout, server, catalog.recogniser, templates)
            )

    def _written(
        self, rollout: str, server: str, recogniser: Recogniser, versions: Mapping[str, Template], answer: bytes
    ) -> bytes:
        """The list with these versions in it. Descriptions that are not recognised pass unchanged and are counted."""
        metrics = self._shared.metrics
        places = _DIALECT.tool_texts(answer)
        made = write_versions(answer, find_tools(places, recogniser, partial(_called, server)), versions)
        for use in made.uses:
            metrics.prompt_rewrites[(use.matched_by,)] += 1
        for miss in made.misses:
            metrics.prompt_misses[(miss.why,)] += 1
        self._shared.pins.notes.add(rollout, {use.resource for use in made.uses}, made.misses)
        return made.body


def _called(server: str, sent: str, name: str) -> bool:
    """True if agents mean this tool of the server by the name that they send."""
    return match_name(sent, server, name) is MatchDegree.SAME
