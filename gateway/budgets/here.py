"""Reservations of calls while this process alone writes the tape: kept in memory, so that no call waits for a commit.

The amounts used are on the tape, with the spans. The sums there are cached for some seconds, and the use of a call is
added to the cache when its span is durable, so the cache equals the tape. Before another process writes the tape as
well, all reservations are moved there (`Here.leave`, `operations.BudgetOperations.keep`).
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
    """The reservations of this process in memory. On the event loop only."""

    def __init__(self, tape: Reader) -> None:
        self._tape = tape
        self._sums: dict[bytes, Sum] = {}
        """The sums of the tape, by key."""
        self._reserved: dict[tuple[bytes, int], Held] = {}
        """By the key of a sum and the begin of its window (ns)."""
        self._calls: dict[bytes, Reservation] = {}

    def reserve(self, asked: Reservation, now: int) -> list[Short]:
        """Reserve for a call, as `operations.BudgetOperations.reserve` does; return the budgets without room."""
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
        """Called when the span of a call is on the tape, with the amounts used."""
        reserved = self._calls.pop(asked.who, None) is not None
        for place, claim, key in asked.held:
            if reserved:
                self._free(key, asked.since[key], claim.amount)
                self._add(key, asked.since[key], used[place])
            else:
                # The reservation was on the tape, so the cached sum is out of date.
                self._sums.pop(key, None)

    def lost(self, asked: Reservation) -> None:
        """Called when the span of a call is not on the tape; it may come there later."""
        self.settled(asked, [Used(0)] * len(asked.claims))
        self.forget_sums()

    def forget_sums(self) -> None:
        """Drop the cached sums: something else may have changed them on the tape."""
        self._sums.clear()

    def leave(self) -> list[Reservation]:
        """Stop reserving here; return all reservations."""
        calls = list(self._calls.values())
        self._calls.clear()
        self._reserved.clear()
        self._sums.clear()
        return calls

    def reserved(self) -> Mapping[tuple[bytes, int], Held]:
        """A copy of all amounts reserved here, by the key of a sum and the begin of its window."""
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
