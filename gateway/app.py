"""The only place where all parts of a gateway are wired together, started, and stopped in order.

Start: tape, recorder, upstreams, control plane, listener; readiness goes on last. Stop: readiness off; after
`limits.drain_delay` no new connections; running calls finish within `limits.drain_seconds`; calls that are left are
broken off and recorded as interrupted; the recorder writes its queue, and the tape is closed.

If one process takes over from another (`process.handover`), the old one first ends the services that only one process
may run (`process.services`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from penstock.gateway.api import routes, state
from penstock.gateway.api.changes import end_followers
from penstock.gateway.api.guard import Control
from penstock.gateway.api.lightning import LightningService
from penstock.gateway.api.lightning_events import LightningServerReader
from penstock.gateway.api.lightning_reads import LightningReader
from penstock.gateway.api.lightning_server import LightningServer
from penstock.gateway.api.operations import Operations
from penstock.gateway.api.pagination import RolloutCosts
from penstock.gateway.api.tools import FrameReceiver, add_wrapped, host_builtin_server
from penstock.gateway.config import GatewayConfig, admin_key, audit_key, read_key
from penstock.gateway.followers.index.link import IndexLink
from penstock.gateway.followers.index.sql.runner import SqlRunner
from penstock.gateway.followers.otlp.ingest import RECEIVER, TelemetryReceiver
from penstock.gateway.followers.webhooks import WebhookService
from penstock.gateway.model.known_secrets import own_secrets
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.process import services
from penstock.gateway.process.dispatch import ControlPlane, Dispatch, LeaderPlane, PeerDispatch
from penstock.gateway.process.handover import ALONE, HandoverGrant, HandoverOffer
from penstock.gateway.process.listeners import Listeners, listen, server_tls
from penstock.gateway.process.other_writers import OtherWriters
from penstock.gateway.process.services import (
    ProcessHealth,
    Service,
    ServiceGroup,
    cut_off,
    make_auth,
    open_store,
    stop_all,
    wait_for_any,
)
from penstock.gateway.process.worker_peers import WorkerPeers, WorkerServices
from penstock.gateway.process.workers import ParentChannel
from penstock.gateway.reading.policy.policy import ToolPolicy
from penstock.gateway.reading.policy.questions import QuestionQueue
from penstock.gateway.releases.coverage import CoverageMonitor
from penstock.gateway.releases.driver import Driver, DriverCallbacks, StageJobs
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.tape.retention import RetentionService
from penstock.gateway.tape.store.audit_log import AuditLog
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tools.bridge import Bridge, TapeProcessJournal
from penstock.gateway.tools.call import build_mcp_middleware
from penstock.gateway.tools.definition_enforcement import DefinitionService
from penstock.gateway.tools.middleware import McpContext
from penstock.gateway.tools.policy_enforcement import PolicyAudit
from penstock.gateway.tools.servers import ServerRegistry
from penstock.gateway.tools.sessions import SessionTable
from penstock.gateway.traffic.budgets.service import Budgets, prices_of
from penstock.gateway.traffic.calls import call_record
from penstock.gateway.traffic.calls.admission import Admission
from penstock.gateway.traffic.calls.batches import BatchResultService
from penstock.gateway.traffic.proxy.exact.sessions import ExactSessionStore
from penstock.gateway.traffic.proxy.plan import build_middleware
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.proxy.translation.translator import make_translator
from penstock.gateway.traffic.trials.adapter_keeper import AdapterKeeper
from penstock.gateway.traffic.trials.check import CheckJob
from penstock.gateway.traffic.trials.rehearsal import Rehearsals, ReplayJob
from penstock.gateway.traffic.trials.sender import ReleaseContext
from penstock.gateway.traffic.trials.shadow import ShadowJob
from penstock.gateway.traffic.upstreams.cloud_auth import CloudAuthService
from penstock.gateway.traffic.upstreams.pool import ConnectionPool, HealthChecker
from penstock.gateway.traffic.upstreams.routes import DirectHosts, RouteTable
from penstock.gateway.traffic.versions import PinTable
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.http.request import HEADER_BYTES
from penstock.gateway.wire.masking.masker import MaskingCounts, masker
from penstock.gateway.work.dispatcher import Dispatcher
from penstock.gateway.work.runs import RunService

if TYPE_CHECKING:
    from penstock.gateway.followers.otlp.exporter import Exporter
    from penstock.gateway.process.terminal import CallLines

_log = logging.getLogger("penstock.app")
CLIENT_S = 120.0
"""Seconds without a byte after which a client's connection is closed, those that a request's head may take, and those
in which a client may take nothing of an answer that waits for it."""
_TICK_SECONDS = 0.1
"""Time between two ticks while something runs."""
_CHECK_SECONDS = 1.0
"""Time between two checks of all that may be late by a second, and between two ticks while nothing runs."""
_CONTROL_SECONDS = 1.0


class Gateway:
    """A running gateway. `start`, then `stop`."""

    def __init__(
        self, config: GatewayConfig, taken: HandoverGrant | None = None, lines: CallLines | None = None
    ) -> None:
        """Opens the tape; raises `TapeError` or `ConfigError` if it cannot start. `taken`: the handover from another
        process; `lines`: shows calls on the terminal."""
        config.refuse_open_door()
        self.config, self._prices = config, prices_of(config)
        self._translator = make_translator(config)
        self.metrics = Metrics()
        self._tls = server_tls(config.tls, self.metrics)
        own = tuple(key for key in (admin_key(), read_key(), audit_key()) if key is not None)
        self._taken, self._place = taken, ALONE if taken is None else taken.place
        if not self._place.number:
            services.warn(config, self._prices)
        share = self._place.share
        self.pools = {upstream.name: ConnectionPool(upstream, own, share) for upstream in config.upstreams()}
        own_keys = own_secrets(config.secrets())
        tally = MaskingCounts(self.metrics.masked, self.metrics.masking_failures)
        self._redactor = Redactor(own_keys, masker(config.masking, own_keys, tally), config.tape.media == "keep")
        self.questions = QuestionQueue()
        self._work = WorkerPeers(self._place)
        lock = None if taken is None else taken.lock
        self.store = open_store(config.data, secrets=self._redactor.tape, lock=lock)
        self.feed = ChangeFeed(self.store.cursor())
        self.auth = make_auth(self.store, config)
        self._lines = lines
        tell = call_record.call_logger(config.log, self.metrics, None if lines is None else lines.add)
        self.recorder = Recorder(self.store, config.tape, self.metrics, self._committed, tell, self._work.flush_peers)
        self.state = ProcessHealth(self.recorder)
        # Monotonic times are added to this, so that the tape's clock never runs backwards while the process lives.
        self._epoch_ns = self._place.epoch_ns or time.time_ns() - time.monotonic_ns()
        trusted, quiet_s = config.trust_agent_rewards, config.quiet_seconds
        self.dispatcher = Dispatcher(self.recorder, self.metrics, self._now_ns, trusted, quiet_s)
        ends = TapeProcessJournal(self.dispatcher, self.store, self._now_ns)
        self.bridge = Bridge(config.mcp.servers.items(), self._redactor.own, ends)
        self.mcp = McpContext(ServerRegistry(config, own, self.bridge), SessionTable())
        self._wanted = DirectHosts([*config.upstreams(), *self.mcp.servers.hosts], own)
        self._make_releases()
        self.audit = PolicyAudit(self.store, self.recorder, self.dispatcher, self.releases, self._now_ns)
        when, prices = config.index.when, self._prices
        self.index = IndexLink(config.data, when, lambda: self.feed.cursor, prices=prices, log=config.log)
        self.webhooks = WebhookService(config.webhook, self.store, self.recorder, self.feed, self.metrics, self._now_ns)
        self.retention = RetentionService(
            config.retention, config.tape.keep_bytes, self.store, self.recorder, self.metrics, self._now_ns,
            self._work.active_rollouts, self._work.forget,
        )  # fmt: skip
        self.budgets = Budgets(
            config.budget, self._prices, self.store, self.recorder, self.metrics, self._now_ns, self._work
        )
        self._make_control()
        self._make_services()
        self._session: aiohttp.ClientSession | None = None
        self._listening: Listeners
        self._ticker: asyncio.TimerHandle | None = None
        self._next_check = 0.0
        followed = self.releases.other_writer_committed if self._work.is_leader else self.pins.reload
        self._others = OtherWriters(self.store, self.recorder, self.dispatcher, followed)
        self.offer: HandoverOffer | ParentChannel
        """The way to hand over to another process."""
        self._calls_ended, self._clients_gone = asyncio.Event(), asyncio.Event()

    def _make_releases(self) -> None:
        """Make the parts that decide which version a call gets, and that try versions."""
        known = {upstream.name: upstream for upstream in self.config.upstreams()}
        self.adapter_keeper = AdapterKeeper(self.store, known, self._ask_upstreams, self._now_ns)
        repaired, gave = self._work.adapter_repair(self.adapter_keeper), self._work.notify_assigned
        self.pins = PinTable(ReleaseReader(self.store), self.recorder, self.metrics, self._redactor, repaired, gave)
        checking = CheckJob(ReleaseReader(self.store).resource, known, self._ask_upstreams)
        self._checks = HealthChecker(self.pools.values(), self._ask_upstreams, self.metrics.upstream_checks)
        self._routes = RouteTable(self.config.route, self.pools, {upstream.name for upstream in self.config.upstream})
        context = ReleaseContext(
            self.store, self.pins, self.recorder, self.pools, self._routes, self._ask_upstreams, self._now_ns,
            self._redactor,
        )  # fmt: skip
        self._exact = ExactSessionStore(self._ask_upstreams, self.store, self.recorder, self.metrics)
        self.shadow = ShadowJob(context)
        self.rehearsals = Rehearsals(context)
        jobs = StageJobs(checking, ReplayJob(context, self.rehearsals, self.feed), self.shadow)
        callbacks = DriverCallbacks(self.pins.reload, self._work.follow_releases, self._release_changed)
        self.releases = Driver(self.store, self.recorder, self._now_ns, self.feed, jobs, known, callbacks)
        fell, hidden = self.releases.on_coverage_fall, self._redactor.tape
        self.coverage = CoverageMonitor(self.pins, self.recorder, self.metrics, self._now_ns, fell, hidden)

    def _release_changed(self) -> None:
        self.rehearsals.changed()
        self.adapter_keeper.changed()

    def _make_control(self) -> None:
        """Make the control API, and the parts behind it that no call waits for."""
        count, counted = self.budgets.correct_batch, self.budgets.forget_sums
        self.batches = BatchResultService(self.store, self.recorder, self.metrics, self._now_ns, count, counted)
        runs = RunService(self.store, self.recorder, self._now_ns)
        servers = self.config.mcp.servers
        self.definitions = DefinitionService(self.store, self.recorder, self.metrics, self._now_ns, servers)
        self.audit_log = AuditLog(self.store, self.recorder, self._now_ns)
        context = Control(
            self.store, self.dispatcher, self.releases, self.rehearsals, runs, self.feed, self._work, self.auth,
            self.metrics, self.state, self.definitions, self.audit_log, self.webhooks, self.questions,
            ToolPolicy(self.config.policy), self.retention, self.index,
            SqlRunner(self.index, self.config.data / "index", self.config.index.sql), RolloutCosts(self._prices),
            self.config.route, self.budgets,
        )  # fmt: skip
        self.operations = Operations(context, routes.OPERATIONS)
        lightning = LightningReader(self.store)
        self._lightning = LightningService(context, lightning)
        self._lightning_server = LightningServer(
            context, lightning, LightningServerReader(self.store), self.config.upstream
        )
        application = routes.make_application(context)
        application[RECEIVER] = self._telemetry = TelemetryReceiver(self.dispatcher, self.store, self.metrics)
        recorded = self.config.limits.recorded_bytes
        add_wrapped(application, FrameReceiver(self.recorder, self._redactor, self.definitions, recorded))
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_CONTROL_SECONDS,
            auto_decompress=False,
            # The listener limits the size of heads.
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
        )

    def _make_services(self) -> None:
        """List the services: each may need those above it in its group, and ends before them."""
        self._exporter = self._make_exporter()
        leading: dict[str, Service] = {
            "index": self.index,
            "webhooks": self.webhooks,
            "adapters": self.adapter_keeper,
            "releases": self.releases,
            "queue": self.dispatcher,
            "retention": self.retention,
        }
        if self._exporter is not None:
            leading["telemetry"] = self._exporter
        self._leading = ServiceGroup(leading, patient=True)
        """Services that only one of the processes that write a tape may run."""
        self._beside = ServiceGroup({
            "credentials of clouds": CloudAuthService(
                [*self.pools.values(), *self._wanted.pools.values()], self._redactor, self.store.hide
            ),
            "tool definitions": self.definitions,
            "prompt coverage": self.coverage,
            "results of batches": self.batches,
            "budgets": self.budgets,
            "health checks": self._checks,
            "hosted tools": self.bridge,
        })  # fmt: skip
        """Services that several processes may run at the same time."""

    def _ask_upstreams(self) -> aiohttp.ClientSession:
        """The session for requests that the gateway itself makes."""
        if self._session is None:
            # Callers bound concurrency themselves. A cookie that an upstream sets must not reach other calls.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    def _make_exporter(self) -> Exporter | None:
        if self.config.otlp.endpoint is None:
            return None
        # Importing protobuf costs a tenth of a second and some megabytes.
        from penstock.gateway.followers.otlp.exporter import Exporter

        servers = {one.name: one.base_url for one in self.config.upstreams()}
        servers |= {name: one.url for name, one in self.config.mcp.servers.items() if one.url is not None}
        return Exporter(self.config.otlp, servers, self.store, self.feed, self.dispatcher, self.metrics, self._now_ns)

    def _committed(self, cursor: int, records: Sequence[bytes]) -> None:
        self.feed.committed(cursor, records)
        self._work.notify_write()

    def _now_ns(self) -> int:
        """The time of the tape's clock, in nanoseconds."""
        return self._epoch_ns + time.monotonic_ns()

    async def start(self) -> tuple[str, int]:
        """Listen; return host and port. In a handover the old process has ended its exclusive services before this one
        begins its own."""
        await self._prepare()
        self._listening = await listen(self.config, lambda: ClientConnection(self._port), self._tls, self._taken)
        if self._taken is not None:
            await self._taken.ready()
        if self._work.is_leader:
            await self._leading.start()
        else:
            await self.pins.reload()  # as the leader's services do; waiting clients are served at once
        await self._work_together()
        await self._listening.accept()
        self.offer = self._made_offer()
        self._next_check = monotonic() + _CHECK_SECONDS
        self._tick()
        self.state.started = True
        if self._work.is_leader:
            host_builtin_server(self.mcp.servers, self.bridge, self.config, self.auth, self._listening.own_url)
        return self._listening.address

    def _made_offer(self) -> HandoverOffer | ParentChannel:
        if self._taken is not None and self._place is not ALONE:
            return ParentChannel(self._taken.channel, self._let_go)
        lock = self.store.lock
        assert lock is not None
        return HandoverOffer(self.config.data, lock, self._listening.listen_sockets, self._let_go)

    async def _work_together(self) -> None:
        """Connect with the other workers of this gateway."""
        view, wrote = state.view, self._others.poll_now
        parts = WorkerServices(
            self.store, self.recorder, self.pins, self.pools, self.measured, self.budgets,
            lambda: self.proxy.active_rollouts, wrote, view,
        )  # fmt: skip
        inside = PeerDispatch(self._port, self.mcp, self._wanted)
        self._inside = inside.clients
        await self._work.start(parts, lambda: ClientConnection(inside))

    async def _prepare(self) -> None:
        """Start the parts that may run in another process at the same time."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        plane = ControlPlane(server, self.operations, self._lightning, self._lightning_server)
        self.proxy: ProxyContext = ProxyContext(
            config=self.config,
            pools=self.pools,
            routes=self._routes,
            admission=Admission(self.auth, self._work.joining, self.config.token_required, self.config.loopback),
            recorder=self.recorder,
            metrics=self.metrics,
            redactor=self._redactor,
            pins=self.pins,
            rehearsals=self.rehearsals,
            middleware=build_middleware(self._translator, self._redactor.own, self._exact, self.shadow, self.metrics),
            epoch_ns=self._epoch_ns,
            strict=self.config.tape.record == "strict",
            budgets=self.budgets.or_none,
            notify_fetched=self._on_fetched,
            wake=self._wake,
        )
        self.mcp.features = build_mcp_middleware(self.proxy, self.definitions, self.questions, self.audit)
        self._first = None if self._work.is_leader else LeaderPlane(self.config.data)
        self._port = Dispatch(self.proxy, plane, self.mcp, self._wanted, self._first)
        self.recorder.start()
        await self._beside.start()

    def _on_fetched(self) -> None:
        self.batches.notify()
        self._telemetry.provider.notify()

    async def _let_go(self) -> None:
        """Hand over: another process is ready and gets all new connections. This one serves the clients that it has."""
        self._drain()
        self._work.leave()
        # This may take a moment, and new connections must not wait for it.
        await stop_all({"budgets": self.budgets.move_to_tape, **self._leading_ends(continued=True)})
        self._listening.accept_no_more()
        await end_followers(self._runner.app)
        # A call that has ended for its client must be on the tape before the other process can be asked about it.
        self.proxy.end_durably()
        await self.recorder.flush()

    def _leading_ends(self, continued: bool) -> Mapping[str, Callable[[], Awaitable[object]]]:
        """Return the steps that end the leading services. `continued`: another process continues them at once."""
        if self._exporter is None:
            return {"leading services": self._leading.stop}
        self._exporter.continued = continued
        # The exporter reads the tape.
        return {"recorder": self.recorder.flush, "leading services": self._leading.stop}

    def _drain(self) -> None:
        """Take no new clients and no further requests of those that are there."""
        self.state.draining = True
        self._port.leave()
        self._wake()

    def _wake(self) -> None:
        """Tick within a tenth of a second, as calls and the end of a gateway need it. A tick that is due before is not
        put off: calls may begin and end all the time."""
        loop = asyncio.get_running_loop()
        if self._ticker is not None and self._ticker.when() > loop.time() + _TICK_SECONDS:
            self._ticker.cancel()
            self._ticker = loop.call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        busy = self.proxy.running or self.state.draining or self._others.present
        self._ticker = asyncio.get_running_loop().call_later(_TICK_SECONDS if busy else _CHECK_SECONDS, self._tick)
        now = monotonic()
        self.proxy.sweep(now)
        self.questions.sweep(self._now_ns())
        if self.state.draining and not self.proxy.running:
            self._calls_ended.set()
            if not self._port.clients:
                self._clients_gone.set()
        # A tick may be a little early, and the next one a whole second later.
        check = now >= self._next_check - _TICK_SECONDS / 2
        if check:
            self._next_check = now + _CHECK_SECONDS
        try:
            self._others.poll(count=check)
        except Exception:
            _log.exception("other processes that write the tape cannot be seen")
        if check:
            self._check(now)

    def _check(self, now: float) -> None:
        """Do what is needed once a second."""
        for pool in (*self.pools.values(), *self._wanted.pools.values()):
            pool.expire(now)
        self.mcp.servers.expire(now)
        self.mcp.sessions.sweep(now)
        self._work.tick()
        self.index.ensure_running(not self._leading.begun)
        if self._tls is not None:
            self._tls.check_files()
        for client in list(self._port.clients):
            client.expire(now, CLIENT_S)

    def measured(self) -> Metrics:
        """Return the metrics, with gauges as they are now."""
        self.proxy.measure(monotonic())
        self.mcp.servers.measure(self.metrics)
        self.metrics.clients = len(self._port.clients)
        return self.metrics

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """End everything, in order, after running calls have ended; `hurry` ends every wait. The log names calls that
        are cut off."""
        hurry = hurry or asyncio.Event()
        limits, taken = self.config.limits, self.offer.taken.is_set()
        self._drain()
        if taken:
            await wait_for_any((self._clients_gone, hurry), limits.drain_seconds)
        else:
            await wait_for_any((hurry,), limits.drain_delay)
        self._listening.close()
        for client in list(self._port.clients):
            client.drain()
        self.questions.close()
        await wait_for_any((self._calls_ended, hurry), 0.0 if taken else limits.drain_seconds)
        cut_off(self.proxy.running)
        # Other workers may need the leader until they end.
        await wait_for_any((self._work.no_peers, hurry), limits.drain_seconds)
        if self._first is not None:
            await self._first.finish(_CONTROL_SECONDS)
        self.mcp.sessions.close()
        await stop_all({
            "policies": partial(self.audit.finish, _CONTROL_SECONDS), "services": self._beside.stop,
            "handover": self.offer.close, **self._leading_ends(continued=False), "other writers": self._others.stop,
            "other workers": self._work.stop,
        })  # fmt: skip
        # This releases answers that wait for the tape.
        await self.recorder.close()
        if self._lines is not None:
            self._lines.close()
        await self.operations.drain(_CONTROL_SECONDS)
        await self._lightning.drain(_CONTROL_SECONDS)
        await self._lightning_server.drain(_CONTROL_SECONDS)
        if self._ticker is not None:
            self._ticker.cancel()
        if self._tls is not None:
            await self._tls.stop()
        for client in (*self._port.clients, *self._inside):
            client.close()
        await self._telemetry.provider.stop()
        await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        for pool in (*self.pools.values(), *self.mcp.servers.pools.values(), *self._wanted.pools.values()):
            pool.close()
        self.store.close()
