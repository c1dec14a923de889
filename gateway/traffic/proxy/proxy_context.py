"""The context that all calls share: upstreams and routes, the recorder, the running calls, and the interfaces of
features."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from penstock.gateway.config import GatewayConfig, RouteSettings
from penstock.gateway.model.base import Mode
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import Pin
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.traffic.budgets.service import Budgets
from penstock.gateway.traffic.calls.admission import Admission
from penstock.gateway.traffic.calls.call_record import NOTHING, BufferUsage, CallRecord
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.trials.rehearsal import Rehearsals
from penstock.gateway.traffic.upstreams.health import STATES, FirstContentTimeouts
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.traffic.upstreams.routes import RouteChoice, RouteTable, may_serve, rank_upstreams
from penstock.gateway.traffic.versions import PinTable, ResourceUse
from penstock.gateway.wire.dialects import candidate_families
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.http.request import ClientFault, GatewayFault, Headers, HttpRequest, Refusal
from penstock.gateway.wire.http.upstream_connection import UpstreamCaller, UpstreamConnection
from penstock.gateway.wire.rewriting import Framing

# Features: what some calls need besides being forwarded.
#
# A `Middleware` (translation, token capture, exact sessions, shadows) looks at every call that is planned. For a call
# that needs it, it changes the request (`CallPlan`) and adds a `CallFilter`, whose methods are called during the
# call. A call without features has no parts. A new feature is added to `middleware`; neither the plan nor the call
# changes.


class PendingCall(UpstreamCaller, Protocol):
    """A call that is being connected."""

    record: CallRecord
    request: HttpRequest
    connecting: asyncio.Task[None] | None

    def on_refused(self, refusal: Refusal) -> None:
        """Called when no connection can be made; `refusal` says why."""
        ...


class CallFilter:
    """A feature's share in one call. A method that it does not override does nothing."""

    __slots__ = ()

    def connect(self, call: PendingCall, pool: ConnectionPool, fresh: bool) -> asyncio.Task[None] | None:
        """Connect in the part's own way and return a task that can be cancelled; None to connect as any other call.
        `fresh`: not on a connection that was idle."""
        return None

    def retry_body(self, record: CallRecord, answer: bytes) -> bytes | None:
        """The body of a second request after the engine has refused the call with status 400; None to keep the answer.
        `answer`: its body, without content encoding."""
        return None

    def framing(self, connection: UpstreamConnection, http10: bool) -> Framing | None:
        """The framing that changes the answer; None if the answer passes unchanged."""
        return None

    def client_body(self) -> bytes | None:
        """The answer's body as the client got it; None if it is the upstream's."""
        return None

    def problem(self) -> str | None:
        """A short reason why a complete upstream answer did not reach the client as one; None if it did."""
        return None

    def on_end(self, record: CallRecord, status: str) -> None:
        """Called at the end of the call, with its status: the last chance to add to its record."""

    def on_complete(self, record: CallRecord, token_ids: bool) -> None:
        """Called after a complete, successful response. `token_ids`: whether it had token ids."""

    def on_recorded(self, record: CallRecord) -> None:
        """Called when the recorder has the record of a call whose answer was complete or whose upstream failed."""


class CallPlan(msgspec.Struct):
    """The destination of a call, and the request in its final form. Made by the plan, changed by features."""

    pools: list[ConnectionPool]
    """Upstreams to try in turn."""
    call: CallRequest
    """The call, with the dialect and path that go upstream."""
    body: bytes
    headers: Headers
    versions: Mapping[str, str] = NOTHING
    arm: str | None = None
    texts: Mapping[str, str] = NOTHING
    """Versions, arms and texts of resources as in `CallRecord`."""
    given: tuple[ResourceUse, Mapping[str, Pin]] | None = None
    """The released resources that it uses, and the versions that its rollout was given."""
    captured: tuple[str, ...] = ()
    """Names of fields of the body that the gateway has added."""
    attributes: Mapping[str, Any] = NOTHING
    """Attributes to add to its span."""
    convert: Callable[[bytes], bytes] | None = None
    """Converts another body of the agent's for the upstream; None if bodies pass unchanged."""
    filters: tuple[CallFilter, ...] = ()
    aliases: Mapping[str, str] = NOTHING
    """Model name by upstream; empty if all upstreams use the same name."""
    streams: bool = False
    """True if a part changes a streamed answer; such an answer is a stream whatever its content type says."""
    whole: bool = False
    """True if its answer is passed on only when it is complete, as long as another upstream is left."""


class Middleware(Protocol):
    """Changes the calls that need it."""

    def serves(self, route: RouteSettings | None, given: bool) -> bool:
        """True if calls of this route may need the feature. `given`: they use a released resource. Asked once."""
        ...

    def plan(self, send: CallPlan, route: RouteSettings | None) -> None:
        """Change the request of a call that needs the feature, and add its part; raises `Refusal`. `route`: the route
        of the call's model."""
        ...


_log = logging.getLogger("penstock.proxy")
_ANNOUNCE_SECONDS = 0.25
"""Age in seconds at which a running call is put on the tape as open: most calls of an engine are over by then, or run
for long."""

_HELD = 4
"""Bytes that running calls may hold for the recorder, as a multiple of its queue (`tape.queue_bytes`)."""


_MODELS = 8
"""Models whose destinations are remembered with a head."""


class ActiveCall(Protocol):
    """A call that has not ended yet."""

    durable: bool
    """True if its answer may not end before the tape has the call."""

    @property
    def rollout(self) -> str:
        """The id of the rollout that the call belongs to."""
        ...

    def check(self, now: float, announce: float) -> None:
        """Announce the call if it began before `announce`, and end it if it waits for too long; monotonic seconds."""
        ...

    def give_up(self) -> None:
        """End the call: the gateway stops."""
        ...


@dataclass(slots=True, eq=False)
class ProxyContext:
    """The context of all calls of a gateway. Used on the event loop only."""

    config: GatewayConfig
    pools: Mapping[str, ConnectionPool]
    routes: RouteTable
    admission: Admission
    recorder: Recorder
    metrics: Metrics
    redactor: Redactor
    pins: PinTable
    rehearsals: Rehearsals
    middleware: tuple[Middleware, ...]
    """Features of calls, in the order in which they change a request."""
    epoch_ns: int
    """Nanoseconds to add to the monotonic clock to get the tape's time."""
    notify_fetched: Callable[[], None]
    """Called once the tape has a call that may have fetched results of a batch, or traces of a hosted session."""
    wake: Callable[[], None]
    """Called when a call begins and no other runs: `sweep` is needed soon."""
    budgets: Budgets | None = None
    """The budgets of calls; None if none is configured."""
    first_content_timeouts: FirstContentTimeouts = field(default_factory=FirstContentTimeouts)
    """Learned time limits for models whose streams begin late."""
    running: OrderedDict[ActiveCall, None] = field(default_factory=OrderedDict[ActiveCall, None])
    """Calls that have not ended yet, by start."""
    held: BufferUsage = field(init=False)
    """Bytes that running calls hold for the tape."""
    strict: bool = False
    """True if the tape must have a call before it is sent and before its answer ends."""

    plain_routes: frozenset[str] = field(init=False)
    """Models of the routes whose calls need no feature."""
    _by_model: bool = field(init=False)
    """True if a call's destination, or the budgets that count it, may depend on its model."""
    _features: dict[tuple[str | None, bool], Sequence[Middleware]] = field(
        default_factory=dict[tuple[str | None, bool], Sequence[Middleware]]
    )

    def __post_init__(self) -> None:
        config = self.config
        self._by_model = any(one.model != "*" for one in (*config.route, *config.budget))
        # Of several routes of a model the first counts.
        first = {route.model: route for route in reversed(config.route)}.values()
        self.plain_routes = frozenset(
            route.model
            for route in first
            if route.stream == "live" and not isinstance(route.alias, dict) and not self.features(route, False)
        )
        self.held = BufferUsage(_HELD * self.config.tape.queue_bytes)

    @property
    def exact(self) -> bool:
        """True if a route trains on exact token ids (`train = "exact"`)."""
        return any(route.train == "exact" for route in self.config.route)

    @property
    def active_rollouts(self) -> set[str]:
        """Ids of rollouts that have a running call."""
        return {call.rollout for call in self.running}

    def refuses_gaps(self, mode: Mode) -> bool:
        """True if a call of a rollout of this mode is refused when it cannot be recorded."""
        return self.config.tape.on_record_failure.get(mode, "pass") == "refuse"

    def check_gap(self, call: CallRequest) -> None:
        """Raise `GatewayFault` if the call's mode refuses unrecorded calls; called when the tape cannot be written."""
        mode = call.address.mode
        if self.refuses_gaps(mode):
            failing = self.recorder.failing
            message = f"this call cannot be recorded, and mode {mode!r} refuses calls that are not: {failing}"
            raise GatewayFault(503, "tape", message)

    def route(self, call: CallRequest, request: HttpRequest) -> tuple[list[ConnectionPool], RouteChoice]:
        """Return (upstreams to try in turn, where calls of the model go); raises `Refusal`."""
        by_model, decided = self._by_model or bool(self.pins.catalog.models), call.decision
        # A body that names no model is still a call of a route that takes all of them.
        model = call.model if by_model or not call.dialect.generates else None
        if model is None and by_model and not request.websocket and (unclear := call.model_problem) is not None:
            raise _unclear(*unclear)
        found = None if decided is None else decided.routes.get(model)
        if found is None:
            named = "" if model is None and call.dialect.generates else model
            found = self.routes.choose(named, call.dialect, call.path, request.headers, call.direct_pool)
            if decided is not None and len(decided.routes) < _MODELS:
                decided.routes[model] = found
        call.families, pools, route = found.families, [*found.pools], found.route
        call.routed = call.routed or route is not None
        if route is not None and route.shares:
            pools = rank_upstreams(pools, route.shares, call.address.rollout)
        return pools, found

    def features(self, route: RouteSettings | None, given: bool) -> Sequence[Middleware]:
        """Return the features of calls of a route; `given`: of those that use a released resource."""
        key = None if route is None else route.model, given
        found = self._features.get(key)
        if found is None:
            found = self._features[key] = [one for one in self.middleware if one.serves(route, given)]
        return found

    def begin(self, call: ActiveCall) -> None:
        """Count a call among the running ones until its end."""
        if not self.running:
            self.wake()
        self.running[call] = None
        self.metrics.inflight_calls += 1

    def end_durably(self) -> None:
        """From now on let no answer end before the tape has its call."""
        self.strict = True
        for call in self.running:
            call.durable = True

    def version_upstreams(
        self, names: Sequence[str], model: str | None, call: CallRequest, request: HttpRequest
    ) -> tuple[list[ConnectionPool], RouteSettings | None]:
        """Return (upstreams that serve a version of weights, to try in turn; the model's route). Raises `Refusal` if
        none of them is configured any more, or none speaks the call's dialect."""
        found, route = [self.pools[name] for name in names if name in self.pools], self.routes.find(model)
        if not found:
            message = (
                f"model {model!r} is served by upstream {names[0]!r}, which is not configured: add [[upstream]] "
                f"{names[0]!r}"
            )
            raise GatewayFault(503, "upstream", message)
        call.families, call.routed = candidate_families(call.dialect, call.path, request.headers), True
        found = [pool for pool in found if may_serve(pool, call.families, call.dialect, route)]
        if not found:
            self.routes.refuse(call.families, call.path, route)
        rollout = call.address.rollout
        return rank_upstreams(found, route.shares, rollout) if route is not None and route.shares else found, route

    def sweep(self, now: float) -> None:
        """Announce calls that have run for a while, end those whose upstream is silent. Needed ten times a second while
        calls run."""
        announce = now - _ANNOUNCE_SECONDS
        for call in list(self.running):
            try:
                call.check(now, announce)
            except Exception:
                _log.exception("a running call could not be checked")

    def measure(self, now: float) -> None:
        """Set the gauges of calls and upstreams."""
        self.metrics.recorder_held_bytes = self.held.bytes
        self.metrics.recorder_oldest_seconds = self.recorder.behind
        for pool in self.pools.values():
            self.metrics.upstream_health[(pool.name,)] = STATES.index(pool.health.state(now))
            self.metrics.upstream_waiting[(pool.name,)] = pool.gate.waiting + pool.concurrency_limit.waiting
            self.metrics.connections(pool.name, "idle", pool.idle)
            self.metrics.connections(pool.name, "busy", pool.running)


def _unclear(field: str, wrong: str) -> Refusal:
    message = (
        f"{wrong}, so nothing tells which model is asked for, and here routes, releases or budgets depend on that: "
        "send JSON (or a form) with one `model`"
    )
    return ClientFault(400, "unreadable", message, field)
