"""Budgets on the tape, as operations inside a write transaction, so that any number of processes that write one tape
share them. While one process writes it alone, its reservations are in memory (`budgets.ledgers`).

A call reserves the most that it may use, of all its budgets or of none, before it goes out. The reservation is settled
with its span: the amount used counts in the window in which it began, whatever was reserved. A reservation holds as
long as its process renews its lease (`renew`); the reservations of a dead process are freed when its lease has ended.

    budgets         key of a sum                            window (u64) used (u64) guessed (u64) reserved (u64)
                                                            running (u64), and if there are any unread (u64)
    reservations    key of a sum, process (8), number (u64) window (u64) amount (u64)
    reservers       process (8)                             end of its lease (u64)
    guesses         name of an answer                       [[[key of a sum, window, counted amount], ...], models]

Amounts are whole numbers, so that sums are exact: money is counted in billionths of a dollar, and what a call may cost
is rounded up. Windows follow one another from 1970 on, in UTC.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import translate
from functools import cache, lru_cache
from itertools import islice
from math import ceil
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, cast

from penstock.gateway.model.base import ID_PATTERN
from penstock.gateway.model.state import MONTH, TOTAL, Budget, BudgetUnit, BudgetUse
from penstock.gateway.model.times import nanoseconds
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.wire.dialects.loose_json import obj, text

SUMS, RESERVATIONS, RESERVERS, GUESSES = "budgets", "reservations", "reservers", "guesses"
LEASE_NS: Final = 60 * 10**9
"""Nanoseconds after which the reservations of a process are freed if it does not renew its lease."""
RUN: Final = "penstock.run"
"""The member of a rollout's metadata in which a trainer names its run."""
PARTS: Final[dict[BudgetUnit, int]] = {"calls": 1, "tokens": 1, "usd": 10**9}
"""Counted amount of one unit."""
MOST: Final = 1 << 62
"""Most that a call may claim, or have used: more than any budget has, and less than a record can hold."""
_FULL: Final = (1 << 64) - 1
_SUM, _SUM_UNREAD, _RESERVED = struct.Struct(">QQQQQ"), struct.Struct(">QQQQQQ"), struct.Struct(">QQ")
_WHO: Final = 16
"""Bytes behind the key of a sum that identify a reservation: the process, then the number of the call."""
_ID = re.compile(ID_PATTERN)
_NO_WINDOWS: Final = cast("Callable[[], dict[bytes, int]]", dict)
_OWN_NAME: Final = re.compile(r"arn:(?!.*:(?:foundation-model|inference-profile)/)")
"""An ARN that names no public model."""


# -- amounts and windows -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limit:
    """A budget, prepared for counting."""

    budget: Budget
    most: int = field(init=False)
    """Counted amount that may be used."""
    prefix: bytes = field(init=False)
    """Prefix of the keys of its sums. A budget whose unit, window or owner changes begins anew."""
    _only: re.Pattern[str] | None = field(init=False)
    _model: re.Pattern[str] | None = field(init=False)

    def __post_init__(self) -> None:
        budget = self.budget
        counted = f"{budget.name}\0{budget.unit}/{budget.window}/{budget.per}\0"
        object.__setattr__(self, "most", round(budget.limit * PARTS[budget.unit]))
        object.__setattr__(self, "prefix", counted.encode("ascii"))
        object.__setattr__(self, "_only", _pattern(budget.only) if budget.only else None)
        object.__setattr__(self, "_model", None if budget.model == "*" else _pattern([budget.model.lower()]))

    def key(self, of: str) -> bytes:
        """The key of the sum of one owner."""
        return sum_key(self.prefix, of)

    def of(self, key: bytes) -> str:
        """The owner in the key of a sum; the inverse of `key`."""
        return key[len(self.prefix) : -1].decode("ascii")

    def is_for(self, of: str) -> bool:
        """True if the budget counts this owner."""
        return self._only is None or self._only.fullmatch(of) is not None

    def is_about(self, model: str | None) -> bool:
        """True if the budget counts calls for this model. A call for an unknown model may be for any, and so may one
        for a model that an AWS account has named itself."""
        if self._model is None or model is None or _OWN_NAME.match(model) is not None:
            return True
        return self._model.fullmatch(model.lower()) is not None

    def shown(self, amount: int) -> float:
        """A counted amount, in the budget's unit."""
        return amount / PARTS[self.budget.unit]


@lru_cache(maxsize=8192)
def sum_key(prefix: bytes, of: str) -> bytes:
    """The key of a sum (`Limit.key`). Cached: owners make many calls."""
    return b"%b%b\0" % (prefix, of.encode("ascii"))


def _pattern(patterns: Iterable[str]) -> re.Pattern[str]:
    # A bracket in a name is no pattern, as in prices.
    return re.compile("|".join(translate(one.replace("[", "[[]")) for one in patterns))


def nanodollars(dollars: float) -> int:
    """Dollars as a counted amount, at most `MOST`: an upstream may report any number of tokens."""
    return ceil(min(dollars * PARTS["usd"], MOST))


class BudgetWindow(NamedTuple):
    """The begin and end of one window."""

    since_ns: int
    ends_ns: int | None
    """None if it never ends."""


_last: Final[dict[str, BudgetWindow]] = {}
"""The latest window of each kind: most calls are in the same one."""


def window_at(window: str, at_ns: int) -> BudgetWindow:
    """The window that a moment is in. A length of time begins at its multiples: `1h` on the hour, `1d` at midnight."""
    known = _last.get(window)
    if known is None or at_ns < known.since_ns or (known.ends_ns is not None and at_ns >= known.ends_ns):
        known = _last[window] = _window_at(window, at_ns)
    return known


def _window_at(window: str, at_ns: int) -> BudgetWindow:
    if window == TOTAL:
        return BudgetWindow(0, None)
    if window == MONTH:
        day = datetime.fromtimestamp(at_ns // 10**9, UTC)
        following = (day.year + 1, 1) if day.month == 12 else (day.year, day.month + 1)
        return BudgetWindow(_first(day.year, day.month), _first(*following))
    length = _length(window)
    since = at_ns - at_ns % length
    return BudgetWindow(since, since + length)


@cache
def _length(window: str) -> int:
    found = nanoseconds(window)
    assert found, "a budget was checked when it was read"
    return found


def _first(year: int, month: int) -> int:
    return int(datetime(year, month, 1, tzinfo=UTC).timestamp()) * 10**9


# -- claims and sums ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class BudgetSum:
    """The use of one budget in one window."""

    since_ns: int
    """Begin of the window."""
    used: int = 0
    guessed: int = 0
    """The part of `used` that is guessed, because no provider reported it."""
    reserved: int = 0
    running: int = 0
    """Number of calls with a part of `reserved`."""
    unread: int = 0
    """Number of calls that have passed although their use cannot be counted."""

    @staticmethod
    def read(stored: bytes) -> BudgetSum:
        """Read a stored sum; the inverse of `packed`."""
        return BudgetSum(*(_SUM if len(stored) == _SUM.size else _SUM_UNREAD).unpack(stored))

    def count(self, used: BudgetCharge) -> None:
        """Add the use of a call, up to the most that a record can hold."""
        amount, guessed, unread = used
        self.used += amount
        if guessed:
            self.guessed += amount
        if self.used > _FULL or self.guessed > _FULL:
            self.used, self.guessed = min(_FULL, self.used), min(_FULL, self.guessed)
        if unread:
            self.unread += 1

    def packed(self) -> bytes:
        """The bytes of the record."""
        held = (self.since_ns, self.used, self.guessed, self.reserved, self.running)
        return _SUM_UNREAD.pack(*held, self.unread) if self.unread else _SUM.pack(*held)


class BudgetClaim(NamedTuple):
    """The most that a call may use of a budget."""

    limit: Limit
    of: str | None
    """Owner of the budget; None for the run of its rollout, which the tape knows."""
    amount: int
    unread: bool = False
    """True if the call's use cannot be counted. Such a claim of 0 always has room."""


@dataclass(slots=True, eq=False)
class BudgetReservation:
    """The claims of a call on all its budgets."""

    claims: Sequence[BudgetClaim]
    rollout: str
    began_ns: int
    who: bytes
    """The process and the number of the call there: `_WHO` bytes."""
    resolved_claims: Sequence[tuple[int, BudgetClaim, bytes]] = ()
    """The claims whose owners are known: (index in `claims`, claim, key of its sum)."""
    since: dict[bytes, int] = field(default_factory=_NO_WINDOWS)
    """Begin of the window by the key of a sum, for a reservation that is not on the tape."""
    on_tape: bool = False
    """True if it may be on the tape; for the thread that writes."""
    settled: bool = False
    """True once it is settled; for the thread that writes."""


class BudgetShortfall(NamedTuple):
    """A budget that has no room for a call."""

    claim: BudgetClaim
    sum: BudgetSum
    window: BudgetWindow


class BudgetCharge(NamedTuple):
    """The amount that a call has used of a budget."""

    amount: int
    guessed: bool = False
    """True if the amount is a guess."""
    unread: bool = False
    """True if the use cannot be counted."""


class KeyValueReader(Protocol):
    """The read interface of a tape."""

    def get(self, database: str, key: bytes) -> bytes | None:
        """The record with this key; None if there is none."""
        ...


def resolve_owners(tape: KeyValueReader, asked: BudgetReservation) -> Iterator[tuple[int, BudgetClaim, bytes]]:
    """Yield the claims whose owner is known, as in `BudgetReservation.resolved_claims`; looks up the run of the
    rollout."""
    run: str | None = None
    for place, claim in enumerate(asked.claims):
        if claim.of is not None:
            yield place, claim, claim.limit.key(claim.of)
            continue
        run = _run(tape.get("tasks", keys.rollout_key(asked.rollout))) if run is None else run
        if run and claim.limit.is_for(run):
            yield place, claim._replace(of=run), claim.limit.key(run)


def current_sum(stored: BudgetSum, claim: BudgetClaim, now: int) -> tuple[BudgetSum, BudgetWindow]:
    """The use of a budget in the current window, and that window. `stored`: its sum on the tape."""
    window = window_at(claim.limit.budget.window, now)
    if stored.since_ns < window.since_ns:
        return BudgetSum(window.since_ns), window
    # If the clock went back, the window that has begun goes on.
    began = stored.since_ns == window.since_ns
    return stored, window if began else window_at(claim.limit.budget.window, stored.since_ns)


def limit_of(key: bytes, limits: Iterable[Limit]) -> Limit | None:
    """The budget of a sum; None if it is not configured any more."""
    return next((limit for limit in limits if key.startswith(limit.prefix)), None)


def fits(claim: BudgetClaim, sum_: BudgetSum) -> bool:
    """True if a budget has room for a claim."""
    free = claim.unread and not claim.amount
    return free or sum_.used + sum_.reserved + claim.amount <= claim.limit.most


def _run(task: bytes | None) -> str:
    """The run that a rollout belongs to; empty for none."""
    if task is None or RUN.encode() not in task:
        return ""
    found = text(obj(json.loads(task)[1]).get(RUN)) or ""
    return found if _ID.fullmatch(found) else ""


# -- writing -----------------------------------------------------------------------------------------------------------


class BudgetOperations:
    """The operations on budgets in one transaction."""

    def __init__(self, tape: Transaction) -> None:
        self._tape = tape
        self._sums = cast("dict[bytes, BudgetSum | None]", tape.final_records(SUMS))

    def reserve(self, asked: BudgetReservation, now: int) -> list[BudgetShortfall]:
        """Reserve all claims of a call; or else return the budgets that have no room for it, and reserve nothing."""
        asked.resolved_claims = list(resolve_owners(self._tape, asked))
        found = self._found(asked, now)
        if any(sum_.running and not fits(claim, sum_) for _, claim, sum_, _ in found) and self.expire_leases(now):
            # The reservations of dead processes were freed.
            found = self._found(asked, now)
        short = [
            BudgetShortfall(claim, replace(sum_), window) for _, claim, sum_, window in found if not fits(claim, sum_)
        ]
        if short:
            return short
        asked.on_tape = True
        for key, claim, sum_, window in found:
            self._reserve(key, claim, sum_, window.since_ns, asked.who)
        if found and self._lease(asked.who[:8]) < now + LEASE_NS // 2:
            self.renew(asked.who[:8], now)
        return []

    def _reserve(self, key: bytes, claim: BudgetClaim, sum_: BudgetSum, since: int, who: bytes) -> None:
        sum_.reserved += claim.amount
        sum_.running += 1
        self._sums[key] = sum_
        self._tape.put(RESERVATIONS, key + who, _RESERVED.pack(since, claim.amount))

    def persist(self, calls: Iterable[BudgetReservation], now: int) -> list[BudgetReservation]:
        """Move reservations from memory to the tape; return the calls that have not ended meanwhile."""
        left = [asked for asked in calls if not asked.settled]
        for asked in left:
            asked.on_tape = True
            for _, claim, key in asked.resolved_claims:
                since = asked.since[key]
                sum_ = self._sum(key) or BudgetSum(0)
                if since >= sum_.since_ns:
                    self._reserve(key, claim, sum_ if since == sum_.since_ns else BudgetSum(since), since, asked.who)
        if left:
            self.renew(left[0].who[:8], now)
        return left

    def settle(self, asked: BudgetReservation, used: Sequence[BudgetCharge]) -> list[tuple[bytes, int, int]]:
        """Count the use of a call and free its reservation. `used`: for each of its claims. Returns what was counted:
        key of the sum, window, amount."""
        asked.settled = True
        counted: list[tuple[bytes, int, int]] = []
        for place, claim, key in asked.resolved_claims or resolve_owners(self._tape, asked):
            stored = self._tape.get(RESERVATIONS, key + asked.who) if asked.on_tape else None
            if stored is not None:
                since, amount = _RESERVED.unpack(stored)
                self._tape.delete(RESERVATIONS, key + asked.who)
            else:
                # There was no reservation on the tape, or its lease had ended.
                since, amount = asked.since.get(key), None
                if since is None:
                    since = window_at(claim.limit.budget.window, asked.began_ns).since_ns
            self.count(key, since, amount, used[place])
            counted.append((key, since, used[place].amount))
        return counted

    def record_guess(self, answer: str, counted: Iterable[tuple[bytes, int, int]], models: Sequence[str]) -> None:
        """Note the amounts counted for an answer until it is fetched. `models`: names of its model."""
        told = [(key.decode("ascii"), since, amount) for key, since, amount in counted]
        self._tape.put(GUESSES, answer.encode(), json.dumps([told, list(models)]).encode())

    def recorded_guess(self, answer: str) -> tuple[list[tuple[bytes, int, int]], list[str]]:
        """The amounts and model names that `record_guess` has noted; empty lists if there are none."""
        stored = self._tape.get(GUESSES, answer.encode())
        if stored is None:
            return [], []
        told, models = json.loads(stored)
        return [(key.encode("ascii"), since, amount) for key, since, amount in told], models

    def correct(self, key: bytes, since: int, amount: int, used: BudgetCharge) -> None:
        """Replace a guessed amount by the use that is known now."""
        sum_ = self._sum(key)
        if sum_ is not None and sum_.since_ns == since:
            sum_.used, sum_.guessed = max(0, sum_.used - amount), max(0, sum_.guessed - amount)
            sum_.count(used)
            self._sums[key] = sum_

    def count(self, key: bytes, since: int, amount: int | None, used: BudgetCharge) -> None:
        """Count a use in a window of a sum. `amount`: the reservation that it settles there; None if there is none."""
        sum_ = self._sum(key) or BudgetSum(since)
        if since > sum_.since_ns:
            sum_ = BudgetSum(since)
        if since < sum_.since_ns or (amount is None and not used.amount and not used.unread):
            return
        if amount is not None:
            sum_.reserved, sum_.running = max(0, sum_.reserved - amount), max(0, sum_.running - 1)
        sum_.count(used)
        self._sums[key] = sum_

    def renew(self, process: bytes, now: int) -> None:
        """Renew the lease of a process, which keeps its reservations."""
        self._tape.put(RESERVERS, process, keys.number(now + LEASE_NS))

    def clear(self, found: Iterable[bytes], limits: Sequence[Limit], now: int) -> None:
        """Delete the reservations of dead processes, and sums that count for nothing any more. `found`: keys of sums to
        check."""
        self.expire_leases(now)
        for key in found:
            sum_ = self._sum(key)
            if sum_ is not None and _is_over(self._tape, key, sum_, limits, now):
                self._sums[key] = None

    def expire_leases(self, now: int, alone: bytes | None = None) -> bool:
        """Free the reservations of processes whose lease has ended; True if there were any. `alone`: the only process
        that writes this tape, so all others are dead."""
        leases = self._tape.scan(RESERVERS)
        dead = {process for process, end in leases if keys.to_number(end) <= now or alone not in (None, process)}
        if not dead:
            return False
        for name, value in [it for it in self._tape.scan(RESERVATIONS) if _process(it[0]) in dead]:
            since, amount = _RESERVED.unpack(value)
            self._tape.delete(RESERVATIONS, name)
            self.count(name[:-_WHO], since, amount, BudgetCharge(0))
        for process in dead:
            self._tape.delete(RESERVERS, process)
        return True

    def _found(self, asked: BudgetReservation, now: int) -> list[tuple[bytes, BudgetClaim, BudgetSum, BudgetWindow]]:
        return [
            (key, claim, *current_sum(self._sum(key) or BudgetSum(0), claim, now))
            for _, claim, key in asked.resolved_claims
        ]

    def _sum(self, key: bytes) -> BudgetSum | None:
        if key in self._sums:
            return self._sums[key]
        stored = self._tape.get(SUMS, key)
        return None if stored is None else BudgetSum.read(stored)

    def _lease(self, process: bytes) -> int:
        """When the lease of a process ends, in nanoseconds; 0 without one."""
        stored = self._tape.get(RESERVERS, process)
        return 0 if stored is None else keys.to_number(stored)


def _process(reservation: bytes) -> bytes:
    return reservation[-_WHO : -_WHO + 8]


def _is_over(tape: KeyValueReader, key: bytes, sum_: BudgetSum, limits: Sequence[Limit], now: int) -> bool:
    """True if a sum counts for nothing any more: its window has ended, or its rollout was forgotten."""
    limit = limit_of(key, limits)
    if limit is None or sum_.running:
        return False
    if limit.budget.per == "rollout" and tape.get("rollouts", keys.rollout_key(limit.of(key))) is None:
        return True
    return sum_.since_ns < window_at(limit.budget.window, now).since_ns


# -- reading -----------------------------------------------------------------------------------------------------------


class BudgetReader:
    """Reads the use of the configured budgets."""

    def __init__(self, tape: StoreReader, limits: Sequence[Limit]) -> None:
        self._tape, self._limits = tape, limits

    def uses(
        self,
        now: int,
        name: str | None = None,
        reserved: Mapping[tuple[bytes, int], tuple[int, int]] = MappingProxyType({}),
    ) -> list[BudgetUse]:
        """The use of each budget in the current window, the fullest first. `name`: only of this budget. `reserved`:
        reservations in memory that the tape does not have (`LocalLedger.reserved`)."""
        with self._tape.view() as view:
            asked = (limit for limit in self._limits if name in (None, limit.budget.name))
            found = [use for limit in asked for use in _uses(_sums(view, limit, reserved), limit, now)]
        return sorted(found, key=lambda use: (-use.share, use.budget, use.of))

    def stale_keys(self, now: int, most: int) -> list[bytes]:
        """Keys of up to `most` sums that may count for nothing any more."""
        with self._tape.view() as view:
            found = (
                key for key, stored in view.scan(SUMS) if _is_over(view, key, BudgetSum.read(stored), self._limits, now)
            )
            return list(islice(found, most))

    def has_expired_lease(self, now: int) -> bool:
        """True if the lease of a process has ended."""
        with self._tape.view() as view:
            return any(keys.to_number(end) <= now for _, end in view.scan(RESERVERS))


def _sums(
    view: TapeView, limit: Limit, reserved: Mapping[tuple[bytes, int], tuple[int, int]]
) -> dict[bytes, BudgetSum]:
    found = {key: BudgetSum.read(stored) for key, stored in view.scan(SUMS, limit.prefix)}
    for (key, since), (amount, calls) in reserved.items():
        if not key.startswith(limit.prefix):
            continue
        sum_ = found.setdefault(key, BudgetSum(since))
        if since > sum_.since_ns:
            sum_ = found[key] = BudgetSum(since)
        if since == sum_.since_ns:
            sum_.reserved += amount
            sum_.running += calls
    return found


def _uses(sums: Mapping[bytes, BudgetSum], limit: Limit, now: int) -> Iterator[BudgetUse]:
    window, named = window_at(limit.budget.window, now), _always(limit)
    for key, sum_ in sums.items():
        of = limit.of(key)
        if sum_.since_ns >= window.since_ns and limit.is_for(of):
            named.discard(of)
            yield _use(limit, of, sum_)
    yield from (_use(limit, of, BudgetSum(window.since_ns)) for of in sorted(named))


def _always(limit: Limit) -> set[str]:
    """Owners whose budgets are shown even when they have used nothing."""
    budget = limit.budget
    return {""} if budget.per == "all" else {one for one in budget.only if not set("*?") & set(one)}


def _use(limit: Limit, of: str, sum_: BudgetSum) -> BudgetUse:
    budget, window = limit.budget, window_at(limit.budget.window, sum_.since_ns)
    return BudgetUse(
        budget=budget.name, per=budget.per, of=of, unit=budget.unit, limit=budget.limit, used=limit.shown(sum_.used),
        guessed=limit.shown(sum_.guessed), reserved=limit.shown(sum_.reserved), running=sum_.running,
        unread=sum_.unread, window=budget.window, since_ns=window.since_ns, frees_ns=window.ends_ns,
    )  # fmt: skip
