"""Plans a call: its destination, and the changes to its request. Nothing here writes to a socket.

    Send    forward to these upstreams, with this request
    Wait    wait until the tape has the versions of the rollout: its first call that uses a released resource

`plan` is for a new call, `plan_given` for a call whose versions must be decided (again).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

from penstock.gateway.calls.admitted import Admitted
from penstock.gateway.calls.model_name import replace_model
from penstock.gateway.http.errors import GatewayFault
from penstock.gateway.http.headers import PROMPT
from penstock.gateway.http.request import Headers, Request
from penstock.gateway.model.attributes import WHOLE
from penstock.gateway.model.release import Pin
from penstock.gateway.proxy.parts import Send
from penstock.gateway.proxy.shared import Shared
from penstock.gateway.releases.catalog import Uses
from penstock.gateway.upstream_settings import Route
from penstock.gateway.upstreams.routes import alias_at


@dataclass(frozen=True, slots=True)
class Wait:
    """The call waits until its rollout is pinned; then `plan_given` is called."""

    pinned: asyncio.Future[list[Pin]]
    found: Uses


def plan(shared: Shared, call: Admitted, request: Request) -> Send | Wait:
    """Plan a new call; raises `Refusal`."""
    if shared.recorder.failing is not None:
        shared.check_gap(call)
    if not shared.pins.catalog.empty:
        found = shared.pins.look(call, prompt_named(call, request.headers))
        if found is not None:
            return plan_given(shared, call, request, found)
    return plan_route(shared, call, request)


def plan_route(shared: Shared, call: Admitted, request: Request) -> Send:
    """Plan a call that uses no released resource."""
    pools, alias, route = shared.route(call, request)
    body = call.body if alias is None else replace_model(call.body, alias, call.form)
    return _with_features(shared, Send(pools, call, body, request.headers), route)


def plan_given(
    shared: Shared, call: Admitted, request: Request, found: Uses, error: BaseException | None = None
) -> Send | Wait:
    """Plan a call that uses released resources. `error`: why the tape could not record the rollout's versions."""
    if error is None:
        pins = shared.pins.pinned(call, found)
        if pins is None:
            return Wait(shared.pins.pin(call, found, shared.epoch_ns + int(monotonic() * 1e9)), found)
    elif shared.refuses_gaps(call.address.mode):
        raise GatewayFault(503, "tape", f"this rollout cannot be given its versions: {error}")
    else:
        pins = shared.pins.unpinned(call, found, error)
    return _switched(shared, call, request, found, pins)


def _switched(shared: Shared, call: Admitted, request: Request, found: Uses, pins: Mapping[str, Pin]) -> Send:
    made = shared.pins.switched(call, found, pins)
    if not made.upstreams:
        pools, alias, route = shared.route(call, request)
        body = made.body if alias is None else replace_model(made.body, alias, call.form)
    else:
        pools, route = shared.serving(made.upstreams, found.model, call, request)
        body = made.body
    send = Send(pools, call, body, request.headers, made.versions, made.arm, made.texts, (found, pins))
    return _with_features(shared, send, route)


def _with_features(shared: Shared, send: Send, route: Route | None) -> Send:
    if route is not None and route.stream == "whole":
        send.whole = True
        send.attributes[WHOLE] = True
    released = send.given is not None and send.given[0].model is not None
    if route is not None and isinstance(route.alias, dict) and not released:
        asked = send.call.model or ""
        send.aliases = {pool.name: alias_at(route, pool.name) or asked for pool in send.pools}
    if route is not None or send.given is not None:
        for feature in shared.features:
            feature.plan(send, route)
    return send


def prompt_named(call: Admitted, headers: Headers) -> str | None:
    """The name of the prompt in the call's path or header; None if neither names one."""
    named = call.address.prompt
    return named or next((value.decode("latin-1") for low, _, value in headers if low == PROMPT), None)
