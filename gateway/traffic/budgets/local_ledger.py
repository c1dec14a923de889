"""Reservations of calls while this process alone writes the tape: kept in memory, so that no call waits for a commit.

The amounts used are on the tape, with the spans. The sums there are cached for some seconds, and the use of a call is
added to the cache when its span is durable, so the cache equals the tape. Before another process writes the tape as
well, all reservations are moved there (`LocalLedger.drain`, `operations.BudgetOperations.keep`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.traffic.budgets.operations import (
    SUMS,
    BudgetCharge,
    BudgetClaim,
    BudgetReservation,
    BudgetShortfall,
    BudgetSum,
    ReservedAmount,
    current_sum,
    fits,
    resolve_owners,
)

_NOTHING: Final = ReservedAmount(0, 0)


class LocalLedger:
    """The reservations of this process in memory. On the event loop only."""

    def __init__(self, tape: StoreReader) -> None:
        self._tape = tape
        self._sums: dict[bytes, BudgetSum] = {}
        """The sums of the tape, by key."""
        self._reserved: dict[tuple[bytes, int], ReservedAmount] = {}
        """By the key of a sum and the begin of its window (ns)."""
        self._calls: dict[bytes, BudgetReservation] = {}

    def reserve(self, asked: BudgetReservation, now: int) -> list[BudgetShortfall]:
        """Reserve for a call, as `operations.BudgetOperations.reserve` does; return the budgets without room."""
        since, short = dict[bytes, int](), list[BudgetShortfall]()
        for _, claim, key in self._claims(asked):
            sum_, window = current_sum(self._sum(key), claim, now)
            amount, calls = self._reserved.get((key, window.since_ns), _NOTHING)
            since[key] = window.since_ns
            told = replace(sum_, reserved=sum_.reserved + amount, running=sum_.running + calls)
            if not fits(claim, told):
                short.append(BudgetShortfall(claim, told, window))
        if short:
            return short
        for _, claim, key in asked.resolved_claims:
            place = key, since[key]
            amount, calls = self._reserved.get(place, _NOTHING)
            self._reserved[place] = ReservedAmount(amount + claim.amount, calls + 1)
        asked.since = since
        self._calls[asked.who] = asked
        return []

    def settle(self, asked: BudgetReservation, used: Sequence[BudgetCharge]) -> None:
        """Called when the span of a call is on the tape, with the amounts used."""
        reserved = self._calls.pop(asked.who, None) is not None
        for place, claim, key in asked.resolved_claims:
            if reserved:
                self._free(key, asked.since[key], claim.amount)
                self._add(key, asked.since[key], used[place])
            else:
                # The reservation was on the tape, so the cached sum is out of date.
                self._sums.pop(key, None)

    def discard(self, asked: BudgetReservation) -> None:
        """Called when the span of a call is not on the tape; it may come there later."""
        self.settle(asked, [BudgetCharge(0)] * len(asked.claims))
        self.forget_sums()

    def forget_sums(self) -> None:
        """Drop the cached sums: something else may have changed them on the tape."""
        self._sums.clear()

    def drain(self) -> list[BudgetReservation]:
        """Stop reserving here; return all reservations."""
        calls = list(self._calls.values())
        self._calls.clear()
        self._reserved.clear()
        self._sums.clear()
        return calls

    def reserved(self) -> Mapping[tuple[bytes, int], ReservedAmount]:
        """A copy of all amounts reserved here, by the key of a sum and the begin of its window."""
        return self._reserved.copy()

    def _claims(self, asked: BudgetReservation) -> Sequence[tuple[int, BudgetClaim, bytes]]:
        known = [(at, it, it.limit.key(it.of)) for at, it in enumerate(asked.claims) if it.of is not None]
        if len(known) < len(asked.claims):
            with self._tape.view() as view:
                known = list(resolve_owners(view, asked))
        asked.resolved_claims = known
        return known

    def _sum(self, key: bytes) -> BudgetSum:
        known = self._sums.get(key)
        if known is None:
            with self._tape.view() as view:
                stored = view.get(SUMS, key)
            known = self._sums[key] = BudgetSum(0) if stored is None else BudgetSum.read(stored)
        return known

    def _free(self, key: bytes, since: int, amount: int) -> None:
        before = self._reserved.pop((key, since))
        if before.calls > 1:
            self._reserved[key, since] = ReservedAmount(before.amount - amount, before.calls - 1)

    def _add(self, key: bytes, since: int, used: BudgetCharge) -> None:
        known = self._sums.get(key)
        if known is not None and since > known.since_ns and (used.amount or used.unread):
            known = self._sums[key] = BudgetSum(since)
        if known is not None and since == known.since_ns:
            known.count(used)
