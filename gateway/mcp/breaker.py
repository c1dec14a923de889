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


class Position(IntEnum):
    """State of a breaker. The numbers are the values of the metric."""

    CLOSED = 0
    PROBING = 1
    OPEN = 2


MOVES: Final[dict[Position, dict[Position, str]]] = {
    Position.CLOSED: {Position.OPEN: "as many calls as may fail have failed, one after the other"},
    Position.OPEN: {Position.PROBING: "the time is over, and a call came"},
    Position.PROBING: {
        Position.CLOSED: "the probe is answered",
        Position.OPEN: "the probe failed, or its client left before it was answered",
    },
}
"""From -> to -> cause."""


class Breaker:
    """The breaker of one server. Times are seconds of any clock that does not go back."""

    __slots__ = ("_failures", "_most", "_period", "_seconds", "failed_at", "last", "position", "probe_at")

    def __init__(self, failures: int, seconds: float) -> None:
        """`failures`: consecutive failures that open it; `seconds`: time from then until a call tries the server."""
        self._most, self._seconds = failures, seconds
        self._failures = self._period = 0
        self.position = Position.CLOSED
        self.probe_at = 0.0
        """While it is open: the time from which a call may try the server."""
        self.last = ""
        """The reason of the last failure."""
        self.failed_at = 0.0

    def enter(self, now: float) -> int | None:
        """Returns the period of a call that may go; None if the call is refused."""
        if self.position is Position.OPEN and now >= self.probe_at:
            self._move(Position.PROBING)
            return self._period
        return self._period if self.position is Position.CLOSED else None

    def answered(self, period: int) -> int:
        """Called when an answer begins that is no failure. A probe closes the breaker with it and continues as any
        other call, because the rest of its answer may take long. Returns the call's period from now on."""
        if period == self._period and self.position is Position.PROBING:
            self._move(Position.CLOSED)
            return self._period
        return period

    def succeeded(self, period: int) -> None:
        if period == self._period:
            self._failures = 0

    def failed(self, period: int, now: float, why: str) -> None:
        if period != self._period or self.position is Position.OPEN:
            return
        self._failures += 1
        self.last, self.failed_at = why, now
        if self.position is Position.PROBING or self._failures >= self._most:
            self.probe_at = now + self._seconds
            self._move(Position.OPEN)

    def left(self, period: int, now: float) -> None:
        """Called when a call has ended without an outcome for the server. If it was the probe, the next call probes."""
        if period == self._period and self.position is Position.PROBING:
            self.probe_at = now
            self._move(Position.OPEN)

    def _move(self, to: Position) -> None:
        if to not in MOVES[self.position]:
            raise RuntimeError(f"a breaker cannot go from {self.position.name} to {to.name}")
        self.position = to
        self._failures = 0
        self._period += 1
