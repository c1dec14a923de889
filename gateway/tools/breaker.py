"""The circuit breaker of an MCP server: a state machine as a table. Pure; the caller passes the time.

    closed    every call goes to the server
    open      no call does: `failures` calls in a row have failed
    probing   one call tries the server, all others are refused

A call that enters gets the number of the current period, and returns it with its outcome. Outcomes of earlier periods
are ignored: a call that began before the breaker opened neither closes nor opens it. So there is one probe at a time,
and only the probe decides.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


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
