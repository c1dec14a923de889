"""The context of the control API's handlers: small protocols (tests bring their own) and one application key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from penstock.gateway.api.pagination import HeavyReads, TapeSource
from penstock.gateway.followers.index.link import IndexLink
from penstock.gateway.followers.index.sql.runner import SqlRunner
from penstock.gateway.followers.webhooks.service import WebhookService
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.upstream import UpstreamView
from penstock.gateway.reading.policy.policy import ToolPolicy
from penstock.gateway.reading.policy.questions import QuestionQueue
from penstock.gateway.releases.driver import Driver
from penstock.gateway.tape.retention.service import RetentionService
from penstock.gateway.tape.store.audit_log import AuditLog
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tools.definitions.service import DefinitionService
from penstock.gateway.traffic.budgets.service import Budgets
from penstock.gateway.traffic.calls.auth import Auth
from penstock.gateway.traffic.trials.rehearsal import Rehearsals
from penstock.gateway.upstream_settings import RouteSettings
from penstock.gateway.work.queue.dispatcher import Dispatcher
from penstock.gateway.work.runs.service import RunService


class Readiness(Protocol):
    """Says whether the gateway can take calls; `not_ready` is the reason, or None when it can."""

    @property
    def not_ready(self) -> str | None: ...


class GatewayWorkers(Protocol):
    """All workers of the gateway."""

    async def figures(self) -> Metrics: ...
    async def upstreams(self) -> Mapping[str, UpstreamView]: ...
    async def pause(self, upstream: str, bound_s: float) -> None: ...
    async def open(self, upstream: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Control:
    """The services that handlers use."""

    tape: TapeSource
    dispatcher: Dispatcher
    releases: Driver
    rehearsals: Rehearsals
    runs: RunService
    feed: ChangeFeed
    team: GatewayWorkers
    auth: Auth
    metrics: Metrics
    state: Readiness
    definitions: DefinitionService
    audit_log: AuditLog
    webhooks: WebhookService
    questions: QuestionQueue = field(default_factory=QuestionQueue)
    """Tool calls that wait for a person."""
    policy: ToolPolicy = field(default_factory=lambda: ToolPolicy([]))
    """Rules on tool calls, as configured."""
    retention: RetentionService | None = None
    """Service that forgets rollouts."""
    index: IndexLink | None = None
    """Index that finds rows without a scan."""
    queries: SqlRunner | None = None
    """Service that answers SQL."""
    prices: Prices = field(default_factory=Prices)
    """Prices of models."""
    routes: Sequence[RouteSettings] = ()
    """Routes of models to upstreams, as configured."""
    budgets: Budgets | None = None
    """Budgets of calls."""
    keep_alive_s: float = 15.0
    """Seconds between keep-alive comments to a follower without events."""
    started_ns: int = field(default_factory=time.time_ns)
    """When the gateway started."""
    heavy: HeavyReads = field(default_factory=HeavyReads)
    """Queue of the reads that take the bytes of calls."""
    followers: set[asyncio.Task[object]] = field(default_factory=set[asyncio.Task[object]])
    pending_operations: set[asyncio.Future[object]] = field(default_factory=set[asyncio.Future[object]])
    """Operations that are finished even if the client has left."""


CONTROL = web.AppKey("control", Control)
