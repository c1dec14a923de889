"""Descriptions of tools in the version that a rollout is given: releases of tool texts, in `tools/list`.

The description of a tool is changed if it is the text of a resource of kind `tool-text`; its name and its schema never
are. The rollout is pinned before the list is requested: to the resources of tools that the server has listed before or,
if these are unknown, to all. In requests to models the same resources are found and written by `releases.prompts`, as
prompts are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import Final

from penstock.gateway.model.release import Pin
from penstock.gateway.model.template import Template
from penstock.gateway.reading.diagnosis.tool_arguments import MatchDegree, match_name
from penstock.gateway.releases.prompts.recogniser import Recogniser
from penstock.gateway.releases.prompts.rewrite import find_tools, write_versions
from penstock.gateway.tools.definitions.service import DefinitionService
from penstock.gateway.tools.middleware import McpRequest
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call_filter import CallPlan
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.versions import ResourceUse
from penstock.gateway.wire.dialects.mcp_dialect import McpDialect
from penstock.gateway.wire.http.errors import GatewayFault

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
