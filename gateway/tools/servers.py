"""The MCP servers by their addresses, and their limits.

    /mcp/NAME                the server's endpoint, `[mcp.servers.NAME] url`, or the bridge before the processes of its
                             `command` (`tools.bridge`)
    /mcp/NAME/@/rest?query   a path that the server itself has named: for the messages of a stream that it opened (HTTP
                             with SSE), or as the place of its metadata (OAuth)
    /.well-known/oauth-protected-resource/mcp/NAME   the metadata of its endpoint

A path that the server has not named is refused: an agent reaches the server's tools, not its host.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from string import punctuation
from time import monotonic
from typing import Any, Final
from urllib.parse import quote, urljoin, urlsplit

from penstock.gateway.config import GatewayConfig, UpstreamSettings
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.settings import McpServer
from penstock.gateway.model.toml import pluralized
from penstock.gateway.tools.bridge import NAMED, OWNER, Bridge
from penstock.gateway.traffic.calls.call_request import CallAddress
from penstock.gateway.traffic.upstreams.pool import ConcurrencyLimit, ConnectionPool, connect_inside
from penstock.gateway.wire.dialects.mcp import MCP, PREFIX
from penstock.gateway.wire.http.request import ClientFault, Headers, UpstreamFault
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection

OWN: Final = "/@"
"""Precedes a path that the server has named."""
WELL_KNOWN: Final = "/.well-known/oauth-protected-resource"
"""Precedes the path of a resource whose metadata are requested (RFC 9728, section 3.1)."""
_OF_THE_BRIDGE: Final = frozenset({OWNER.lower().encode(), NAMED.lower().encode()})
_NAMED: Final = 10_000
"""Most paths of one server that are remembered: each is one of its open streams."""
_LONGEST: Final = 8192
"""Most characters of a path that is remembered."""


class ServerPool(ConnectionPool):
    """The connections to one server."""

    attributes: Mapping[str, Any] = {}
    """Attributes of the spans of its calls."""

    def __init__(self, name: str, config: McpServer, own_keys: Sequence[str]) -> None:
        upstream = UpstreamSettings.model_construct(
            name=name,
            base_url=config.url or f"pipe://{name}",
            dialect=MCP.name,
            key_env=config.key_env,
        )
        super().__init__(upstream, own_keys)
        self.server = config
        self.limits = ServerLimits(name, config)
        self._paths: OrderedDict[str, None] = OrderedDict()
        self.heads.vary = True  # with the paths that the server has named lately

    def target(self, path: str) -> str:
        """The path to request from the server. Raises `ClientFault` for a path that the server has not named."""
        if path.startswith(WELL_KNOWN):
            return WELL_KNOWN + (self.path.rstrip("/") if path != WELL_KNOWN else "")
        below, mark, query = self._below(path).partition("?")
        if below in ("", "/"):
            return (self.path or "/") + mark + query
        own = below.removeprefix(OWN)
        if own != below and own + mark + query in self._paths:
            return own + mark + query
        message = f"server {self.name!r} has not named the path {below!r}: use {PREFIX}{self.name}, which is its url"
        raise ClientFault(404, "path", message, "path")

    def url(self, path: str) -> str:
        """The URL of a call; the server's own URL for a path that it has not named, or not lately."""
        try:
            return super().url(path)
        except ClientFault:
            return super().url(PREFIX + self.name)

    def check(self, headers: Mapping[bytes, bytes], token: bool) -> None:
        """Raises `ClientFault` for a call that may not use this server. `token`: True if it has an agent token, or a
        key for calls."""

    def headers(self, headers: Headers, address: CallAddress) -> Headers:
        """The headers that are sent: the client's own."""
        return headers

    def own_path(self, path: str) -> str:
        """The server's path for a path below a rollout's address; empty for the endpoint itself."""
        below = self._below(path)
        return below.removeprefix(OWN) if path.startswith(PREFIX) and below.startswith(OWN) else ""

    def _below(self, path: str) -> str:
        """The path behind the server's name. If a client's URL ends with a slash, one precedes a named path, too."""
        below = path[len(PREFIX) + len(self.name) :]
        return below[1:] if below.startswith("/" + OWN) else below

    def register_path(self, endpoint: str) -> str | None:
        """Remembers a path that the server names for the messages of a stream, and returns the path that stands for it
        below the server's address; None if it is on another host, to which no agent may be sent."""
        try:
            whole = urlsplit(urljoin(self.origin + self.path, endpoint))
        except ValueError:
            return None
        if f"{whole.scheme}://{whole.netloc}" != self.origin or len(endpoint) > _LONGEST:
            return None
        # Quoted as a client will write it in its request.
        path = quote(whole.path + (f"?{whole.query}" if whole.query else ""), safe=punctuation)
        self._paths[path] = None
        self._paths.move_to_end(path)
        if len(self._paths) > _NAMED:
            self._paths.popitem(last=False)
        return f"{PREFIX}{self.name}{OWN}{path}"


class DirectServerPool(ServerPool):
    """A server that agents behind a sidecar call by its own URL. Its URLs pass unchanged."""

    def __init__(self, pool: ServerPool, own_keys: Sequence[str]) -> None:
        """`pool`: the same server below its address here, with which this one shares its limits."""
        super().__init__(pool.name, pool.server, own_keys)
        self.heads.verbatim = True
        self.limits = pool.limits

    def has(self, path: str) -> bool:
        """True if a path of the host is one of the server: its endpoint, or one that it has named."""
        return path.partition("?")[0] == (self.path or "/") or path in self._paths

    def target(self, path: str) -> str:
        """The path unchanged: it is the server's own."""
        return path

    def own_path(self, path: str) -> str:
        """The path itself; empty for the endpoint."""
        return path if path in self._paths else ""

    def register_path(self, endpoint: str) -> str | None:
        """Remembers a path that the server names, and returns it; None if it is on another host."""
        ours = super().register_path(endpoint)
        return None if ours is None else ours[len(PREFIX) + len(self.name) + len(OWN) :]


class HostedServerPool(ServerPool):
    """The connections to the bridge in front of a hosted server's processes."""

    attributes: Mapping[str, Any] = {"network.transport": "pipe"}

    def __init__(self, name: str, config: McpServer, bridge: Bridge, own_keys: Sequence[str]) -> None:
        super().__init__(name, config, own_keys)
        self._bridge = bridge

    async def open(self, connection: UpstreamConnection) -> None:
        """Connects by a socket pair."""
        await connect_inside(self._bridge.protocol, connection)

    def headers(self, headers: Headers, address: CallAddress) -> Headers:
        """The client's headers, with the rollout and attempt of the call."""
        kept = [header for header in headers if header[0] not in _OF_THE_BRIDGE]
        kept.append((b"penstock-owner", OWNER.encode(), f"{address.rollout}/{address.attempt}".encode()))
        if address.origin != "implicit":
            kept.append((b"penstock-named", NAMED.encode(), b"1"))
        return kept


class ServerRegistry:
    """All configured MCP servers, by name."""

    def __init__(self, config: GatewayConfig, own_keys: Sequence[str], bridge: Bridge) -> None:
        configured = config.mcp.servers.items()
        self.local_only = config.loopback
        """True if only this machine can connect, so that no key is needed."""
        self.names = config.local_names()
        self.scheme = "http" if config.tls.certificate is None else "https"
        """The scheme that clients call, unless a proxy in front reports another."""
        self.pools = {
            name: ServerPool(name, one, own_keys)
            if one.command is None
            else HostedServerPool(name, one, bridge, own_keys)
            for name, one in configured
        }
        self._wanted = [DirectServerPool(pool, own_keys) for pool in self.pools.values() if pool.server.url is not None]
        self._bridge = bridge

    def expire(self, now: float) -> None:
        """Closes connections that have been idle for too long."""
        for pool in (*self.pools.values(), *self._wanted):
            pool.expire(now)
        self._bridge.expire()

    def measure(self, metrics: Metrics) -> None:
        """Sets the gauges of all servers."""
        for name, pool in self.pools.items():
            limits = pool.limits
            metrics.mcp_waiting[(name,)] = limits.waiting
            metrics.mcp_breaker[(name,)] = BreakerState.CLOSED if limits.breaker is None else limits.breaker.state
            for why, count in limits.refused.items():
                metrics.mcp_refused[(name, why)] = count

    @property
    def hosts(self) -> list[UpstreamSettings]:
        """The hosts of servers, for calls of agents behind a sidecar; a request for another path of such a host gets no
        key of the server."""
        return [UpstreamSettings.model_construct(name=pool.name, base_url=pool.origin) for pool in self._wanted]

    def find_direct(self, host: tuple[str, int], path: str) -> DirectServerPool | None:
        """The server that an agent behind a sidecar has called; None if the path belongs to no server."""
        return next((one for one in self._wanted if one.address == host and one.has(path)), None)

    def find(self, path: str) -> ServerPool:
        """The server of a path below a rollout's address; raises `ClientFault` if there is none."""
        name = path.removeprefix(WELL_KNOWN).partition("?")[0][len(PREFIX) :].partition("/")[0]
        found = self.pools.get(name)
        if found is None:
            known, name = ", ".join(self.pools) or "none", name[:64]
            way = f"add [mcp.servers.{name}] with its url or its command"
            message = f"there is no MCP server {name!r}: {way} (there are: {known})"
            raise ClientFault(404, "mcp_server", message, "path")
        return found


# -- the limits of a server: `max_concurrent`, and the breaker (`breaker_failures`) -----------------------------------
#
# Requests of clients count. Everything else never waits: streams that listen, notifications, and answers to a
# server's own requests, without which a running call could not end.
#
# Calls wait for a slot as calls of an upstream do (`upstreams.pool.ConcurrencyLimit`).
#
#     permit = Permit(limits)
#     if permit.must_wait():          # raises `UpstreamFault` while the breaker is open
#         limits.wait(call.on_open)   # called when there is a slot; or limits.leave(call.on_open)
#     permit.enter()                  # raises `UpstreamFault` if the breaker has opened meanwhile
#     permit.answered(status), permit.ended(status, error)

# The breaker is a state machine as a table. Pure; the caller passes the time.
#
#     closed    every call goes to the server
#     open      no call does: `failures` calls in a row have failed
#     probing   one call tries the server, all others are refused
#
# A call that enters gets the number of the current period, and returns it with its outcome. Outcomes of earlier
# periods are ignored: a call that began before the breaker opened neither closes nor opens it. So there is one probe
# at a time, and only the probe decides.


class BreakerState(IntEnum):
    """State of a breaker. The numbers are the values of the metric."""

    CLOSED = 0
    PROBING = 1
    OPEN = 2


MOVES: Final[dict[BreakerState, dict[BreakerState, str]]] = {
    BreakerState.CLOSED: {BreakerState.OPEN: "as many calls as may fail have failed, one after the other"},
    BreakerState.OPEN: {BreakerState.PROBING: "the time is over, and a call came"},
    BreakerState.PROBING: {
        BreakerState.CLOSED: "the probe is answered",
        BreakerState.OPEN: "the probe failed, or its client left before it was answered",
    },
}
"""From -> to -> cause."""


class ServerBreaker:
    """The breaker of one server. Times are seconds of any clock that does not go back."""

    __slots__ = ("_failures", "_most", "_period", "_seconds", "failed_at", "last_failure", "probe_at", "state")

    def __init__(self, failures: int, seconds: float) -> None:
        """`failures`: consecutive failures that open it; `seconds`: time from then until a call tries the server."""
        self._most, self._seconds = failures, seconds
        self._failures = self._period = 0
        self.state = BreakerState.CLOSED
        self.probe_at = 0.0
        """While it is open: the time from which a call may try the server."""
        self.last_failure = ""
        """The reason of the last failure."""
        self.failed_at = 0.0

    def admit(self, now: float) -> int | None:
        """Returns the period of a call that may go; None if the call is refused."""
        if self.state is BreakerState.OPEN and now >= self.probe_at:
            self._move(BreakerState.PROBING)
            return self._period
        return self._period if self.state is BreakerState.CLOSED else None

    def answered(self, period: int) -> int:
        """Called when an answer begins that is no failure. A probe closes the breaker with it and continues as any
        other call, because the rest of its answer may take long. Returns the call's period from now on."""
        if period == self._period and self.state is BreakerState.PROBING:
            self._move(BreakerState.CLOSED)
            return self._period
        return period

    def succeeded(self, period: int) -> None:
        if period == self._period:
            self._failures = 0

    def failed(self, period: int, now: float, why: str) -> None:
        if period != self._period or self.state is BreakerState.OPEN:
            return
        self._failures += 1
        self.last_failure, self.failed_at = why, now
        if self.state is BreakerState.PROBING or self._failures >= self._most:
            self.probe_at = now + self._seconds
            self._move(BreakerState.OPEN)

    def abandoned(self, period: int, now: float) -> None:
        """Called when a call has ended without an outcome for the server. If it was the probe, the next call probes."""
        if period == self._period and self.state is BreakerState.PROBING:
            self.probe_at = now
            self._move(BreakerState.OPEN)

    def _move(self, to: BreakerState) -> None:
        if to not in MOVES[self.state]:
            raise RuntimeError(f"a breaker cannot go from {self.state.name} to {to.name}")
        self.state = to
        self._failures = 0
        self._period += 1


FAILURES: Final = frozenset({"connect", "connect_timeout", "timeout", "upstream_closed", "upstream_protocol"})
"""Errors of a call that count as failures of the server, beside statuses from 500. A tool's own error is none."""

BREAK_S: Final = 30.0
"""Seconds for which a server is left alone, until one request tries it: as long as a restart may take."""


class ServerLimits(ConcurrencyLimit):
    """The limits of one server in one process. Used in the event loop's thread."""

    def __init__(self, name: str, config: McpServer, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(f"server {name!r}", config.max_concurrent)
        self.name, self.config, self.clock = name, config, clock
        self.refused: Counter[str] = Counter()
        """Refused calls, by reason."""
        self.breaker = None
        if config.breaker_failures is not None:
            self.breaker = ServerBreaker(config.breaker_failures, BREAK_S)

    def wait_timeout_refusal(self) -> UpstreamFault:
        """The refusal of a call that has waited for too long."""
        self.refused["busy"] += 1
        patience = self.config.first_byte_timeout
        message = (
            f"server {self.name!r} has {pluralized(self.running, 'call')} under way, and may have no more "
            f"(mcp.servers.{self.name}.max_concurrent = {self.maximum}); this one has waited in vain for "
            f"{patience:g} s (mcp.servers.{self.name}.first_byte_timeout)"
        )
        return UpstreamFault(503, "busy", message)

    def breaker_refusal(self) -> UpstreamFault:
        """The refusal of a call while the breaker is open."""
        assert self.breaker is not None
        self.refused["breaker"] += 1
        breaker, now = self.breaker, self.clock()
        if breaker.state is BreakerState.PROBING:
            then = "one call tries it now"
        elif (left := breaker.probe_at - now) > 0:
            then = f"the next one tries it in {left:.1f} s"
        else:
            then = "the next request tries it"
        message = (
            f"server {self.name!r} is not asked, because it has failed "
            f"(mcp.servers.{self.name}.breaker_failures = {self.config.breaker_failures} calls in a row open the "
            f"breaker); the last call failed {now - breaker.failed_at:.1f} s ago: {breaker.last_failure}; {then}"
        )
        return UpstreamFault(503, "breaker", message)


class Permit:
    """One call's passage through the limits of its server."""

    __slots__ = ("_counts", "_limits", "_period", "_placed", "acquired")

    def __init__(self, limits: ServerLimits, counts: bool) -> None:
        """`counts`: True if the call needs a slot, and its outcome counts for the breaker."""
        self._limits, self._counts = limits, counts
        self._placed = False
        self._period: int | None = None
        self.acquired = False

    def must_wait(self) -> bool:
        """True if it has to wait for a slot; raises `UpstreamFault` while the breaker refuses calls."""
        breaker = self._limits.breaker
        if breaker is not None and breaker.state is not BreakerState.CLOSED:
            due = breaker.state is BreakerState.OPEN and self._limits.clock() >= breaker.probe_at
            if not (due and self._counts):
                raise self._limits.breaker_refusal()
        return self._counts and self._limits.full

    def acquire(self) -> None:
        """Takes a slot; raises `UpstreamFault` if the breaker has opened while the call waited."""
        limits = self._limits
        if self._counts and limits.breaker is not None:
            self._period = limits.breaker.admit(limits.clock())
            if self._period is None:
                raise limits.breaker_refusal()
        self.acquired, self._placed = True, self._counts
        limits.running += self._counts

    def observe_status(self, status: int) -> None:
        """Called when an answer begins."""
        if self._period is not None and self._limits.breaker is not None and status < 500:
            self._period = self._limits.breaker.answered(self._period)

    def release(self, status: str, error: str | None) -> None:
        """Called with the status and the error of the call's span."""
        limits, period, self._period = self._limits, self._period, None
        if period is not None and limits.breaker is not None:
            if error is not None and (error in FAILURES or error.startswith("http_5")):
                limits.breaker.failed(period, limits.clock(), error)
            elif status == "ok" or (error or "").startswith("http_"):
                limits.breaker.succeeded(period)
            else:
                limits.breaker.abandoned(period, limits.clock())
        if self._placed:
            self._placed = False
            limits.release()
