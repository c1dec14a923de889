"""Reads the budgets of a tape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from penstock.gateway.model.budget import BudgetUse
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.traffic.budgets.limits import Limit
from penstock.gateway.traffic.budgets.operations import RESERVERS, SUMS, BudgetSum, ReservedAmount, limit_of
from penstock.gateway.traffic.budgets.windows import window_at


class BudgetReader:
    """Reads the use of the configured budgets."""

    def __init__(self, tape: StoreReader, limits: Sequence[Limit]) -> None:
        self._tape, self._limits = tape, limits

    def uses(
        self,
        now: int,
        name: str | None = None,
        reserved: Mapping[tuple[bytes, int], ReservedAmount] = MappingProxyType({}),
    ) -> list[BudgetUse]:
        """The use of each budget in the current window, the fullest first. `name`: only of this budget. `reserved`:
        reservations in memory that the tape does not have (`Here.reserved`)."""
        with self._tape.view() as view:
            asked = (limit for limit in self._limits if name in (None, limit.budget.name))
            found = [use for limit in asked for use in _uses(_sums(view, limit, reserved), limit, now)]
        return sorted(found, key=lambda use: (-use.share, use.budget, use.of))

    def stale_keys(self, now: int, most: int) -> list[bytes]:
        """Keys of up to `most` sums that may count for nothing any more."""
        with self._tape.view() as view:
            found = (
                key for key, stored in view.scan(SUMS) if _may_go(view, key, BudgetSum.read(stored), self._limits, now)
            )
            return list(islice(found, most))

    def has_expired_lease(self, now: int) -> bool:
        """True if the lease of a process has ended."""
        with self._tape.view() as view:
            return any(keys.to_number(end) <= now for _, end in view.scan(RESERVERS))


def _sums(view: TapeView, limit: Limit, reserved: Mapping[tuple[bytes, int], ReservedAmount]) -> dict[bytes, BudgetSum]:
    found = {key: BudgetSum.read(stored) for key, stored in view.scan(SUMS, limit.prefix)}
    for (key, since), held in reserved.items():
        if not key.startswith(limit.prefix):
            continue
        sum_ = found.setdefault(key, BudgetSum(since))
        if since > sum_.since_ns:
            sum_ = found[key] = BudgetSum(since)
        if since == sum_.since_ns:
            sum_.reserved += held.amount
            sum_.running += held.calls
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


def _may_go(view: TapeView, key: bytes, sum_: BudgetSum, limits: Sequence[Limit], now: int) -> bool:
    limit = limit_of(key, limits)
    if limit is None or sum_.running:
        return False
    gone = limit.budget.per == "rollout" and view.get("rollouts", keys.rollout_key(limit.of(key))) is None
    return gone or sum_.since_ns < window_at(limit.budget.window, now).since_ns
