"""The control API that holds an upstream: while its weights are changed in place, calls wait at the socket and then go
on.

A person or a trainer pauses the upstream, waits until no call runs there any more, changes the weights, and opens it. A
hold is a lease in this process: holding again renews it, and a gateway that restarts has forgotten it
(`gateway.traffic.upstreams.gate`).
"""

from __future__ import annotations

import asyncio
from time import monotonic

from aiohttp import web

from penstock.gateway.api.context import CONTROL, Control
from penstock.gateway.api.guard import ApiError, answer
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids
from penstock.gateway.model.audit import ActionRequest
from penstock.gateway.model.upstream import PauseRequest, RouteView, UpstreamList, UpstreamView
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.upstream_settings import RouteSettings as Configured


async def get_upstreams(request: web.Request) -> web.Response:
    """Upstreams, whether they are paused or fail, how many calls run there or wait, and which models are routed to
    them."""
    control = request.app[CONTROL]
    views = [view for _, view in sorted((await control.team.upstreams()).items())]
    return answer(UpstreamList(upstreams=views, routes=[_route(one) for one in control.routes]))


def _route(route: Configured) -> RouteView:
    return RouteView(model=route.model, upstreams=list(route.upstream), alias=route.alias, train=route.train)


async def pause(control: Control, ids: Ids, asked: PauseRequest) -> UpstreamView:
    """Let calls to an upstream wait while its weights are changed. Calls that run there go on; wait until none is left.
    Past the bound calls are refused with 504, until it is opened or paused again."""
    before = await _found(control, ids)
    await control.team.pause(before.name, asked.bound_s)
    # A trainer's renewals of its hold change nothing, so they are not logged.
    if not before.paused or before.bound_s != asked.bound_s:
        await control.audit_log.record(asked, "pause_upstream", before.name)
    return await _found(control, ids)


async def open_again(control: Control, ids: Ids, asked: ActionRequest) -> UpstreamView:
    """Serve what waits for an upstream, in the order in which it came, and everything from then on."""
    before = await _found(control, ids)
    await control.team.open(before.name)
    # Waiting calls go out in this turn of the loop.
    await asyncio.sleep(0)
    if before.paused:
        await control.audit_log.record(asked, "open_upstream", before.name)
    return await _found(control, ids)


async def _found(control: Control, ids: Ids) -> UpstreamView:
    name, views = ids["upstream"], await control.team.upstreams()
    if name not in views:
        raise ApiError(404, f"there is no upstream {name!r}", "upstream", name, sorted(views))
    return views[name]


def view(pool: ConnectionPool) -> UpstreamView:
    """The state of an upstream in this process."""
    gate, now, check = pool.gate, monotonic(), pool.health.check
    return UpstreamView(
        name=pool.name,
        paused=gate.paused,
        paused_s=None if gate.paused_since is None else now - gate.paused_since,
        bound_s=gate.bound_s if gate.paused else None,
        waiting=gate.waiting + pool.concurrency_limit.waiting,
        running=pool.running,
        waited=gate.stats.calls + pool.concurrency_limit.waited,
        refused=gate.stats.refused,
        health=pool.health.state(now),
        failing=pool.health.why,
        rests_s=pool.health.rests_s(now),
        check=None if check is None else check[0] or "passed",
        checked_s=None if check is None else now - check[1],
    )


ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/upstreams", "upstreams", "Where calls go", UpstreamList, get_upstreams),
    ApiRoute(
        "POST", "/api/upstreams/{upstream}/pause", "pause_upstream", "Let calls wait",
        UpstreamView, pause, body=PauseRequest,
    ),
    ApiRoute(
        "POST", "/api/upstreams/{upstream}/open", "open_upstream", "Let calls go", UpstreamView, open_again,
        body=ActionRequest
    ),
)  # fmt: skip
"""This part of the API."""
