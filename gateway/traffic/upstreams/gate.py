"""The gate before an upstream: while its weights change, calls wait here, at the socket, and then go on.

An upstream is *open*, or *paused* until a deadline. Whoever pauses it changes the weights and opens it. Another pause
moves the deadline, so a long change uses many short pauses, like a lease. When the deadline passes, whoever paused it
is taken for dead: waiting calls are refused, and new calls are refused at once, until somebody opens the upstream or
pauses it anew. It never opens by itself: an answer from weights that are half changed would be worse than none.

A call that waits is an entry in a dictionary: no task, no timer of its own. When the gate opens, calls go in the order
in which they came, a few in each turn of the loop so that others are served in between; a call that comes meanwhile
goes to the end.

    if pool.gate.must_wait:
        pool.gate.wait(call)  # then one of call.on_open(), call.on_refused(refusal), or gate.leave(call)
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Protocol

from penstock.gateway.model.upstream import LONGEST_HOLD_S
from penstock.gateway.wire.http.errors import Refusal, UpstreamFault

_AT_ONCE = 32
"""Calls that go on in one turn of the loop."""
_log = logging.getLogger("penstock.gate")


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
        _log.error(
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
            _log.exception("a call that waited for upstream %r could not go on", self.upstream)
