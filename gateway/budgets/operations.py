"""Budgets on the tape, as operations inside a write transaction, so that any number of processes that write one tape
share them. While one writes it alone, what it has reserved is not there (`budgets.here`).

A call reserves what it may use at most, of all its budgets or of none, before it goes out. With its span that is
settled: what it has used counts in the window in which it began, whatever had been reserved. A reservation is good
for as long as the process that made it is heard of (`renew`); what one has reserved that died is free when its lease
is over.

    budgets         key of a sum                            window (u64) used (u64) guessed (u64) reserved (u64)
                                                            running (u64), and where there are any unread (u64)
    reservations    key of a sum, process (8), number (u64) window (u64) amount (u64)
    reservers       process (8)                             end of its lease (u64)
    guesses         name of an answer                       [[[key of a sum, window, what is counted], ...], models]
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol, cast

from penstock.gateway.budgets.limits import Limit
from penstock.gateway.budgets.windows import Window, window_at
from penstock.gateway.dialects.loose_json import obj, text
from penstock.gateway.model.base import ID_PATTERN
from penstock.gateway.store import keys
from penstock.gateway.store.transaction import Transaction

SUMS, RESERVATIONS, RESERVERS, GUESSES = "budgets", "reservations", "reservers", "guesses"
LEASE_NS: Final = 60 * 10**9
"""How long what a process has reserved stays reserved when nothing is heard of it."""
RUN: Final = "penstock.run"
"""The member of a rollout's metadata in which a trainer names its run."""
_FULL: Final = (1 << 64) - 1
_SUM, _SUM_UNREAD, _RESERVED = struct.Struct(">QQQQQ"), struct.Struct(">QQQQQQ"), struct.Struct(">QQ")
_WHO: Final = 16
"""Bytes behind the key of a sum that say whose a reservation is: the process, then the number of the call."""
_ID = re.compile(ID_PATTERN)


@dataclass(slots=True)
class Sum:
    """What is used of one budget in one window; counted as in `limits`."""

    since_ns: int
    """When the window began."""
    used: int = 0
    guessed: int = 0
    """The part of it that nobody counted."""
    reserved: int = 0
    running: int = 0
    """How many calls have reserved that."""
    unread: int = 0
    """How many calls have passed of which nobody can say what they have used."""

    @staticmethod
    def read(stored: bytes) -> Sum:
        """The inverse of `packed`."""
        return Sum(*(_SUM if len(stored) == _SUM.size else _SUM_UNREAD).unpack(stored))

    def count(self, used: Used) -> None:
        """Adds what a call has used, as far as a record holds it."""
        self.used = min(_FULL, self.used + used.amount)
        self.guessed = min(_FULL, self.guessed + (used.amount if used.guessed else 0))
        self.unread += used.unread

    def packed(self) -> bytes:
        """As it is stored."""
        held = (self.since_ns, self.used, self.guessed, self.reserved, self.running)
        return _SUM_UNREAD.pack(*held, self.unread) if self.unread else _SUM.pack(*held)


class Claim(NamedTuple):
    """What a call may use of a budget."""

    limit: Limit
    of: str | None
    """Whose budget; None where the tape tells: that of the run of its rollout."""
    amount: int
    unread: bool = False
    """Whether nobody can say what the call uses. One that claims nothing then always has room."""


@dataclass(slots=True, eq=False)
class Reservation:
    """What a call may use, of all its budgets."""

    claims: Sequence[Claim]
    rollout: str
    began_ns: int
    who: bytes
    """The process and the number of the call there: `_WHO` bytes."""
    held: Sequence[tuple[int, Claim, bytes]] = ()
    """The claims whose budgets are known: the place of each, and the key of its sum."""
    since: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Where it is not on the tape: when the window began, by the key of a sum."""
    on_tape: bool = False
    """Whether it may be there; for the thread that writes."""
    settled: bool = False
    """For the thread that writes."""


class Held(NamedTuple):
    """What is reserved of a sum."""

    amount: int
    calls: int
    """How many have reserved that."""


class Short(NamedTuple):
    """A budget that has no room for a call."""

    claim: Claim
    sum: Sum
    window: Window


class Used(NamedTuple):
    """What a call has used of a budget."""

    amount: int
    guessed: bool = False
    """Whether nobody has counted it."""
    unread: bool = False
    """Whether nobody can say what it has used."""


class Reads(Protocol):
    """What can be read of a tape."""

    def get(self, database: str, key: bytes) -> bytes | None:
        """One record."""
        ...


class BudgetOperations:
    """What can be done in one transaction."""

    def __init__(self, tape: Transaction) -> None:
        self._tape = tape
        self._sums = tape.late(SUMS)

    def reserve(self, asked: Reservation, now: int) -> list[Short]:
        """Reserves what a call may use; or else says which budgets have no room for it, and reserves nothing."""
        asked.held = list(held(self._tape, asked))
        found = self._found(asked, now)
        if any(sum_.reserved and not fits(claim, sum_) for _, claim, sum_, _ in found) and self.bury(now):
            # What the dead had reserved is free.
            found = self._found(asked, now)
        short = [Short(claim, replace(sum_), window) for _, claim, sum_, window in found if not fits(claim, sum_)]
        if short:
            return short
        asked.on_tape = True
        for key, claim, sum_, window in found:
            self._reserve(key, claim, sum_, window.since_ns, asked.who)
        if found and self._lease(asked.who[:8]) < now + LEASE_NS // 2:
            self.renew(asked.who[:8], now)
        return []

    def _reserve(self, key: bytes, claim: Claim, sum_: Sum, since: int, who: bytes) -> None:
        sum_.reserved += claim.amount
        sum_.running += 1
        self._sums[key] = sum_
        self._tape.put(RESERVATIONS, key + who, _RESERVED.pack(since, claim.amount))

    def keep(self, calls: Iterable[Reservation], now: int) -> list[Reservation]:
        """Brings what a process has reserved elsewhere to the tape; returns the calls that have not ended meanwhile."""
        left = [asked for asked in calls if not asked.settled]
        for asked in left:
            asked.on_tape = True
            for _, claim, key in asked.held:
                since = asked.since[key]
                sum_ = self._sum(key) or Sum(0)
                if since >= sum_.since_ns:
                    self._reserve(key, claim, sum_ if since == sum_.since_ns else Sum(since), since, asked.who)
        if left:
            self.renew(left[0].who[:8], now)
        return left

    def settle(self, asked: Reservation, used: Sequence[Used]) -> list[tuple[bytes, int, int]]:
        """Counts what a call has used and frees what it has reserved. `used`: of each of its claims. Returns where that
        was counted: key of the sum, window, and what."""
        asked.settled, counted = True, list[tuple[bytes, int, int]]()
        for place, claim, key in asked.held or held(self._tape, asked):
            stored = self._tape.get(RESERVATIONS, key + asked.who) if asked.on_tape else None
            if stored is not None:
                since, amount = _RESERVED.unpack(stored)
                self._tape.delete(RESERVATIONS, key + asked.who)
            else:
                # Nothing was reserved here, or its lease was over.
                began = window_at(claim.limit.budget.window, asked.began_ns).since_ns
                since, amount = asked.since.get(key, began), None
            self.count(key, since, amount, used[place])
            counted.append((key, since, used[place].amount))
        return counted

    def guess(self, answer: str, counted: Iterable[tuple[bytes, int, int]], models: Sequence[str]) -> None:
        """Notes what is counted of an answer until it is fetched. `models`: what its model is called."""
        told = [(key.decode("ascii"), since, amount) for key, since, amount in counted]
        self._tape.put(GUESSES, answer.encode(), json.dumps([told, list(models)]).encode())

    def guessed(self, answer: str) -> tuple[list[tuple[bytes, int, int]], list[str]]:
        """What was noted so."""
        stored = self._tape.get(GUESSES, answer.encode())
        if stored is None:
            return [], []
        told, models = json.loads(stored)
        return [(key.encode("ascii"), since, amount) for key, since, amount in told], models

    def correct(self, key: bytes, since: int, amount: int, used: Used) -> None:
        """What was counted as a guess is known."""
        sum_ = self._sum(key)
        if sum_ is not None and sum_.since_ns == since:
            sum_.used, sum_.guessed = max(0, sum_.used - amount), max(0, sum_.guessed - amount)
            sum_.count(used)
            self._sums[key] = sum_

    def count(self, key: bytes, since: int, amount: int | None, used: Used) -> None:
        """Counts what was used of a sum in a window. `amount`: what was reserved for it there; None for nothing."""
        sum_ = self._sum(key) or Sum(since)
        if since > sum_.since_ns:
            sum_ = Sum(since)
        if since < sum_.since_ns or (amount is None and not used.amount and not used.unread):
            return
        if amount is not None:
            sum_.reserved, sum_.running = max(0, sum_.reserved - amount), max(0, sum_.running - 1)
        sum_.count(used)
        self._sums[key] = sum_

    def renew(self, process: bytes, now: int) -> None:
        """What a process has reserved stays reserved for longer."""
        self._tape.put(RESERVERS, process, keys.number(now + LEASE_NS))

    def clear(self, found: Iterable[bytes], limits: Sequence[Limit], now: int) -> None:
        """Takes away what the dead have reserved, and sums that count for nothing any more. `found`: keys of sums for
        which that may be so."""
        self.bury(now)
        for key in found:
            sum_ = self._sum(key)
            if sum_ is not None and self._is_over(key, sum_, limits, now):
                self._sums[key] = None

    def bury(self, now: int, alone: bytes | None = None) -> bool:
        """Frees what processes have reserved whose lease is over; whether there was one. `alone`: the only process that
        writes this tape, so all others are dead."""
        leases = self._tape.scan(RESERVERS)
        dead = {process for process, end in leases if keys.to_number(end) <= now or alone not in (None, process)}
        if not dead:
            return False
        for name, value in [it for it in self._tape.scan(RESERVATIONS) if _process(it[0]) in dead]:
            since, amount = _RESERVED.unpack(value)
            self._tape.delete(RESERVATIONS, name)
            self.count(name[:-_WHO], since, amount, Used(0))
        for process in dead:
            self._tape.delete(RESERVERS, process)
        return True

    def _found(self, asked: Reservation, now: int) -> list[tuple[bytes, Claim, Sum, Window]]:
        return [(key, claim, *sum_now(self._sum(key) or Sum(0), claim, now)) for _, claim, key in asked.held]

    def _sum(self, key: bytes) -> Sum | None:
        if key in self._sums:
            return cast("Sum | None", self._sums[key])
        stored = self._tape.get(SUMS, key)
        return None if stored is None else Sum.read(stored)

    def _lease(self, process: bytes) -> int:
        """When it ends; 0 where there is none."""
        stored = self._tape.get(RESERVERS, process)
        return 0 if stored is None else keys.to_number(stored)

    def _is_over(self, key: bytes, sum_: Sum, limits: Sequence[Limit], now: int) -> bool:
        """Whether a sum counts for nothing any more: its window has ended, or its rollout was forgotten."""
        limit = limit_of(key, limits)
        if limit is None or sum_.running:
            return False
        if limit.budget.per == "rollout" and self._tape.get("rollouts", keys.rollout_key(limit.of(key))) is None:
            return True
        return sum_.since_ns < window_at(limit.budget.window, now).since_ns


def held(tape: Reads, asked: Reservation) -> Iterator[tuple[int, Claim, bytes]]:
    """As `Reservation.held`."""
    run: str | None = None
    for place, claim in enumerate(asked.claims):
        if claim.of is not None:
            yield place, claim, claim.limit.key(claim.of)
            continue
        run = _run(tape.get("tasks", keys.rollout_key(asked.rollout))) if run is None else run
        if run and claim.limit.is_for(run):
            yield place, claim._replace(of=run), claim.limit.key(run)


def sum_now(stored: Sum, claim: Claim, now: int) -> tuple[Sum, Window]:
    """What is used of a budget now, and the window. `stored`: its sum on the tape."""
    window = window_at(claim.limit.budget.window, now)
    if stored.since_ns < window.since_ns:
        return Sum(window.since_ns), window
    # Where the clock went back, what began stays begun.
    began = stored.since_ns == window.since_ns
    return stored, window if began else window_at(claim.limit.budget.window, stored.since_ns)


def limit_of(key: bytes, limits: Iterable[Limit]) -> Limit | None:
    """The budget that a sum is of; None where it is not configured any more."""
    return next((limit for limit in limits if key.startswith(limit.prefix)), None)


def fits(claim: Claim, sum_: Sum) -> bool:
    """Whether a budget has room for it."""
    free = claim.unread and not claim.amount
    return free or sum_.used + sum_.reserved + claim.amount <= claim.limit.most


def _process(reservation: bytes) -> bytes:
    return reservation[-_WHO : -_WHO + 8]


def _run(task: bytes | None) -> str:
    """The run that a rollout belongs to; empty for none."""
    if task is None or RUN.encode() not in task:
        return ""
    found = text(obj(json.loads(task)[1]).get(RUN)) or ""
    return found if _ID.fullmatch(found) else ""
