"""The table of the control API: reads of the tape, the queue, and tokens for agents.

`ROUTES` is the API: handlers are registered from it and `gateway.api.openapi` describes it, so no endpoint can be
served undescribed. Handlers are thin: they check parameters (`gateway.api.guard`), read the tape page by page off the
event loop (`gateway.api.pagination`), change it through the dispatcher (`gateway.api.rollouts`) or follow the change
feed (`gateway.api.changes`). Answers are `gateway.model.answers` and `gateway.model.queue`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.metadata import version
from typing import get_args

from aiohttp import web
from pydantic import Field

from penstock.gateway.api import changes, guard, login, openapi, releases, rollouts, runs, search, state, stats, tools
from penstock.gateway.api.guard import CONTROL, ApiError, Control, answer, query_of
from penstock.gateway.api.openapi import EVENTS, HTML, OCTETS, TEXT, ApiRoute
from penstock.gateway.api.operations import Ids, operate
from penstock.gateway.api.pagination import DeferredAnswer
from penstock.gateway.followers.otlp.ingest import KEY, post_telemetry
from penstock.gateway.model import metrics
from penstock.gateway.model.answers import (
    AgentToken,
    AttemptList,
    ChangePage,
    Diagnosis,
    FilterFields,
    Health,
    RolloutPage,
    SpanDetail,
    SpanPage,
    Stats,
    TokenRequest,
)
from penstock.gateway.model.base import ActionRequest, Mode, Noun, Role
from penstock.gateway.model.queue import (
    ClaimAnswer,
    ClaimRequest,
    EnqueueAnswer,
    EnqueueRequest,
    EventsAnswer,
    EventsRequest,
    FeedbackAnswer,
    FeedbackRequest,
    FinishAnswer,
    FinishRequest,
    HeartbeatAnswer,
    HeartbeatRequest,
    QueueRequest,
    QueueStatus,
    RewardAnswer,
    WorkerList,
)
from penstock.gateway.model.release import ENDED, ReleaseStage
from penstock.gateway.model.rollout import Judgement, Rollout, RolloutSummary
from penstock.gateway.model.tools import ToolList
from penstock.gateway.model.turn import Transcript
from penstock.gateway.reading.filter_fields import describe_fields


class StatsQuery(Noun):
    """The query parameters of the sums over spans."""

    spans: int | None = Field(default=None, ge=0, le=100_000)
    """How many of the newest spans to sum over; if not given, all where there is an index, else 10,000."""


async def get_stats(request: web.Request) -> web.Response:
    """Sums over spans, by model and by status, and the figures of the tape. They are over all spans where there is an
    index, else over the newest: `counted_spans` says how many they are, `complete` whether these are all."""
    control, asked = request.app[CONTROL], query_of(request, StatsQuery)
    total = None if control.index is None else control.index.total
    figures = await control.team.figures()
    return answer(await stats.gather(control.tape, asked.spans, figures, control.prices, total))


async def make_token(control: Control, ids: Ids, asked: TokenRequest) -> AgentToken:
    """Make an agent token: the API key of an agent that may speak for one rollout and for nothing else. The rollout
    need not exist yet. Tokens are not stored: a lost one is made again, a leaked one is good until it expires."""
    now = int(time.time())
    token = control.auth.mint(asked.rollout, asked.expires_s, now)
    expires_ns = None if asked.expires_s is None else (now + asked.expires_s) * 10**9
    return AgentToken(token=token, rollout=asked.rollout, expires_ns=expires_ns)


async def get_filters(request: web.Request) -> web.Response:
    """The fields of filters with their operators, and their values where there is a choice: for completion."""
    return answer(FilterFields(spans=describe_fields("spans"), rollouts=describe_fields("rollouts")))


async def get_openapi(request: web.Request) -> web.Response:
    """This API as an OpenAPI 3.1 document."""
    return web.json_response(_document())


async def get_docs(request: web.Request) -> web.Response:
    """This API as a readable page."""
    return web.Response(text=_docs_page(), content_type=HTML)


async def get_health(request: web.Request) -> web.Response:
    """Always `ok`: the process answers requests. `/readyz` says whether it can take calls."""
    return answer(Health(status="ok"))


async def get_ready(request: web.Request) -> web.Response:
    """Ready for calls: 503 while the gateway starts or drains, and while calls cannot be recorded."""
    problem = request.app[CONTROL].state.not_ready
    if problem is not None:
        raise ApiError(503, problem)
    return answer(Health(status="ok"))


async def get_metrics(request: web.Request) -> web.Response:
    """The gateway's figures in the text format of Prometheus, summed over all workers."""
    control = request.app[CONTROL]
    await asyncio.to_thread(_look_at_tape, control)
    control.metrics.forget_arms()
    page = await asyncio.to_thread(metrics.render, metrics.MetricsSnapshot(await control.team.figures()))
    return web.Response(body=page, headers={"Content-Type": metrics.CONTENT_TYPE})


def _look_at_tape(control: Control) -> None:
    """Set those figures that are only counted on request."""
    figures, work, now = control.metrics, control.dispatcher.reader.queue(), time.time_ns()
    figures.tape_bytes = control.tape.figures()["used_bytes"]
    figures.queue_rollouts = {(mode,): work.waiting.get(mode, 0) for mode in get_args(Mode)}
    figures.queue_oldest_seconds = 0.0 if work.oldest_ns is None else max(0.0, (now - work.oldest_ns) / 1e9)
    figures.queue_claimed = work.claimed
    releases = control.releases.reader.releases()
    control.releases.metrics.update(releases, figures, now)
    live = Counter(release.stage for release in releases if release.live)
    figures.releases = {(stage,): live[stage] for stage in get_args(ReleaseStage) if stage not in ENDED}
    figures.workers = len(rollouts.recent_workers(control.dispatcher.reader, now))


@cache
def _document() -> dict[str, object]:
    return openapi.document(ROUTES, version("penstock-gateway"))


@cache
def _docs_page() -> str:
    return openapi.page(ROUTES, version("penstock-gateway"))


_ATTEMPT = "/api/rollouts/{rid}/attempts/{aid}"
_SPAN = f"{_ATTEMPT}/spans/{{sequence}}"

ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "GET", "/api/rollouts", "rollouts", "List rollouts",
        RolloutPage, rollouts.get_rollouts, query=rollouts.RolloutsQuery,
    ),
    ApiRoute("GET", "/api/rollouts/{rid}", "rollout", "One rollout", RolloutSummary, rollouts.get_rollout),
    ApiRoute(
        "GET", "/api/rollouts/{rid}/diagnosis", "diagnosis", "Can it be trained on?",
        Diagnosis, rollouts.get_diagnosis, query=rollouts.DiagnosisQuery,
    ),
    ApiRoute(
        "GET", f"{_ATTEMPT}/tools", "tools", "Tools that an attempt used", ToolList, tools.get_tools,
        query=tools.ToolsQuery,
    ),
    ApiRoute(
        "GET", f"{_ATTEMPT}/transcript", "transcript", "The task and every call of an attempt, read",
        Transcript, rollouts.get_transcript, often=True,
    ),
    ApiRoute(
        "GET", "/api/rollouts/{rid}/attempts", "attempts", "Attempts of a rollout",
        AttemptList, rollouts.get_attempts,
    ),
    ApiRoute(
        "GET", "/api/rollouts/{rid}/spans", "rollout_spans", "Spans of a rollout",
        SpanPage, rollouts.get_rollout_spans, query=rollouts.PageQuery,
    ),
    ApiRoute(
        "GET", "/api/rollouts/{rid}/attempts/{aid}/spans", "attempt_spans", "Spans of an attempt",
        SpanPage, rollouts.get_rollout_spans, query=rollouts.PageQuery,
    ),
    ApiRoute("GET", _SPAN, "span", "One span, whole", SpanDetail, rollouts.get_span, query=rollouts.SpanQuery),
    ApiRoute(
        "GET", f"{_SPAN}/request", "request_body", "Request body, exact bytes",
        OCTETS, rollouts.get_request_body, query=rollouts.BodyQuery,
    ),
    ApiRoute(
        "GET", f"{_SPAN}/response", "response_body", "Response body, exact bytes",
        OCTETS, rollouts.get_response_body, query=rollouts.BodyQuery,
    ),
    ApiRoute(
        "GET", "/api/rollouts/{rid}/exchanges", "exchanges", "Bytes of all its calls",
        OCTETS, rollouts.get_exchanges, query=rollouts.ExchangesQuery,
    ),
    ApiRoute(
        "GET", "/api/whole", "whole_rollouts", "Rollouts with their spans and the bytes of their calls",
        OCTETS, rollouts.get_whole, query=rollouts.WholeRolloutsQuery, errors=(404,),
    ),
    ApiRoute(
        "GET", "/api/spans", "recent_spans", "Spans of all rollouts",
        SpanPage, rollouts.get_recent_spans, query=rollouts.PageQuery,
    ),
    ApiRoute(
        "GET", "/api/changes", "changes", "Follow what changes",
        EVENTS, changes.get_changes, query=changes.ChangesQuery, also=ChangePage,
    ),
    ApiRoute(
        "GET", "/api/digest", "digest", "Follow the names of what changes",
        EVENTS, changes.get_digests, query=changes.DigestQuery,
    ),
    ApiRoute("GET", "/api/filters", "filters", "The filter language", FilterFields, get_filters),
    ApiRoute(
        "POST", "/api/rollouts", "enqueue", "Queue tasks",
        EnqueueAnswer, rollouts.enqueue, body=EnqueueRequest, errors=(409,),
    ),
    ApiRoute(
        "POST", "/api/rollouts/{rid}/cancel", "cancel", "Cancel a rollout",
        Rollout, rollouts.cancel, body=ActionRequest, errors=(409,),
    ),
    ApiRoute(
        "POST", "/api/rollouts/{rid}/requeue", "requeue", "Queue a rollout again",
        Rollout, rollouts.requeue, body=ActionRequest, errors=(409,),
    ),
    ApiRoute("POST", "/api/claims", "claim", "Take work", ClaimAnswer, rollouts.claim, body=ClaimRequest, waits=True),
    ApiRoute(
        "POST", "/api/workers/{wid}/heartbeat", "heartbeat", "Keep what was claimed",
        HeartbeatAnswer, rollouts.heartbeat, body=HeartbeatRequest,
    ),
    ApiRoute(
        "POST", f"{_ATTEMPT}/finish", "finish", "End an attempt",
        FinishAnswer, rollouts.finish, body=FinishRequest, errors=(409,),
    ),
    ApiRoute(
        "POST", f"{_ATTEMPT}/rewards", "reward", "Reward an attempt", RewardAnswer, rollouts.reward, body=Judgement
    ),
    ApiRoute(
        "POST", f"{_ATTEMPT}/events", "events", "Add events to an attempt",
        EventsAnswer, rollouts.add_events, body=EventsRequest,
    ),
    ApiRoute(
        "POST", "/api/feedback", "feedback", "Reward a response",
        FeedbackAnswer, rollouts.feedback, body=FeedbackRequest, errors=(404,),
    ),
    ApiRoute("GET", "/api/queue", "queue", "How much work there is", QueueStatus, rollouts.get_queue),
    ApiRoute(
        "POST", "/api/queue", "set_queue", "Open, pause or drain the queue",
        QueueStatus, rollouts.set_queue, body=QueueRequest,
    ),
    ApiRoute("GET", "/api/workers", "workers", "Who works", WorkerList, rollouts.get_workers),
    *releases.ROUTES,
    *state.UPSTREAM_ROUTES,
    *runs.ROUTES,
    *tools.POLICY_ROUTES,
    *tools.DEFINITION_ROUTES,
    *guard.ROUTES,
    *state.WEBHOOK_ROUTES,
    *state.INDEX_ROUTES,
    *stats.ROUTES,
    *state.PRICE_ROUTES,
    *state.BUDGET_ROUTES,
    *search.SEARCH_ROUTES,
    *search.SQL_ROUTES,
    *state.RETENTION_ROUTES,
    ApiRoute("GET", "/api/stats", "stats", "Figures", Stats, get_stats, query=StatsQuery),
    ApiRoute("POST", "/api/tokens", "token", "Make an agent token", AgentToken, make_token, body=TokenRequest),
    ApiRoute("GET", "/api/openapi.json", "openapi", "OpenAPI document", "application/json", get_openapi, public=True),
    ApiRoute("GET", "/api/docs", "docs", "Readable documentation", HTML, get_docs, public=True),
    ApiRoute("GET", "/healthz", "healthz", "Alive?", Health, get_health, public=True),
    ApiRoute("GET", "/readyz", "readyz", "Ready for calls?", Health, get_ready, public=True, errors=(503,)),
    ApiRoute("GET", "/metrics", "metrics", "Prometheus metrics", TEXT, get_metrics),
)  # fmt: skip
"""The API."""


_AGENT = guard.AGENT + "{kind}/{rid}/{aid}"

AGENT_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("POST", f"{_AGENT}/rewards", "", "", RewardAnswer, rollouts.agent_reward, body=Judgement),
    ApiRoute("POST", f"{_AGENT}/events", "", "", EventsAnswer, rollouts.agent_events, body=EventsRequest),
)
"""Requests that an agent may send below its own address; no part of the API."""


OPERATIONS = [*(route for route in ROUTES if route.operation), *AGENT_ROUTES]
"""Routes with a body, which change something or test rules, and those that runners read with every rollout."""


def make_application(control: Control) -> web.Application:
    """The application that serves reading requests. For a path that changes something it answers which methods exist.
    Its `shutdown` must be called when the gateway stops: it ends the followers."""
    public = frozenset(route.path for route in ROUTES if route.public)
    needs: dict[str, Role] = {route.path: route.required_role for route in ROUTES if route.method == "POST"}
    # The listener limits the size of bodies.
    app = web.Application(middlewares=[guard.middleware(control.auth, public, needs)], client_max_size=0)
    app[CONTROL] = control
    for route in ROUTES:
        app.router.add_route(route.method, route.path, _operated(route) if route.operation else route.handler)
    app[login.LOGINS] = login.DeviceLogins()
    app.router.add_route("*", f"{login.SCOPE}/{{path:.+}}", login.serve)
    for scope in (f"{{scope:none|{KEY}}}", "{kind}/{rid}/{aid}"):
        app.router.add_route("*", f"{guard.AGENT}{scope}/v1/{{signal}}", post_telemetry)
    app.on_response_prepare.append(guard.add_headers)
    app.on_shutdown.append(changes.end_followers)
    return app


def _operated(route: ApiRoute) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """An operation as an aiohttp handler, for paths with escapes, which `Operations.find` does not match."""

    async def handle(request: web.Request) -> web.StreamResponse:
        control, body = request.app[CONTROL], await request.read()
        found = await operate(control, route, request.match_info, request.content_type, body)
        if isinstance(found, DeferredAnswer):
            return await control.heavy.answer(request, lambda: guard.json_of(found.make()), guard.JSON)
        return answer(found)

    return handle
