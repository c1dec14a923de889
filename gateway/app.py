"""The only place where things are wired together, started, and stopped in order.

Start: tape, recorder, upstreams, control plane, listener; then the address is printed and readiness goes on.
Stop (SIGTERM, SIGINT): readiness off, no new connections, running calls finish within `limits.drain_seconds` (a second
signal ends the wait), what is left is broken off and recorded as interrupted, the recorder writes its queue, the tape
is closed.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import time
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import aiohttp
import uvloop
from aiohttp import web

from penstock.gateway.api import routes
from penstock.gateway.api.context import Control
from penstock.gateway.api.operations import Operations
from penstock.gateway.calls import call_log
from penstock.gateway.calls.admission import Admission
from penstock.gateway.calls.auth import Auth, Holder
from penstock.gateway.calls.conversations import Conversations
from penstock.gateway.config import Config, ConfigError, admin_key, audit_key, load, read_key
from penstock.gateway.definitions.service import Definitions
from penstock.gateway.http import log
from penstock.gateway.http.client_connection import ClientConnection
from penstock.gateway.http.redact import Redactor
from penstock.gateway.index.link import Link
from penstock.gateway.index.sql.runner import Queries
from penstock.gateway.masking.masker import Tally, masker
from penstock.gateway.mcp.all_features import all_features
from penstock.gateway.mcp.audit import Audit
from penstock.gateway.mcp.features import Mcp
from penstock.gateway.mcp.hosted.bridge import Bridge
from penstock.gateway.mcp.hosted.ends import Ends
from penstock.gateway.mcp.own_server import host_own
from penstock.gateway.mcp.servers import Servers
from penstock.gateway.mcp.sessions import Sessions
from penstock.gateway.mcp.wrapped.ingest import Wrapped
from penstock.gateway.mcp.wrapped.ingest import add_to as add_wrapped
from penstock.gateway.metrics import Metrics
from penstock.gateway.model.known_secrets import NONE, Secrets, own_secrets
from penstock.gateway.model.log_settings import Log
from penstock.gateway.model.prices import BUILTIN, Prices
from penstock.gateway.otlp.ingest import INGEST, Ingest
from penstock.gateway.policy.policy import Policy
from penstock.gateway.policy.questions import Questions
from penstock.gateway.proxy.exact.session_store import Exact
from penstock.gateway.proxy.features import features
from penstock.gateway.proxy.shared import Shared
from penstock.gateway.proxy.translation.translator import make_translator
from penstock.gateway.queue.attempts import woken
from penstock.gateway.queue.dispatcher import Dispatcher
from penstock.gateway.queue.waiting import Waiting
from penstock.gateway.releases.adapter_keeper import AdapterKeeper
from penstock.gateway.releases.catalog import Pins
from penstock.gateway.releases.check import Checking
from penstock.gateway.releases.coverage.watch import Watch
from penstock.gateway.releases.driver import Driver
from penstock.gateway.releases.jobs import Jobs
from penstock.gateway.releases.operations import LiveReleases
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.releases.rehearsal.live import Rehearsals
from penstock.gateway.releases.rehearsal.stage import Replays
from penstock.gateway.releases.replay.sender import Context
from penstock.gateway.releases.shadow.stage import Shadow
from penstock.gateway.retention.service import Retention
from penstock.gateway.runs.service import RunService
from penstock.gateway.server.bridge import ControlPlane
from penstock.gateway.server.dispatch import Dispatch
from penstock.gateway.server.health import State
from penstock.gateway.server.listening import Listening, listen
from penstock.gateway.server.tls import server_tls
from penstock.gateway.store import MAP_BYTES, MEMORY_BYTES, Store
from penstock.gateway.store.audit_log import AuditLog
from penstock.gateway.store.directory import TapeError
from penstock.gateway.store.feed import Feed
from penstock.gateway.store.recorder import Recorder
from penstock.gateway.upstreams.pool import Pool
from penstock.gateway.upstreams.routes import Routes
from penstock.gateway.upstreams.wanted import WantedHosts
from penstock.gateway.webhooks.service import Webhooks

if TYPE_CHECKING:
    from penstock.gateway.otlp.exporter import Exporter

_TICK_SECONDS = 0.1
_LOOK_EVERY = 10
"""Ticks between two looks at clients that send nothing."""
_CONTROL_SECONDS = 1.0


def open_store(
    path: Path, map_bytes: int = MAP_BYTES, memory_bytes: int = MEMORY_BYTES, secrets: Secrets = NONE
) -> Store:
    """A tape that is written: with what the queue and releases remember of it."""
    return Store(
        path,
        followers=(Waiting(), LiveReleases(audit_key())),
        woken=woken,
        map_bytes=map_bytes,
        memory_bytes=memory_bytes,
        secrets=secrets,
    )


def _make_auth(store: Store, config: Config) -> Auth:
    named = [(one.sha256, Holder(one.name, one.role)) for one in config.key]
    try:
        return Auth(admin_key(), store.secret(), read_key(), named)
    except ValueError as error:
        store.close()
        raise ConfigError(str(error)) from None


class Gateway:
    """A running gateway. `start`, then `stop`."""

    def __init__(self, config: Config) -> None:
        """Opens the tape; raises `TapeError` or `ConfigError` when it cannot start."""
        config.refuse_open_door()
        self.config = config
        self._translator = make_translator(config)
        self.metrics = Metrics()
        self._tls = server_tls(config.tls, self.metrics)
        own = tuple(key for key in (admin_key(), read_key(), audit_key()) if key is not None)
        self.pools = {upstream.name: Pool(upstream, own) for upstream in config.upstreams()}
        own_keys, tally = own_secrets(config.secrets()), Tally(self.metrics.masked, self.metrics.masking_failures)
        self._redactor = Redactor(own_keys, masker(config.masking, own_keys, tally))
        self.questions = Questions()
        self.store = open_store(config.data, secrets=self._redactor.tape)
        self.feed = Feed(self.store.cursor())
        self.auth = _make_auth(self.store, config)
        tell = call_log.teller(config.log)
        self.recorder = Recorder(self.store, config.tape, self.metrics, self.feed.committed, tell)
        self.state = State(self.metrics, self.recorder)
        # Times are counted from here, so that they never run backwards while the process lives.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self.dispatcher = Dispatcher(
            self.recorder, self.metrics, self._now_ns, config.trust_agent_rewards, config.quiet_seconds
        )
        ends = Ends(self.dispatcher, self.store, self._now_ns)
        self.bridge = Bridge(config.mcp.servers.items(), self._redactor.own, ends)
        self.mcp = Mcp(Servers(config, own, self.bridge), Sessions())
        self._wanted = WantedHosts([*config.upstreams(), *self.mcp.servers.hosts], own)
        self._make_releases()
        self.audit = Audit(self.store, self.recorder, self.dispatcher, self.releases, self._now_ns)
        prices = config.prices or BUILTIN
        self.index = Link(config.data, config.index.when, lambda: self.feed.cursor, prices=prices, log=config.log)
        self.webhooks = Webhooks(config.webhook, self.store, self.recorder, self.feed, self.metrics, self._now_ns)
        self.retention = Retention(
            config.retention, config.tape.keep_bytes, self.store, self.recorder, self.metrics, self._now_ns,
            lambda: self.proxy.busy, self.pins.forget,
        )  # fmt: skip
        self._make_control()
        self._exporter = self._make_exporter()
        self._session: aiohttp.ClientSession | None = None
        self._listening: Listening
        self._ticker: asyncio.TimerHandle
        self._ticks = 0
        self._drained = asyncio.Event()

    def _make_releases(self) -> None:
        """What decides which version a call gets, and what tries versions."""
        upstreams = {upstream.name: upstream for upstream in self.config.upstreams()}
        self.adapter_keeper = AdapterKeeper(self.store, upstreams, self._ask_upstreams, self._now_ns)
        repaired = self.adapter_keeper.repaired
        self.pins = Pins(ReleaseReader(self.store), self.recorder, self.metrics, self._redactor, repaired)
        checking = Checking(ReleaseReader(self.store).resource, upstreams, self._ask_upstreams)
        self._routes = Routes(self.config.route, self.pools, {upstream.name for upstream in self.config.upstream})
        context = Context(
            self.store,
            self.pins,
            self.recorder,
            self.pools,
            self._routes,
            self._ask_upstreams,
            self._now_ns,
            self._redactor,
        )
        self._exact = Exact(self._ask_upstreams, self.store, self.recorder, self.metrics)
        self.shadow = Shadow(context)
        self.rehearsals = Rehearsals(context)
        jobs = Jobs(checking, Replays(context, self.rehearsals, self.feed), self.shadow)
        self.releases = Driver(context, self.feed, jobs, self.rehearsals, upstreams, self.adapter_keeper.changed)
        fell, hidden = self.releases.uncovered, self._redactor.tape
        self.coverage = Watch(self.pins, self.recorder, self.metrics, self._now_ns, fell, hidden)

    def _make_control(self) -> None:
        """The control API."""
        runs = RunService(self.store, self.recorder, self._now_ns)
        servers = self.config.mcp.servers
        self.definitions = Definitions(self.store, self.recorder, self.metrics, self._now_ns, servers)
        self.audit_log = AuditLog(self.store, self.recorder, self._now_ns)
        context = Control(
            self.store, self.dispatcher, self.releases, runs, self.feed, self.pools, self.auth, self.metrics,
            self.state, self.definitions, self.audit_log, self.webhooks, self.questions, Policy(self.config.policy),
            self.retention, self.index, Queries(self.index, self.config.data / "index", self.config.index.sql),
            Prices(self.config.prices), self.config.route,
        )  # fmt: skip
        self.operations = Operations(context, routes.OPERATIONS)
        application = routes.make_control(context)
        application[INGEST] = Ingest(self.dispatcher, self.store, self.metrics.otlp_spans)
        recorded = self.config.limits.recorded_bytes
        add_wrapped(application, Wrapped(self.recorder, self._redactor, self.definitions, recorded))
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_CONTROL_SECONDS,
            auto_decompress=False,
        )

    def _ask_upstreams(self) -> aiohttp.ClientSession:
        """The session for requests that the gateway itself makes."""
        if self._session is None:
            # Concurrency is bounded where it is asked for; what an upstream sets as a cookie is no other call's.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    def _make_exporter(self) -> Exporter | None:
        if self.config.otlp.endpoint is None:
            return None
        # Protobuf costs a tenth of a second and some megabytes: only where it is used.
        from penstock.gateway.otlp.exporter import Exporter

        servers = {one.name: one.base_url for one in self.config.upstreams()}
        servers |= {name: one.url for name, one in self.config.mcp.servers.items() if one.url is not None}
        return Exporter(self.config.otlp, servers, self.store, self.feed, self.dispatcher, self.metrics, self._now_ns)

    def _now_ns(self) -> int:
        """The clock of the tape."""
        return self._epoch_ns + time.monotonic_ns()

    async def start(self) -> tuple[str, int]:
        """Listens; returns host and port."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        plane = ControlPlane(server, self.operations)
        self.proxy: Shared = Shared(
            config=self.config,
            pools=self.pools,
            routes=self._routes,
            admission=Admission(self.auth, Conversations(), self.config.token_required),
            recorder=self.recorder,
            metrics=self.metrics,
            redactor=self._redactor,
            pins=self.pins,
            rehearsals=self.rehearsals,
            features=features(self._translator, self._redactor.own, self._exact, self.shadow, self.metrics),
            epoch_ns=self._epoch_ns,
        )
        self.mcp.features = all_features(self.proxy, self.definitions, self.questions, self.audit)
        self._port = port = Dispatch(self.proxy, plane, self.mcp, self._wanted)
        self.recorder.start()
        await self.bridge.start()
        await self.dispatcher.start()
        await self.webhooks.start()
        await self.releases.start()
        self.coverage.start()
        self.adapter_keeper.start()
        self.definitions.start()
        self.retention.start()
        if self._exporter is not None:
            await self._exporter.start()
        self._listening = await listen(self.config, lambda: ClientConnection(port), self._tls)
        self._tick()
        # Objects that live for good need not be collected; calls leave no cycles behind. To look for any among all of
        # them takes a tenth of a second and finds none.
        gc.collect(1)
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        self.state.started = True
        host_own(self.mcp.servers, self.bridge, self.config, self.auth, self._listening.own_url)
        return self._listening.address

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)
        now = monotonic()
        self.proxy.sweep(now)
        self.questions.sweep(self._now_ns())
        self.mcp.servers.measure(self.metrics)
        self._ticks += 1
        if self._ticks % _LOOK_EVERY == 0:
            self.mcp.servers.expire(now)
            self._wanted.expire(now)
            self.mcp.sessions.sweep(now)
            self.index.tend(self.state.draining)
            if self._tls is not None:
                self._tls.look()
        # Idle clients are many and in no hurry.
        for client in list(self._port.clients) if self._ticks % _LOOK_EVERY == 0 else ():
            if client.overdue(now, self.config.limits.client_timeout):
                client.close()
        self.metrics.clients = len(self._port.clients)
        if self.state.draining and not self.proxy.running:
            self._drained.set()

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Drains and closes everything, in order; `hurry` ends the wait for running calls."""
        self.state.draining = True
        self._listening.close()
        for client in list(self._port.clients):
            client.drain()
        self.questions.close()
        await self._wait_for_calls(hurry or asyncio.Event())
        for call in list(self.proxy.running):
            call.give_up()
        self.mcp.sessions.close()
        await self.audit.finish(_CONTROL_SECONDS)
        await self.bridge.stop()
        if self._exporter is not None:
            await self.recorder.flush()
            await self._exporter.stop()
        await self.retention.stop()
        await self.dispatcher.stop()
        await self.coverage.stop()
        await self.releases.stop()
        await self.adapter_keeper.stop()
        await self.webhooks.stop()
        await self.definitions.close()
        # This releases answers that wait for the tape.
        await self.recorder.close()
        await self.operations.finish(_CONTROL_SECONDS)
        self._ticker.cancel()
        if self._tls is not None:
            await self._tls.stop()
        for client in list(self._port.clients):
            client.close()
        await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        for pool in (*self.pools.values(), *self.mcp.servers.pools.values(), *self._wanted.pools.values()):
            pool.close()
        await asyncio.to_thread(self.index.close)
        self.store.close()

    async def _wait_for_calls(self, hurry: asyncio.Event) -> None:
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._drained, hurry)]
        await asyncio.wait(waiting, timeout=self.config.limits.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()


async def _run(config: Config) -> None:
    gateway = Gateway(config)
    host, port = await gateway.start()
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    # Whoever reads the address may send a signal at once.
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if config.tls.certificate is None else "https"
    print(f"penstock listening on {scheme}://{shown}:{port}", flush=True)
    await stopping.wait()
    await gateway.stop(hurry)


def _take_all_descriptors() -> None:
    """Raises the soft limit of descriptors: a call is two connections, and the usual limit of 1024 would be a hidden
    cap.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run(config_path: Path | None, data: Path | None, host: str | None, port: int | None) -> None:
    """Runs a gateway until it is told to stop. Raises `SystemExit` with a message when it cannot start."""
    settings = Log()
    log.set_up(settings)
    _take_all_descriptors()
    try:
        config = load(config_path, data=data, host=host, port=port)
        settings = config.log
        log.set_up(settings, own_secrets(config.secrets()))
        uvloop.run(_run(config))
    except (ConfigError, TapeError, OSError) as error:
        raise log.end(settings, f"penstock: {error}") from None
