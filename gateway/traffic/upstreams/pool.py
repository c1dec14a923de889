"""Connections to model endpoints, pooled per upstream, without a cap.

If an idle link closes before it answers, the server's keep-alive timer was faster: the call is sent again on a fresh
link. Once a byte of an answer was seen, nothing is sent again from here; `proxy.failover_policy` decides on the next
upstream.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Final, Protocol
from urllib.parse import urlsplit

from penstock.gateway.config import UpstreamSettings
from penstock.gateway.model.state import LONGEST_HOLD_S
from penstock.gateway.traffic.upstreams.health import UpstreamHealth
from penstock.gateway.traffic.upstreams.transport import make_transport
from penstock.gateway.wire.dialects import FAMILIES
from penstock.gateway.wire.dialects.owners import KeyFilter, host_of
from penstock.gateway.wire.http.headers import RequestHeads
from penstock.gateway.wire.http.request import Refusal, UpstreamFault
from penstock.gateway.wire.http.upstream_connection import UpstreamCaller, UpstreamConnection

# The bound on concurrent calls to an upstream, or a server of tools; further calls wait for a place, in their order.
#
# A call that waits is an entry in a dictionary, as at the gate of an upstream (`UpstreamGate`): no task, no timer of
# its own. A call that comes while others wait goes to the end.
#
#     if places.full:
#         places.wait(call.on_place)     # called when there is one; or places.leave(call.on_place)
#     places.running += 1                # and at its end, whichever: places.free()


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


# The gate before an upstream: while its weights change, calls wait here, at the socket, and then go on.
#
# An upstream is *open*, or *paused* until a deadline. Whoever pauses it changes the weights and opens it. Another
# pause moves the deadline, so a long change uses many short pauses, like a lease. When the deadline passes, whoever
# paused it is taken for dead: waiting calls are refused, and new calls are refused at once, until somebody opens the
# upstream or pauses it anew. It never opens by itself: an answer from weights that are half changed would be worse
# than none.
#
# A call that waits is an entry in a dictionary: no task, no timer of its own. When the gate opens, calls go in the
# order in which they came, a few in each turn of the loop so that others are served in between; a call that comes
# meanwhile goes to the end.
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


CONNECT_S: Final = 10.0
"""Seconds until a connection (with TLS) must stand. A first packet that is lost is repeated after 1, 3 and 7 seconds;
from then on another upstream is the better bet."""
IDLE_S: Final = 55.0
"""Seconds after which an unused connection is closed: less than the minute of many servers and load balancers."""
SLOW_S: Final = 1.0
"""Seconds after which the server's machine repeats the first packet of a connection (RFC 6298, section 2.1)."""
_log = logging.getLogger("penstock.upstream")


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
        self.credential = _credential(config)
        """The header with its key; None for none."""
        known = host_of(self.address[0])
        self.serves = frozenset({config.family, *(FAMILIES[it] for it in (known.serves if known else ()))})
        """The API families whose calls it gets."""
        self.keys = KeyFilter.of(config.family, self.address[0])
        self.heads = RequestHeads(
            parts.netloc.encode("ascii"),
            self.credential,
            own_keys,
            config.session_header,
            self.keys,
            self.serves,
        )
        self.gate = UpstreamGate(config.name)
        self.health = UpstreamHealth()
        most = None if config.max_concurrent is None else share(config.max_concurrent)
        self.concurrency_limit = ConcurrencyLimit(f"upstream {config.name!r}", most)
        self._idle: deque[UpstreamConnection] = deque()
        self.transport = make_transport(config)

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


def _credential(config: UpstreamSettings) -> tuple[bytes, bytes] | None:
    key = config.key()
    return None if key is None else config.family.credential(key)
