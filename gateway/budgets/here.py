"""What calls have reserved while this process alone writes the tape: kept in memory, so that no call waits for a
commit.

What they have used is on the tape, with their spans. The sums there are remembered for some seconds, and what a call
has used is added to them when its span is durable, so they are what the tape says. Before another process writes the
tape as well, what is reserved here goes there (`Here.leave`, `operations.BudgetOperations.keep`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from penstock.gateway.budgets.operations import (
    SUMS,
    Claim,
    Held,
    Reservation,
    Short,
    Sum,
    Used,
    fits,
    held,
    sum_now,
)
from penstock.gateway.store.reader import Reader

_NOTHING: Final = Held(0, 0)


class Here:
    """For the event loop."""

    def __init__(self, tape: Reader) -> None:
        self._tape = tape
        self._sums: dict[bytes, Sum] = {}
        """By key: what the tape says."""
        self._reserved: dict[tuple[bytes, int], Held] = {}
        """By the key of a sum and when its window began."""
        self._calls: dict[bytes, Reservation] = {}

    def reserve(self, asked: Reservation, now: int) -> list[Short]:
        """As `operations.BudgetOperations.reserve`."""
        since, short = dict[bytes, int](), list[Short]()
        for _, claim, key in self._claims(asked):
            sum_, window = sum_now(self._sum(key), claim, now)
            amount, calls = self._reserved.get((key, window.since_ns), _NOTHING)
            since[key] = window.since_ns
            told = replace(sum_, reserved=sum_.reserved + amount, running=sum_.running + calls)
            if not fits(claim, told):
                short.append(Short(claim, told, window))
        if short:
            return short
        for _, claim, key in asked.held:
            place = key, since[key]
            amount, calls = self._reserved.get(place, _NOTHING)
            self._reserved[place] = Held(amount + claim.amount, calls + 1)
        asked.since = since
        self._calls[asked.who] = asked
        return []

    def settled(self, asked: Reservation, used: Sequence[Used]) -> None:
        """Its span is on the tape, with what it has used."""
        reserved = self._calls.pop(asked.who, None) is not None
        for place, claim, key in asked.held:
            if reserved:
                self._free(key, asked.since[key], claim.amount)
                self._add(key, asked.since[key], used[place])
            else:
                # What was reserved on the tape is in these.
                self._sums.pop(key, None)

    def lost(self, asked: Reservation) -> None:
        """Its span is not on the tape, and may come there later."""
        self.settled(asked, [Used(0)] * len(asked.claims))
        self.forget_sums()

    def forget_sums(self) -> None:
        """Has them read again: something else may have changed them."""
        self._sums.clear()

    def leave(self) -> list[Reservation]:
        """Reserves nothing any more; returns what is reserved."""
        calls = list(self._calls.values())
        self._calls.clear()
        self._reserved.clear()
        self._sums.clear()
        return calls

    def reserved(self) -> Mapping[tuple[bytes, int], Held]:
        """What is reserved here, by the key of a sum and when its window began."""
        return self._reserved.copy()

    def _claims(self, asked: Reservation) -> Sequence[tuple[int, Claim, bytes]]:
        known = [(at, it, it.limit.key(it.of)) for at, it in enumerate(asked.claims) if it.of is not None]
        if len(known) < len(asked.claims):
            with self._tape.view() as view:
                known = list(held(view, asked))
        asked.held = known
        return known

    def _sum(self, key: bytes) -> Sum:
        known = self._sums.get(key)
        if known is None:
            with self._tape.view() as view:
                stored = view.get(SUMS, key)
            known = self._sums[key] = Sum(0) if stored is None else Sum.read(stored)
        return known

    def _free(self, key: bytes, since: int, amount: int) -> None:
        before = self._reserved.pop((key, since))
        if before.calls > 1:
            self._reserved[key, since] = Held(before.amount - amount, before.calls - 1)

    def _add(self, key: bytes, since: int, used: Used) -> None:
        known = self._sums.get(key)
        if known is not None and since > known.since_ns and (used.amount or used.unread):
            known = self._sums[key] = Sum(since)
        if known is not None and since == known.since_ns:
            known.count(used)
