"""Which upstreams are passed over for now, because calls to them failed. Pure; times are seconds of one clock.

    good      calls go to it
    resting   it failed: calls that another upstream can serve go there, until its rest is over
    probing   its rest is over: one call goes to it, others still elsewhere, until that one has shown how it is

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

A rest takes a second, and twice as long each time that it fails again, half a minute at most; or as long as it says
itself (`Retry-After`), five minutes at most. Where checks fail (`upstreams.checks`) it rests until one passes, or until
there are none any more. Passing over is never refusing: where all upstreams of a call rest, the
first of them is asked. So a wrong judgement costs nothing where there is no other upstream, and a detour where there
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, Literal, Protocol, TypeVar

from penstock.gateway.http.retry_after import retry_after

State = Literal["good", "resting", "probing"]
STATES: Final[tuple[State, ...]] = ("good", "probing", "resting")
"""What the numbers of the metric `penstock_upstream_health` stand for."""
COSTLY: Final = frozenset({"connect", "connect_timeout", "timeout", "no_content", "http_429"})
"""What every call would wait for in vain, or makes worse."""
IN_A_ROW: Final = 3
"""So many other faults make it rest: one may be the call's own."""
FIRST_S: Final = 1.0
LONGEST_S: Final = 30.0
LONGEST_ASKED_S: Final = 300.0
PROBE_S: Final = 30.0
"""How long a probe may take before another call is given to it."""
FAILED_CHECKS: Final = 2
"""So many in a row make it rest: a busy server misses one."""
CHECKED_S: Final = 15.0
"""How long what a check has found counts: longer than it takes until the next has."""
_UNREACHED: Final = frozenset({"connect", "connect_timeout"})


class Health:
    """How calls to one upstream went lately."""

    __slots__ = ("_failed_checks", "_faults", "_probe_until", "_rest_s", "_until", "check", "why")

    def __init__(self) -> None:
        self.why = ""
        """The last fault since it has answered."""
        self.check: tuple[str | None, float] | None = None
        """What the last check has found, None where it passed, and when; None where there was none."""
        self._faults = self._failed_checks = 0
        self._rest_s = 0.0
        """The last rest; 0 while it is good."""
        self._until = self._probe_until = 0.0

    def state(self, now: float) -> State:
        """How it stands."""
        if not self._rest_s:
            return "good"
        return "resting" if now < self._until else "probing"

    def rests_s(self, now: float) -> float | None:
        """How long it still rests; None where it does not."""
        return self._until - now if self.state(now) == "resting" else None

    def passed_over(self, now: float) -> bool:
        """Whether a call that another upstream can serve should go there."""
        state = self.state(now)
        return state == "resting" or (state == "probing" and now < self._probe_until)

    def given(self, now: float) -> None:
        """A call goes to it."""
        if self.state(now) == "probing":
            self._probe_until = now + PROBE_S

    def left(self, since: float) -> None:
        """The call that was given to it at this time is over. Where that has not shown how it is, because its client
        left, another one may."""
        if self._probe_until == since + PROBE_S:
            self._probe_until = 0.0

    def answered(self, now: float) -> None:
        """It has answered a call. While it rests that was one from before."""
        if self._faults and now >= self._until:
            self.why, self._faults, self._rest_s, self._probe_until = "", 0, 0.0, 0.0

    def failed(self, why: str, now: float, asked_s: float | None = None) -> None:
        """It has not served a call. `asked_s`: for how long it wants to be left alone."""
        self._faults += 1
        self.why = why
        if now < self._until:
            return  # the call was under way when it began to rest
        if self._rest_s or why in COSTLY or self._faults >= IN_A_ROW:
            self._probe_until = 0.0
            self._rest_s = min(2 * self._rest_s or FIRST_S, LONGEST_S)
            self._until = now + (self._rest_s if asked_s is None else min(asked_s, LONGEST_ASKED_S))

    def checked(self, why: str | None, now: float) -> None:
        """A check has passed, or failed: `why`."""
        self.check = why, now
        self._failed_checks = 0 if why is None else self._failed_checks + 1
        if why is None:
            if self.why in _UNREACHED or self.why.startswith("check_"):
                self._until = min(self._until, now)
        elif self._failed_checks >= FAILED_CHECKS:
            self.why, self._faults = f"check_{why}", max(self._faults, 1)
            self._probe_until, self._rest_s = 0.0, self._rest_s or FIRST_S
            self._until = max(self._until, now + CHECKED_S)


class Crowd(Protocol):
    """How many calls it is given."""

    @property
    def full(self) -> bool:
        """Whether one more would have to wait."""
        ...


class Served(Protocol):
    """An upstream."""

    health: Health

    @property
    def places(self) -> Crowd:
        """Those for calls."""
        ...

    def keeps_waiting(self, now: float) -> bool:
        """Whether a connection to it has been awaited for long."""
        ...


T = TypeVar("T", bound=Served)


def take_next(upstreams: list[T], now: float) -> T:
    """Takes the next one to ask out of those that are left: the first that is not passed over and has a place, else the
    first that is not passed over, else the first."""
    first = None
    # The only one is asked however it is.
    for at, one in enumerate(upstreams if len(upstreams) > 1 else ()):
        if one.health.passed_over(now) or one.keeps_waiting(now):
            continue
        first = at if first is None else first
        if not one.places.full:
            first = at
            break
    taken = upstreams.pop(first or 0)
    taken.health.given(now)
    return taken


def asked_to_wait(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    """For how long an answer asks to leave its upstream alone; seconds. None where it does not."""
    said = next((value for name, value in headers if name.lower() == b"retry-after"), None)
    return None if said is None else retry_after(said.decode("latin-1"), inf)
