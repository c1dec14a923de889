"""What the control API's handlers work with: small protocols (tests bring their own) and one application key."""

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
    """What the gateway says of itself."""

    @property
    def not_ready(self) -> str | None: ...


class Team(Protocol):
    """The workers of the gateway, all of them."""

    async def figures(self) -> Metrics: ...
    async def upstreams(self) -> Mapping[str, UpstreamView]: ...
    async def pause(self, upstream: str, bound_s: float) -> None: ...
    async def open(self, upstream: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Control:
    """What handlers work with."""

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
    """What forgets rollouts."""
    index: Link | None = None
    """What finds rows without a scan."""
    queries: Queries | None = None
    """What answers SQL."""
    prices: Prices = field(default_factory=Prices)
    """What calls cost."""
    routes: Sequence[Route] = ()
    """Which upstreams serve a model, as configured."""
    budgets: Budgets | None = None
    """What calls may use up."""
    keep_alive_s: float = 15.0
    """How often a follower that hears nothing is told that the gateway lives."""
    started_ns: int = field(default_factory=time.time_ns)
    """When the gateway started."""
    heavy: HeavyReads = field(default_factory=HeavyReads)
    """Where whatever reads the bytes of calls waits for its turn."""
    followers: set[asyncio.Task[object]] = field(default_factory=set[asyncio.Task[object]])
    doing: set[asyncio.Future[object]] = field(default_factory=set[asyncio.Future[object]])
    """Operations that are done to their end, whoever waits for the answer."""


CONTROL = web.AppKey("control", Control)
