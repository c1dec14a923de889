"""Connections to an upstream, a model endpoint or a server of tools: how they are made, kept, limited, held back and
checked. Pools have no cap of their own.

If an idle link closes before it answers, the server's keep-alive timer was faster: the call is sent again on a fresh
link. Once a byte of an answer was seen, nothing is sent again from here; `proxy.failover_policy` decides on the next
upstream.

A call that waits for a place (`ConcurrencyLimit`) or at the gate (`UpstreamGate`) is an entry in a dictionary: no task,
no timer of its own. Whoever comes while others wait goes to the end.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from abc import ABC, abstractmethod
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import aiohttp

from penstock.gateway.config import UpstreamSettings
from penstock.gateway.model.state import LONGEST_HOLD_S
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.traffic.upstreams.cloud_auth import UpstreamAuth
from penstock.gateway.traffic.upstreams.health import HealthState, UpstreamHealth
from penstock.gateway.wire.dialects import FAMILIES
from penstock.gateway.wire.dialects.family import Family, KeyFilter, host_of
from penstock.gateway.wire.http.certificates import load_pair
from penstock.gateway.wire.http.headers import RequestHeads
from penstock.gateway.wire.http.request import Refusal, UpstreamFault
from penstock.gateway.wire.http.upstream_connection import UpstreamCaller, UpstreamConnection

CONNECT_S: Final = 10.0
"""Seconds until a connection (with TLS) must stand. A first packet that is lost is repeated after 1, 3 and 7 seconds;
from then on another upstream is the better bet."""
IDLE_S: Final = 55.0
"""Seconds after which an unused connection is closed: less than the minute of many servers and load balancers."""
SLOW_S: Final = 1.0
"""Seconds after which the server's machine repeats the first packet of a connection (RFC 6298, section 2.1)."""
_log = logging.getLogger("penstock.upstream")


# -- the pool ----------------------------------------------------------------------------------------------------------


class Connector(ABC):
    """Makes and keeps links to a server."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = 0
        self._tasks: dict[asyncio.Task[None], float] = {}
        """Connections that are being made, oldest first, with their begin in monotonic seconds."""

    @abstractmethod
    async def open(self, connection: UpstreamConnection) -> None:
        """Connect a link; raises `OSError` or `TimeoutError`, whose text goes to the client."""

    @abstractmethod
    def put_back(self, connection: UpstreamConnection) -> None:
        """Take back a link whose answer is complete."""

    @abstractmethod
    def forget(self, connection: UpstreamConnection) -> None:
        """Called when a connection is gone."""

    def connect(self, caller: UpstreamCaller) -> asyncio.Task[None]:
        """Make a connection and hand it to the caller; the task can be cancelled."""
        task = asyncio.get_running_loop().create_task(self._connect(caller))
        self._tasks[task] = monotonic()
        task.add_done_callback(self._connected)
        return task

    def keeps_waiting(self, now: float, task: asyncio.Task[None] | None = None) -> bool:
        """True if a connection other than `task` has been awaited for so long that the server may be down: a call that
        can go elsewhere need not wait as well."""
        oldest = next(iter(self._tasks.items()), None)
        return oldest is not None and oldest[0] is not task and now - oldest[1] > SLOW_S

    async def _connect(self, caller: UpstreamCaller) -> None:
        connection = UpstreamConnection(self)
        try:
            await self.open(connection)
        except TimeoutError as error:
            connection.give_up()
            caller.on_unreachable("connect_timeout", str(error))
        except (OSError, ValueError) as error:
            # ValueError: an invalid host name (UnicodeError), an address the transport does not take.
            caller.on_unreachable("connect", getattr(error, "strerror", None) or str(error))
        except asyncio.CancelledError:
            connection.give_up()
            raise
        else:
            caller.on_connected(connection)

    def _connected(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            # The call is left without a link and a task: the next sweep ends it.
            _log.error("a call could not be sent to upstream %r", self.name, exc_info=error)


class ConnectionPool(Connector):
    """The connections to one upstream."""

    def __init__(
        self, config: UpstreamSettings, own_keys: Sequence[str] = (), share: Callable[[int], int] = lambda most: most
    ) -> None:
        """`own_keys`: the gateway's own, never passed on. `config.key` is read here, so that a missing one stops the
        start and not the first call. `share`: returns this process's share of a number of places."""
        super().__init__(config.name)
        self.config = config
        parts = urlsplit(config.base_url)
        self.tls = parts.scheme == "https"
        self.address = (parts.hostname or "", parts.port or (443 if self.tls else 80))
        self.path = parts.path
        self.origin = f"{parts.scheme}://{parts.netloc}"
        key = config.key()
        self.credentials = () if key is None else config.family.credentials(key)
        """The headers with its key."""
        known = host_of(self.address[0])
        self.serves = frozenset({config.family, *(FAMILIES[it] for it in (known.serves if known else ()))})
        """The API families whose calls it gets."""
        self.keys = KeyFilter.of(config.family, self.address[0])
        self.heads = RequestHeads(
            parts.netloc.encode("ascii"),
            self.credentials,
            own_keys,
            config.session_header,
            self.keys,
            self.serves,
            config.auth is not None,
        )
        self.auth: UpstreamAuth | None = None
        """What signs its requests, if that is the gateway (`cloud_auth.CloudAuthService`)."""
        self.gate = UpstreamGate(config.name)
        self.health = UpstreamHealth()
        most = None if config.max_concurrent is None else share(config.max_concurrent)
        self.concurrency_limit = ConcurrencyLimit(f"upstream {config.name!r}", most)
        self._idle: deque[UpstreamConnection] = deque()
        self.transport = make_transport(config)

    def speaks_for(self, family: Family) -> bool:
        """True if its answers are believed about what is at a family's servers."""
        return True

    @property
    def running(self) -> int:
        """Number of connections with a call, and of those that are being made for one."""
        return self.connections - len(self._idle)

    @property
    def idle(self) -> int:
        """Number of connections that wait for a call."""
        return len(self._idle)

    def url(self, path: str) -> str:
        """Return the URL of a call to this path, for the record."""
        return self.origin + self.target(path)

    def target(self, path: str) -> str:
        """Return the path to request: base URL plus path, with a doubled `/v1` written once."""
        root = self.config.family.root
        if root and path.startswith(root):
            return path
        if path.startswith("/v1") and (self.config.family.versioned or self.path.endswith("/v1")):
            return self.path + path[3:] if path[3:4] in ("/", "?", "") else self.path + path
        return self.path + path

    def take(self) -> UpstreamConnection | None:
        """Return an idle connection; None when there is none."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                connection.reused = True
                return connection
        return None

    async def open(self, connection: UpstreamConnection) -> None:
        """Connect to the upstream. Raises `TimeoutError` after `CONNECT_S` seconds."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await self.transport.connect(connection, *self.address)
        except TimeoutError:
            raise TimeoutError(f"no connection within {CONNECT_S:g} s") from None

    def put_back(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next call."""
        connection.idle_since = monotonic()
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def expire(self, now: float) -> None:
        """Close connections that have been idle for too long; the oldest are on the left."""
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            self._idle.popleft().transport.abort()

    def close(self) -> None:
        """Close every idle connection; others end with their calls."""
        while self._idle:
            self._idle.popleft().transport.abort()


async def connect_inside(server: Callable[[], asyncio.Protocol], connection: UpstreamConnection) -> None:
    """Connect to a server in this process by a socket pair, which nobody else can reach. `server` makes its
    protocols."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    await loop.connect_accepted_socket(server, theirs)
    await loop.create_unix_connection(lambda: connection, sock=ours)


# -- the way: trusted certificates, the client certificate, the proxy --------------------------------------------------

_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n")
_LONGEST: Final = 64 << 10
"""Most bytes of a proxy's answer before its tunnel."""


@dataclass(frozen=True, slots=True)
class ConnectProxy:
    """A proxy that supports CONNECT."""

    host: str
    port: int
    url: str
    context: ssl.SSLContext | None
    """TLS to the proxy; None for a plain one."""
    credential: str | None = field(repr=False)
    """The value of Proxy-Authorization."""


@dataclass(frozen=True, slots=True)
class UpstreamTransport:
    """The way to one upstream: its TLS and its proxy."""

    context: ssl.SSLContext | None
    """TLS to the upstream; None for plain HTTP."""
    proxy: ConnectProxy | None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for a request of an aiohttp session."""
        made: dict[str, Any] = {} if self.context is None else {"ssl": self.context}
        if self.proxy is not None:
            sent = {} if self.proxy.credential is None else {"Proxy-Authorization": self.proxy.credential}
            made |= {"proxy": self.proxy.url, "proxy_headers": sent}
        return made

    async def connect(self, protocol: asyncio.Protocol, host: str, port: int) -> None:
        """Connect a protocol to a host; raises `OSError`."""
        loop, name = asyncio.get_running_loop(), None if self.context is None else host
        if self.proxy is None:
            await loop.create_connection(lambda: protocol, host, port, ssl=self.context, server_hostname=name)
            return
        transport = await self._tunnel(self.proxy, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        try:
            if self.context is not None:
                made = await loop.start_tls(transport, protocol, self.context, server_hostname=name)
                assert made is not None
                transport = made
            else:
                transport.set_protocol(protocol)
            protocol.connection_made(transport)
        except BaseException:
            transport.abort()
            raise

    async def _tunnel(self, proxy: ConnectProxy, authority: str) -> asyncio.Transport:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()
        try:
            transport, _ = await loop.create_connection(
                lambda: _ConnectProtocol(answer), proxy.host, proxy.port, ssl=proxy.context
            )
        except OSError as error:
            raise OSError(f"the proxy {proxy.url}: {error.strerror or error}") from None
        try:
            credential = "" if proxy.credential is None else f"Proxy-Authorization: {proxy.credential}\r\n"
            transport.write(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{credential}\r\n".encode("latin-1"))
            if (status := await answer) != 200:
                said = f"answers {status}" if status else "closed the connection, or is none"
                raise OSError(f"the proxy {proxy.url} {said}")
        except BaseException:
            transport.abort()
            raise
        return transport


class _ConnectProtocol(asyncio.Protocol):
    """Reads a proxy's answer about a tunnel: its status, 0 for an answer that cannot be read."""

    def __init__(self, answer: asyncio.Future[int]) -> None:
        self._answer, self._head = answer, b""

    def data_received(self, data: bytes) -> None:
        """Read the head of the answer. A server of HTTP or TLS is silent until it gets a request, so nothing comes
        after it."""
        self._head += data
        found = _STATUS.match(self._head)
        if found is not None:
            self._say(int(found[1]) if found.end() == len(self._head) or found[1] != b"200" else 0)
        elif len(self._head) > _LONGEST:
            self._say(0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._say(0)

    def _say(self, status: int) -> None:
        if not self._answer.done():
            self._answer.set_result(status)


def make_transport(config: UpstreamSettings) -> UpstreamTransport:
    """Return the way to an upstream; raises `ConfigError` where a file or a variable is missing."""
    tls = urlsplit(config.base_url).scheme == "https"
    shown = (config.client_cert, config.client_key)
    if shown != (None, None) and (shown[0] is None or not tls):
        why = "base_url is not https://" if shown[0] else "client_cert is missing, which names its certificate"
        key = "client_cert" if shown[0] else "client_key"
        raise ConfigError(f"upstream {config.name!r}: {key} does nothing: {why}")
    try:
        proxy = None if config.proxy is None else _proxy(config.proxy, config.proxy_auth(), config.ca_file)
        made = _context(config.ca_file) if tls else None
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"upstream {config.name!r}: ca_file {config.ca_file!r} cannot be read: {why}") from None
    if config.client_cert is not None:
        # Another upstream must not see the client certificate.
        made = _new_context(config.ca_file)
        settings = f"upstream {config.name!r}: client_cert", f"upstream {config.name!r}: client_key"
        key = None if config.client_key is None else Path(config.client_key)
        load_pair(made, *settings, Path(config.client_cert), key)
    return UpstreamTransport(made, proxy)


def _proxy(url: str, credential: str | None, ca_file: str | None) -> ConnectProxy:
    parts, encoded = urlsplit(url), None
    tls = parts.scheme == "https"
    if credential is not None:
        encoded = f"Basic {b64encode(credential.encode()).decode('ascii')}"
    context = _context(ca_file) if tls else None
    return ConnectProxy(parts.hostname or "", parts.port or (443 if tls else 80), url, context, encoded)


def _new_context(ca_file: str | None) -> ssl.SSLContext:
    made = ssl.create_default_context()
    if ca_file is not None:
        made.load_verify_locations(ca_file)
    return made


_context = lru_cache(maxsize=64)(_new_context)
"""Loading the machine's trusted certificates takes some milliseconds, and all upstreams trust the same."""


# -- the bound on concurrent calls -------------------------------------------------------------------------------------

#     if places.full:
#         places.wait(call.on_place)     # called when there is one; or places.leave(call.on_place)
#     places.running += 1                # and at its end, whichever: places.release()


class ConcurrencyLimit:
    """The places of one upstream, in one process. Used in the event loop's thread."""

    def __init__(self, what: str, most: int | None) -> None:
        """`what`: the name of the upstream, for the log. `most`: the number of places; None for no bound."""
        self.maximum = most
        self.running = 0
        """Number of calls that have a place."""
        self.waited = 0
        """Number of calls that have waited for a place, or still do."""
        self._what = what
        self._waiting: dict[Callable[[], None], None] = {}
        self._handing_on = False

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a place."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """True if a new call must wait."""
        return self.maximum is not None and (self.running >= self.maximum or bool(self._waiting))

    def wait(self, go_on: Callable[[], None]) -> None:
        """Add a call that came while others have all places."""
        self.waited += 1
        self._waiting[go_on] = None

    def leave(self, go_on: Callable[[], None]) -> None:
        """Remove a call that does not wait any more."""
        self._waiting.pop(go_on, None)

    def release(self) -> None:
        """Give back a place: waiting calls take their turns as soon as the call that had it is over."""
        self.running -= 1
        self._hand_on_soon()

    def _hand_on_soon(self) -> None:
        if self._waiting and not self._handing_on:
            self._handing_on = True
            asyncio.get_running_loop().call_soon(self._hand_on)

    def _hand_on(self) -> None:
        """Let one waiting call go on in each turn of the loop: a call may give its place back at once."""
        self._handing_on = False
        if not self._waiting or (self.maximum is not None and self.running >= self.maximum):
            return
        go_on = next(iter(self._waiting))
        del self._waiting[go_on]
        try:
            go_on()
        except Exception:
            # One call that fails must not keep the others waiting.
            _log.exception("a call that waited for %s could not go on", self._what)
        self._hand_on_soon()


# -- the gate: while the weights of an upstream change, calls wait -----------------------------------------------------

# An upstream is *open*, or *paused* until a deadline. Whoever pauses it changes the weights and opens it. Another
# pause moves the deadline, so a long change uses many short pauses, like a lease. When the deadline passes, whoever
# paused it is taken for dead: waiting calls are refused, and new calls are refused at once, until somebody opens the
# upstream or pauses it anew. It never opens by itself: an answer from weights that are half changed would be worse
# than none. When the gate opens, calls go in the order in which they came, a few in each turn of the loop so that
# others are served in between.
#
#     if pool.gate.must_wait:
#         pool.gate.wait(call)  # then one of call.on_open(), call.on_refused(refusal), or gate.leave(call)

_AT_ONCE = 32
"""Calls that go on in one turn of the loop."""
_gate_log = logging.getLogger("penstock.gate")


class GateWaiter(Protocol):
    """A call that waits at a gate."""

    def on_open(self) -> None:
        """Called when the call may go on."""
        ...

    def on_refused(self, refusal: Refusal) -> None:
        """Called when the deadline has passed: the call is refused."""
        ...


@dataclass(slots=True)
class GateStats:
    """Counts of waiting calls since the start."""

    calls: int = 0
    """Number of calls that have waited, or still do."""
    refused: int = 0
    """Calls that were refused after waiting."""
    seconds: float = 0.0
    """Seconds that calls have waited in all, without those that still wait."""


class UpstreamGate:
    """The gate of one upstream, in one process. Used in the event loop's thread."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.must_wait = False
        """True while calls must `wait`: it is paused, or earlier calls have not gone on yet."""
        self.paused_since: float | None = None
        """Time of the pause; monotonic seconds. None while it is open."""
        self.bound_s = 0.0
        """Seconds from the last pause until calls are refused."""
        self.stats = GateStats()
        self._waiting: dict[GateWaiter, float] = {}
        self._deadline: asyncio.TimerHandle | None = None
        self._overdue = False

    @property
    def waiting(self) -> int:
        """Number of calls that wait."""
        return len(self._waiting)

    @property
    def paused(self) -> bool:
        """True until it is opened, even after the deadline."""
        return self.paused_since is not None

    def pause(self, bound_s: float) -> None:
        """Make calls wait from now on, for at most `bound_s` seconds; raises `ValueError` for a useless bound."""
        if not 0 < bound_s <= LONGEST_HOLD_S:
            raise ValueError(f"bound_s must be above 0 and at most {LONGEST_HOLD_S:g} seconds (found {bound_s!r})")
        self.must_wait, self._overdue, self.bound_s = True, False, bound_s
        self.paused_since = self.paused_since or monotonic()
        self._stop_clock()
        self._deadline = asyncio.get_running_loop().call_later(bound_s, self._expire)

    def open(self) -> None:
        """Let all waiting and later calls go on. Does nothing when it is open."""
        if self.paused:
            self.paused_since = None
            self._stop_clock()
            self._let_go()

    def wait(self, waiter: GateWaiter) -> None:
        """Add a call that came while calls must wait; after the deadline it is refused at once."""
        self.stats.calls += 1
        self._waiting[waiter] = monotonic()
        if self._overdue and self.paused:
            self._refuse(waiter)

    def leave(self, waiter: GateWaiter) -> None:
        """Remove a waiting call: its client has gone, or the gateway stops."""
        self._stopped_waiting(waiter)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _let_go(self) -> None:
        """Let some waiting calls go on, then the others in later turns."""
        if self.paused:
            return
        for waiter in list(islice(self._waiting, _AT_ONCE)):
            if not self.paused and self._stopped_waiting(waiter):
                self._tell(waiter)
        self.must_wait = self.paused or bool(self._waiting)
        if self.must_wait:
            asyncio.get_running_loop().call_soon(self._let_go)

    def _expire(self) -> None:
        self._overdue, self._deadline = True, None
        _gate_log.error(
            "upstream %r was paused for %g s and not opened; %d calls are refused",
            self.upstream,
            self.bound_s,
            self.waiting,
        )
        for waiter in list(self._waiting):
            self._refuse(waiter)

    def _refuse(self, waiter: GateWaiter) -> None:
        if self._stopped_waiting(waiter):
            self.stats.refused += 1
            self._tell(waiter, self._refusal())

    def _refusal(self) -> Refusal:
        since = monotonic() - (self.paused_since or 0.0)
        message = (
            f"upstream {self.upstream!r} has been paused for {since:.1f} s while its weights change, and was not "
            f"opened within its bound of {self.bound_s:g} s; POST /api/upstreams/{self.upstream}/open opens it"
        )
        return UpstreamFault(504, "paused", message)

    def _stopped_waiting(self, waiter: GateWaiter) -> bool:
        """Remove a waiting call; False when it did not wait: it left while others were told."""
        since = self._waiting.pop(waiter, None)
        if since is not None:
            self.stats.seconds += monotonic() - since
        return since is not None

    def _tell(self, waiter: GateWaiter, refusal: Refusal | None = None) -> None:
        try:
            if refusal is None:
                waiter.on_open()
            else:
                waiter.on_refused(refusal)
        except Exception:
            # One call that fails must not keep the others waiting.
            _gate_log.exception("a call that waited for upstream %r could not go on", self.upstream)


# -- health checks of upstreams that have a path for them --------------------------------------------------------------

CHECK_EVERY_S: Final = 5.0
CHECK_AGAIN_S: Final = 1.0
CHECK_ANSWER_S: Final = 5.0
"""Seconds that a check may take."""


class HealthChecker:
    """The health checks of all upstreams: they find out before a call does whether an upstream can serve. Each is
    checked every five seconds, and a second after a failed check. `start`, then `stop`."""

    def __init__(
        self,
        pools: Iterable[ConnectionPool],
        session: Callable[[], aiohttp.ClientSession],
        counted: Counter[tuple[str, ...]],
    ) -> None:
        """`counted`: the numbers of passed and failed checks, by upstream."""
        self._counted = counted
        self._pools = [pool for pool in pools if pool.config.health_path is not None]
        self._session = session
        self._tasks: list[asyncio.Future[None]] = []

    async def start(self) -> None:
        """Start the checks; the first of each upstream is made at once."""
        self._tasks = [asyncio.ensure_future(self._watch(pool)) for pool in self._pools]

    async def stop(self) -> None:
        """Cancel the checks and wait for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, pool: ConnectionPool) -> None:
        while True:
            why = await self._check(pool)
            before = pool.health.state(monotonic())
            pool.health.checked(why, monotonic())
            self._counted[pool.name, "passed" if why is None else "failed"] += 1
            _tell(pool, why, before)
            await asyncio.sleep(CHECK_EVERY_S if why is None else CHECK_AGAIN_S)

    async def _check(self, pool: ConnectionPool) -> str | None:
        """Return why the check failed; None where it passed."""
        sent = {name.decode(): value.decode() for name, value in pool.credentials}
        asked = aiohttp.ClientTimeout(total=CHECK_ANSWER_S)
        url = f"{pool.origin}{pool.config.health_path}"
        try:
            async with self._session().get(
                url, headers=sent, timeout=asked, allow_redirects=False, **pool.transport.options
            ) as answer:
                return None if 200 <= answer.status < 300 else f"http_{answer.status}"
        except TimeoutError:
            return "timeout"
        except (aiohttp.ClientError, OSError, ValueError):
            # ValueError: an invalid host name (UnicodeError).
            return "connect"


def _tell(pool: ConnectionPool, why: str | None, before: HealthState) -> None:
    """Log a change of state."""
    after = pool.health.state(monotonic())
    if before != "resting" and after == "resting":
        _log.warning("upstream %r fails its checks (%s %s): it is passed over", pool.name, pool.config.health_path, why)
    elif before == "resting" and after != "resting":
        _log.info("upstream %r passes its checks again", pool.name)
