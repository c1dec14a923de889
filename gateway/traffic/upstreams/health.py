"""The health of upstreams: one to which calls have failed is passed over for a time. Pure; times are seconds of one
clock.

    good      calls go to it
    resting   it failed: calls that another upstream can serve go there, until its rest is over
    probing   its rest is over: one call goes to it, others still elsewhere, until that one has a result

| from    | what happens                          | to      |
|---------|---------------------------------------|---------|
| good    | a fault that costs time, or a third   | resting |
|         | of those that do not, in a row        |         |
| resting | its rest is over, and a call is given | probing |
| probing | a fault of any kind                   | resting |
| probing | it answers                            | good    |
| any     | a second check in a row fails         | resting |
| resting | a check passes, and it rests because  | probing |
|         | it could not be reached or a check    |         |
|         | failed                                |         |

A rest takes a second, and twice as long each time that it fails again, half a minute at most; or as long as its answer
says (`Retry-After`), five minutes at most. Where checks fail (`pool.HealthChecker`) it rests until one passes, or
until there are none any more. Passing over is never refusing: if all upstreams of a call rest, the first of them is
used. So a wrong judgement costs nothing where there is no other upstream, and a detour where there is.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from math import inf
from typing import Final, Literal, Protocol, TypeVar

from penstock.gateway.model.times import Backoff
from penstock.gateway.wire.http.request import retry_after

HealthState = Literal["good", "resting", "probing"]
STATES: Final[tuple[HealthState, ...]] = ("good", "probing", "resting")
"""The states in the order of the numbers of the metric `penstock_upstream_health`."""
COSTLY: Final = frozenset({"connect", "connect_timeout", "timeout", "no_content", "http_429"})
"""Faults for which every call would wait in vain, or which every call makes worse."""
IN_A_ROW: Final = 3
"""Other faults in a row that make it rest: a single one may be the call's own."""
RESTS: Final = Backoff(1.0, 30.0)
LONGEST_ASKED_S: Final = 300.0
PROBE_S: Final = 30.0
"""Seconds that a probe may take before another call is given to it."""
FAILED_CHECKS: Final = 2
"""Failed checks in a row that make it rest: a busy server misses one."""
CHECKED_S: Final = 15.0
"""Seconds for which the result of a check holds: longer than it takes until the next one."""
_UNREACHED: Final = frozenset({"connect", "connect_timeout"})


class UpstreamHealth:
    """The recent results of calls and checks of one upstream."""

    __slots__ = ("_failed_checks", "_faults", "_probe_until", "_rests", "_until", "check", "why")

    def __init__(self) -> None:
        self.why = ""
        """The last fault since its last answer; empty when there is none."""
        self.check: tuple[str | None, float] | None = None
        """(The fault of the last check, None where it passed; its time). None where there was no check."""
        self._faults = self._failed_checks = 0
        self._rests = 0
        """Rests in a row, the last one the longest; 0 while it is good."""
        self._until = self._probe_until = 0.0

    def state(self, now: float) -> HealthState:
        """Return its state at this time."""
        if not self._rests:
            return "good"
        return "resting" if now < self._until else "probing"

    def rests_s(self, now: float) -> float | None:
        """Return the seconds that it still rests; None where it does not."""
        return self._until - now if self.state(now) == "resting" else None

    def passed_over(self, now: float) -> bool:
        """True if a call that another upstream can serve should go there."""
        state = self.state(now)
        return state == "resting" or (state == "probing" and now < self._probe_until)

    def call_assigned(self, now: float) -> None:
        """Called when a call is given to it."""
        if self._rests and now >= self._until:
            self._probe_until = now + PROBE_S

    def call_left(self, since: float) -> None:
        """Called when the call that was given to it at this time is over. If that has not shown its state, because the
        client left, another call may be the probe."""
        if self._probe_until == since + PROBE_S:
            self._probe_until = 0.0

    def answered(self, now: float) -> None:
        """Called when it has answered a call. A call that it answers while it rests is from before."""
        if self._faults and now >= self._until:
            self.why, self._faults, self._rests, self._probe_until = "", 0, 0, 0.0

    def failed(self, why: str, now: float, asked_s: float | None = None) -> None:
        """Called when it has failed a call. `asked_s`: seconds for which it asks for no calls."""
        self._faults += 1
        self.why = why
        if now < self._until:
            return  # the call was under way when it began to rest
        if self._rests or why in COSTLY or self._faults >= IN_A_ROW:
            self._probe_until = 0.0
            self._rests += 1
            self._until = now + (RESTS.after(self._rests) if asked_s is None else min(asked_s, LONGEST_ASKED_S))

    def checked(self, why: str | None, now: float) -> None:
        """Called with the result of a check: `why` it failed, None when it passed."""
        self.check = why, now
        self._failed_checks = 0 if why is None else self._failed_checks + 1
        if why is None:
            if self.why in _UNREACHED or self.why.startswith("check_"):
                self._until = min(self._until, now)
        elif self._failed_checks >= FAILED_CHECKS:
            self.why, self._faults = f"check_{why}", max(self._faults, 1)
            self._probe_until, self._rests = 0.0, max(self._rests, 1)
            self._until = max(self._until, now + CHECKED_S)


class UpstreamLoad(Protocol):
    """The load of an upstream."""

    maximum: int | None

    @property
    def full(self) -> bool:
        """True if one more call would have to wait."""
        ...


class UpstreamCandidate(Protocol):
    """An upstream, as `take_next` sees it."""

    health: UpstreamHealth

    @property
    def concurrency_limit(self) -> UpstreamLoad:
        """The places that bound its concurrent calls."""
        ...

    def keeps_waiting(self, now: float) -> bool:
        """True if a connection to it has been awaited for long."""
        ...


T = TypeVar("T", bound=UpstreamCandidate)


def take_next(upstreams: list[T], now: float) -> T:
    """Remove and return the next upstream to use: the first that is not passed over and has a place, else the first
    that is not passed over, else the first."""
    first = None
    # A single upstream is used whatever its health.
    for at, one in enumerate(upstreams if len(upstreams) > 1 else ()):
        if (one.health.why and one.health.passed_over(now)) or one.keeps_waiting(now):
            continue
        first = at if first is None else first
        limit = one.concurrency_limit
        if limit.maximum is None or not limit.full:
            first = at
            break
    taken = upstreams.pop(first or 0)
    if taken.health.why:
        taken.health.call_assigned(now)
    return taken


def retry_after_s(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    """Return the seconds for which an answer asks to leave its upstream alone; None where it does not."""
    said = next((value for name, value in headers if name.lower() == b"retry-after"), None)
    return None if said is None else retry_after(said.decode("latin-1"), inf)


# -- slow streams ------------------------------------------------------------------------------------------------------

LEAST_FIRST_CONTENT_S: Final = 12.0
FIRST_CONTENT_TIMES: Final = 3.0
_LAST: Final = 16
_MODELS: Final = 1000


class FirstContentTimeouts:
    """The time limit for the first content of a model's streams, after which another upstream is used.

    Nobody can tell whether a stream that has begun and is silent will ever go on; but a model that has always begun
    within two seconds does not think for twenty. So the limit is three times the longest of its last streams, and never
    less than twelve seconds. The last upstream of a route has no such limit, and teaches it: a model that thinks for a
    minute costs a detour once."""

    def __init__(self) -> None:
        self._took: OrderedDict[str, deque[float]] = OrderedDict()
        """Seconds of the last streams, by model; the model of the newest one is at the end."""

    def limit_s(self, model: str) -> float:
        """Return the seconds to wait for the first content of one more stream."""
        return max(LEAST_FIRST_CONTENT_S, FIRST_CONTENT_TIMES * max(self._took.get(model, ()), default=0.0))

    def observe(self, model: str, seconds: float) -> None:
        """Note that a stream of a model had its first content after this many seconds."""
        self._took.setdefault(model, deque(maxlen=_LAST)).append(seconds)
        self._took.move_to_end(model)
        if len(self._took) > _MODELS:
            _ = self._took.popitem(last=False)
