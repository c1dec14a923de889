"""The control API of parts of the gateway that are looked at as a whole: budgets, prices, the index, webhooks,
upstreams, retention.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from time import monotonic

from aiohttp import web
from pydantic import Field

from penstock.gateway.api.guard import CONTROL, ApiError, Control, answer, id_of, query_of
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids
from penstock.gateway.config import RouteSettings as Configured
from penstock.gateway.followers.index.link import IndexLink
from penstock.gateway.model.answers import PriceList
from penstock.gateway.model.base import ID_PATTERN, ActionRequest, Noun
from penstock.gateway.model.prices import BUILTIN
from penstock.gateway.model.release import Delivery, DeliveryList, WebhookList, WebhookTest, WebhookTestResult
from penstock.gateway.model.state import (
    BudgetPage,
    ForgottenPage,
    ForgottenRollout,
    IndexView,
    PauseRequest,
    RetentionHold,
    RetentionHoldList,
    RetentionStatus,
    RouteView,
    UpstreamList,
    UpstreamView,
)
from penstock.gateway.tape.retention import RetentionService
from penstock.gateway.traffic.upstreams.pool import ConnectionPool


class BudgetsQuery(Noun):
    """Parameters of the list of budgets."""

    budget: str | None = Field(default=None, pattern=ID_PATTERN)
    """Only of the budget of this name."""
    limit: int = Field(default=100, ge=1, le=10_000)
    """How many at most."""


async def get_budgets(request: web.Request) -> web.Response:
    """The used and the reserved part of each budget in the present window, the fullest first. A key, agent, rollout,
    run or arm with a budget of its own is listed once a call of it was counted."""
    asked, budgets = query_of(request, BudgetsQuery), request.app[CONTROL].budgets
    found = [] if budgets is None else await asyncio.to_thread(budgets.uses, asked.budget)
    names = [] if budgets is None else budgets.names
    return answer(BudgetPage(budgets=found[: asked.limit], total=len(found), configured=names))


BUDGET_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/budgets", "budgets", "What is used of budgets", BudgetPage, get_budgets, query=BudgetsQuery),
)
"""This part of the API."""


# The control API of the prices that costs are computed with.


async def get_prices(request: web.Request) -> web.Response:
    """The prices of models that costs are computed with, in the order of the file. The index computes them when it
    reads a call: after a change of the file it is made anew."""
    prices = request.app[CONTROL].prices
    file = prices.file
    return answer(
        PriceList(as_of=file.as_of, currency=file.currency, builtin=prices.path == BUILTIN, prices=file.price)
    )


PRICE_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/prices", "prices", "What models cost", PriceList, get_prices),
)
"""This part of the API."""


# The control API of the index: its state, and rebuilding it.


async def get_index(request: web.Request) -> web.Response:
    """The state of the tape's index: whether filters answer from it, and else why; how far it has read; its size."""
    return answer(await asyncio.to_thread(_link(request.app[CONTROL]).view))


async def rebuild(control: Control, ids: Ids, asked: ActionRequest) -> IndexView:
    """Delete the index and make it anew from the tape. Until it has caught up filters scan."""
    link = _link(control)
    view = await asyncio.to_thread(link.view)
    if view.status not in ("ready", "reading", "broken"):
        raise ApiError(409, f"there is no index to make anew: {view.reason}", "index", view.status)
    await control.audit_log.record(asked, "rebuild_index", "index")
    return await asyncio.to_thread(link.rebuild)


def _link(control: Control) -> IndexLink:
    assert control.index is not None
    return control.index


INDEX_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/index", "index", "The index of the tape", IndexView, get_index),
    ApiRoute(
        "POST", "/api/index/rebuild", "rebuild_index", "Make the index anew", IndexView, rebuild, body=ActionRequest,
        errors=(409,),
    ),
)  # fmt: skip
"""This part of the API."""


# The control API of webhooks: their state, their deliveries, and a test.


class DeliveriesQuery(Noun):
    """Parameters of the deliveries of a webhook."""

    limit: int = Field(default=100, ge=1, le=10_000)
    """How many at most."""


async def get_webhooks(request: web.Request) -> web.Response:
    """The webhooks of the configuration: what waits for each, since when it takes nothing, and why."""
    return answer(WebhookList(webhooks=await asyncio.to_thread(request.app[CONTROL].webhooks.views)))


async def get_deliveries(request: web.Request) -> web.Response:
    """The messages that a webhook has taken or is to take, newest first, each with the outcome of its delivery."""
    control, name, asked = request.app[CONTROL], id_of(request, "webhook"), query_of(request, DeliveriesQuery)
    _check(control, name)

    def read() -> list[Delivery]:
        mine = (one for one in control.webhooks.reader.newest() if one.webhook == name)
        return list(islice(mine, asked.limit))

    return answer(DeliveryList(deliveries=await asyncio.to_thread(read)))


async def send_test(control: Control, ids: Ids, asked: WebhookTest) -> WebhookTestResult:
    """Send a webhook a signed message of the type `webhook.test`, once, and say what it answers. A webhook that has
    answered 410 is told of releases again when it takes this."""
    _check(control, ids["webhook"])
    return await control.webhooks.test(ids["webhook"])


def _check(control: Control, name: str) -> None:
    if name not in control.webhooks.names:
        message = f"there is no webhook {name!r}; `[[webhook]]` in penstock.toml names one"
        raise ApiError(404, message, "webhook", name, control.webhooks.names)


_WEBHOOK = "/api/webhooks/{webhook}"

WEBHOOK_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/webhooks", "webhooks", "Who is told of releases", WebhookList, get_webhooks),
    ApiRoute(
        "GET", f"{_WEBHOOK}/deliveries", "deliveries", "What it was told",
        DeliveryList, get_deliveries, query=DeliveriesQuery,
    ),
    ApiRoute("POST", f"{_WEBHOOK}/test", "test_webhook", "Send a test", WebhookTestResult, send_test, body=WebhookTest),
)  # fmt: skip
"""This part of the API."""


# The control API that holds an upstream: while its weights are changed in place, calls wait at the socket and then go
# on.
#
# A person or a trainer pauses the upstream, waits until no call runs there any more, changes the weights, and opens
# it. A hold is a lease in this process: holding again renews it, and a gateway that restarts has forgotten it
# (`gateway.traffic.upstreams.pool`).


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
        failing=pool.health.why or ("" if pool.auth is None else pool.auth.problem),
        rests_s=pool.health.rests_s(now),
        check=None if check is None else check[0] or "passed",
        checked_s=None if check is None else now - check[1],
    )


UPSTREAM_ROUTES: tuple[ApiRoute, ...] = (
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


# The control API of retention: forgetting rollouts, keeping them, and the state of deletion.


class ForgottenQuery(Noun):
    """Parameters of the list of what was forgotten."""

    cursor: str | None = Field(default=None, pattern=ID_PATTERN)
    """Where the page begins: `next` of the page before."""
    limit: int = Field(default=100, ge=1, le=1000)
    """How many at most."""


async def forget(control: Control, ids: Ids, asked: ActionRequest) -> ForgottenRollout:
    """Take a rollout off the tape for good: what it was given, its attempts, calls and rewards, out of the file and out
    of the index. It is out of sight with the answer; `GET /api/retention` says when nothing is left. A rollout that
    runs, that somebody keeps, or that a live release still has to count is refused. Its name and the time stay, and so
    does what releases have counted of it."""
    return await _retention(control).forget(ids["rid"], asked)


async def hold(control: Control, ids: Ids, asked: ActionRequest) -> RetentionHold:
    """Keep a rollout, whatever the rules of retention say, until the hold is lifted."""
    return await _retention(control).hold(ids["rid"], asked)


async def lift(control: Control, ids: Ids, asked: ActionRequest) -> RetentionHold:
    """Lift the hold of a rollout; how it was kept."""
    return await _retention(control).lift(ids["rid"], asked)


async def get_retention(request: web.Request) -> web.Response:
    """The rules by which rollouts are forgotten, the part of its file that the tape uses, and what is still to be
    deleted of forgotten rollouts."""
    control = request.app[CONTROL]
    retention = _retention(control)
    in_index, why = await asyncio.to_thread(_in_index, control.index, retention.hidden_at)
    return answer(await asyncio.to_thread(retention.status, in_index, why))


async def get_holds(request: web.Request) -> web.Response:
    """The rollouts that somebody keeps, by name: who, and why."""
    return answer(await asyncio.to_thread(_retention(request.app[CONTROL]).holds))


async def get_forgotten(request: web.Request) -> web.Response:
    """The rollouts that were forgotten, by name: when, and why."""
    asked = query_of(request, ForgottenQuery)
    return answer(await asyncio.to_thread(_retention(request.app[CONTROL]).forgotten, asked.cursor, asked.limit))


def _in_index(link: IndexLink | None, hidden_at: int) -> tuple[int | None, str]:
    """(forgotten rollouts that are still in files of the index, None while that is not known; why they are not
    removed). `hidden_at`: the change up to which the index must have read."""
    if link is None:
        return 0, ""
    view = link.view()
    if view.status == "ready" and view.cursor >= hidden_at:
        return view.forgotten, ""
    if view.status not in ("small", "off", "missing"):
        return None, ""
    if not link.has_files:
        return 0, ""
    return (
        None,
        f"there are files of an index that nobody keeps ({view.reason}): delete the directory index of the data",
    )


def _retention(control: Control) -> RetentionService:
    assert control.retention is not None
    return control.retention


RETENTION_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "POST", "/api/rollouts/{rid}/forget", "forget", "Forget a rollout", ForgottenRollout, forget,
        body=ActionRequest, errors=(404, 409), least="admin",
    ),
    ApiRoute(
        "POST", "/api/rollouts/{rid}/hold", "hold_rollout", "Keep a rollout", RetentionHold, hold, body=ActionRequest,
        errors=(404,)
    ),
    ApiRoute(
        "POST", "/api/rollouts/{rid}/lift_hold", "lift_hold", "Lift the hold of a rollout", RetentionHold, lift,
        body=ActionRequest, errors=(404,), least="admin",
    ),
    ApiRoute("GET", "/api/retention", "retention", "How long rollouts stay", RetentionStatus, get_retention),
    ApiRoute("GET", "/api/retention/holds", "holds", "Rollouts that somebody keeps", RetentionHoldList, get_holds),
    ApiRoute(
        "GET", "/api/retention/forgotten", "forgotten", "Rollouts that were forgotten", ForgottenPage, get_forgotten,
        query=ForgottenQuery,
    ),
)  # fmt: skip
"""This part of the API."""
