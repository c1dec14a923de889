"""The limits of a server: `max_concurrent`, and the breaker (`breaker_failures`).

Requests of clients count. Everything else never waits: streams that listen, notifications, and answers to a server's
own requests, without which a running call could not end.

Calls wait for a slot as calls of an upstream do (`upstreams.pool.ConcurrencyLimit`).

    visit = Visit(limits)
    if visit.must_wait():          # raises `UpstreamFault` while the breaker is open
        limits.wait(call.on_open)  # called when there is a slot; or limits.leave(call.on_open)
    visit.enter()                  # raises `UpstreamFault` if the breaker has opened meanwhile
    visit.answered(status), visit.ended(status, error)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from time import monotonic
from typing import Final

from penstock.gateway.model.settings import McpServer
from penstock.gateway.model.toml import pluralized
from penstock.gateway.traffic.upstreams.pool import ConcurrencyLimit
from penstock.gateway.wire.http.request import UpstreamFault

# The circuit breaker of an MCP server: a state machine as a table. Pure; the caller passes the time.
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
