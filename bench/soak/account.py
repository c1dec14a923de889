"""Compares the observations of clients with the tape: every call is there once, with the end that its client saw. Pure.

A kill may lose what docs/reliability.md says of `record = "batched"`: a call that began in its last 0.25 s may be
absent, an older one that was under way is interrupted, and for one that was answered in the last moment the end, or the
call, may be missing. The age of the oldest of each is counted; a moment is long here, so that a busy machine causes no
false fault.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.soak.calls import Calls
from bench.soak.kinds import KINDS, Seen

MOMENT_S = 5.0
_STATUSES = ("", "open", "ok", "error", "cancelled", "interrupted")
_NO_ID = frozenset(number for number, kind in enumerate(KINDS) if kind.name in ("embeddings", "tool"))
_SHOWN = 20


class Recorded(NamedTuple):
    """The fields of a span that are compared."""

    name: str | None
    """Name of its call."""
    status: str
    response: str | None
    where: str


class Kill(NamedTuple):
    """Begin and end of a kill; seconds of the monotonic clock."""

    begin: float
    end: float


@dataclass
class Account:
    """The result of the comparison."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Number of calls by kind and status on the tape."""
    absent: int = 0
    """Calls under way or just answered at a kill, and not on the tape."""
    absent_s: float = 0.0
    """Longest time before its kill at which one of these began."""
    interrupted: int = 0
    """Calls under way or just answered at a kill, and interrupted on the tape."""
    unended: int = 0
    """Interrupted calls whose client had the whole answer."""
    unended_s: float = 0.0
    """Longest time before its kill at which one of these was answered."""
    cut: int = 0
    """Calls that a kill cut off and that have another end on the tape."""
    unsent: int = 0
    """Calls that were not made because the gateway was away."""
    wrong: int = 0
    problems: list[str] = field(default_factory=list[str])
    """The first descriptions of wrong calls."""

    def say(self, problem: str) -> None:
        """Count a wrong call, and keep its description if it is among the first."""
        self.wrong += 1
        if len(self.problems) < _SHOWN:
            self.problems.append(problem)


def settle(calls: Calls, kills: list[Kill], tape: Iterable[Recorded]) -> Account:
    """Return the account of all calls."""
    account, times, statuses = Account(), array("B", bytes(len(calls))), array("B", bytes(len(calls)))
    for span in tape:
        number = calls.number(span.name)
        if number is None:
            account.say(f"{span.where} ({span.status}) was never asked for")
            continue
        times[number] = min(255, times[number] + 1)
        statuses[number] = _STATUSES.index(span.status)
        if span.status == "ok" and calls.kinds[number] not in _NO_ID and span.response != span.name:
            account.say(f"{span.where} has the answer {span.response} of another call: {_told(calls, number)}")
    for number in range(len(calls)):
        status = _STATUSES[statuses[number]]
        account.ends[KINDS[calls.kinds[number]].name, status or "absent"] += 1
        if times[number] > 1:
            account.say(f"on the tape {times[number]} times: {_told(calls, number)}")
        for problem in _one(account, calls, number, status, kills):
            account.say(f"{problem}: {_told(calls, number)}")
    return account


def _one(account: Account, calls: Calls, number: int, status: str, kills: list[Kill]) -> Iterator[str]:
    """Yield the problems of a call."""
    kind, seen = KINDS[calls.kinds[number]], Seen(calls.seen[number])
    began, ended = calls.began[number], calls.ended[number]
    if seen == Seen.UNSENT:
        account.unsent += 1
        if status:
            yield f"{status} on the tape"
        return
    # The first kill that was not over when the call began, if the call was not over a moment before it.
    at = bisect_left(kills, began, key=lambda kill: kill.end)
    kill = kills[at] if at < len(kills) and ended >= kills[at].begin - MOMENT_S else None
    broken = seen == Seen.BROKEN and kill is not None and ended >= kill.begin
    if seen != kind.sees and not broken:
        yield "not what was to come"
    if not status:
        if kill is None or began < kill.begin - MOMENT_S:
            yield "lost"
        else:
            account.absent += 1
            account.absent_s = max(account.absent_s, kill.begin - began)
    elif status == "interrupted" and kill is not None:
        account.interrupted += 1
        if seen in (Seen.ANSWERED, Seen.REFUSED):
            account.unended += 1
            account.unended_s = max(account.unended_s, kill.begin - ended)
    elif broken and status != "open":
        account.cut += 1
    elif status != {Seen.ANSWERED: "ok", Seen.REFUSED: "error", Seen.LEFT: "cancelled"}.get(seen, kind.ends):
        yield f"{status} on the tape"


def _told(calls: Calls, number: int) -> str:
    took = calls.ended[number] - calls.began[number]
    kind, seen = KINDS[calls.kinds[number]].name, Seen(calls.seen[number]).name.lower()
    return f"call {number}, {kind}, which its client saw {seen} after {took:.3f} s"
