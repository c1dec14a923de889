"""The context of the control API's handlers: small protocols (tests bring their own) and one application key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from penstock.gateway.api.heavy import HeavyReads
from penstock.gateway.api.pages import Tape
from penstock.gateway.budgets.service import Budgets
from penstock.gateway.calls.auth import Auth
from penstock.gateway.definitions.service import Definitions
from penstock.gateway.index.link import Link
from penstock.gateway.index.sql.runner import Queries
from penstock.gateway.metrics import Metrics
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.upstream import UpstreamView
from penstock.gateway.policy.policy import Policy
from penstock.gateway.policy.questions import Questions
from penstock.gateway.queue.dispatcher import Dispatcher
from penstock.gateway.releases.driver import Driver
from penstock.gateway.retention.service import Retention
from penstock.gateway.runs.service import RunService
from penstock.gateway.store.audit_log import AuditLog
from penstock.gateway.store.feed import Feed
from penstock.gateway.upstream_settings import Route
from penstock.gateway.webhooks.service import Webhooks


class State(Protocol):
    """The gateway's readiness."""

    @property
    def not_ready(self) -> str | None: ...


class Team(Protocol):
    """All workers of the gateway."""

    async def figures(self) -> Metrics: ...
    async def upstreams(self) -> Mapping[str, UpstreamView]: ...
    async def pause(self, upstream: str, bound_s: float) -> None: ...
    async def open(self, upstream: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Control:
    """The services that handlers use."""

    tape: Tape
    dispatcher: Dispatcher
    releases: Driver
    runs: RunService
    feed: Feed
    team: Team
    auth: Auth
    metrics: Metrics
    state: State
    definitions: Definitions
    audit_log: AuditLog
    webhooks: Webhooks
    questions: Questions = field(default_factory=Questions)
    """Tool calls that wait for a person."""
    policy: Policy = field(default_factory=lambda: Policy([]))
    """Rules on tool calls, as configured."""
    retention: Retention | None = None
    """Service that forgets rollouts."""
    index: Link | None = None
    """Index that finds rows without a scan."""
    queries: Queries | None = None
    """Service that answers SQL."""
    prices: Prices = field(default_factory=Prices)
    """Prices of models."""
    routes: Sequence[Route] = ()
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
    doing: set[asyncio.Future[object]] = field(default_factory=set[asyncio.Future[object]])
    """Operations that are finished even if the client has left."""


CONTROL = web.AppKey("control", Control)
