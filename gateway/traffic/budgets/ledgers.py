"""Reservations of what calls may use: in this process, or with the leader of several workers.

While this process alone writes the tape, reservations are kept in memory, so that no call waits for a commit.

The amounts used are on the tape, with the spans. The sums there are cached for some seconds, and the use of a call is
added to the cache when its span is durable, so the cache equals the tape. Before another process writes the tape as
well, all reservations are moved there (`LocalLedger.drain`, `operations.BudgetOperations.persist`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import msgspec

from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.traffic.budgets.operations import (
    SUMS,
    BudgetCharge,
    BudgetClaim,
    BudgetReservation,
    BudgetShortfall,
    BudgetSum,
    BudgetWindow,
    Limit,
    current_sum,
    fits,
    resolve_owners,
    sum_key,
    window_at,
)

_NOTHING: Final = (0, 0)


class LocalLedger:
    """The reservations of this process in memory. On the event loop only."""

    def __init__(self, tape: StoreReader) -> None:
        self._tape = tape
        self._sums: dict[bytes, tuple[BudgetSum, BudgetWindow]] = {}
        """The sums of the tape, each with its window, by key."""
        self._reserved: dict[tuple[bytes, int], tuple[int, int]] = {}
        """(amount, number of calls) reserved, by the key of a sum and the begin of its window (ns)."""
        self._calls: dict[bytes, BudgetReservation] = {}

    def reserve(self, asked: BudgetReservation, now: int) -> list[BudgetShortfall]:
        """Reserve for a call, as `operations.BudgetOperations.reserve` does; return the budgets without room."""
        known: list[tuple[int, BudgetClaim, bytes]] = []
        for place, claim in enumerate(asked.claims):
            if claim.of is None:
                with self._tape.view() as view:
                    known = list(resolve_owners(view, asked))
                break
            known.append((place, claim, sum_key(claim.limit.prefix, claim.of)))
        asked.resolved_claims = known
        since: dict[bytes, int] = {}
        short: list[BudgetShortfall] = []
        for _, claim, key in known:
            sum_, window = self._sums.get(key) or self._read(key, claim.limit)
            # If the clock went back, the window that has begun goes on.
            if window.ends_ns is not None and now >= window.ends_ns:
                sum_, window = current_sum(sum_, claim, now)
            since[key] = window.since_ns
            amount, calls = self._reserved.get((key, window.since_ns), _NOTHING)
            # Most have room, whatever kind of claim it is; `fits` decides about the others.
            if sum_.used + sum_.reserved + amount + claim.amount > claim.limit.most:
                told = replace(sum_, reserved=sum_.reserved + amount, running=sum_.running + calls)
                if not fits(claim, told):
                    short.append(BudgetShortfall(claim, told, window))
        if short:
            return short
        for _, claim, key in known:
            window_key = key, since[key]
            amount, calls = self._reserved.get(window_key, _NOTHING)
            self._reserved[window_key] = amount + claim.amount, calls + 1
        asked.since = since
        self._calls[asked.who] = asked
        return []

    def standing(self, claim: BudgetClaim, now: int) -> tuple[BudgetSum, BudgetWindow]:
        """The use of a budget that a claim names, and the present window."""
        key = sum_key(claim.limit.prefix, claim.of or "")
        return current_sum((self._sums.get(key) or self._read(key, claim.limit))[0], claim, now)

    def settle(self, asked: BudgetReservation, used: Sequence[BudgetCharge]) -> None:
        """Called when the span of a call is on the tape, with the amounts used."""
        reserved = self._calls.pop(asked.who, None) is not None
        for place, claim, key in asked.resolved_claims:
            if not reserved:
                # The reservation was on the tape, so the cached sum is out of date.
                self._sums.pop(key, None)
                continue
            since, charge = asked.since[key], used[place]
            amount, calls = self._reserved.pop((key, since))
            if calls > 1:
                self._reserved[key, since] = amount - claim.amount, calls - 1
            known = self._sums.get(key)
            if known is None:
                continue
            sum_ = known[0]
            if since > sum_.since_ns and (charge.amount or charge.unread):
                sum_ = BudgetSum(since)
                self._sums[key] = sum_, window_at(claim.limit.budget.window, since)
            if since == sum_.since_ns:
                sum_.count(charge)

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

    def reserved(self) -> Mapping[tuple[bytes, int], tuple[int, int]]:
        """A copy of all (amounts, numbers of calls) reserved here, by the key of a sum and the begin of its window."""
        return self._reserved.copy()

    def _read(self, key: bytes, limit: Limit) -> tuple[BudgetSum, BudgetWindow]:
        with self._tape.view() as view:
            stored = view.get(SUMS, key)
        sum_ = BudgetSum(0) if stored is None else BudgetSum.read(stored)
        known = self._sums[key] = sum_, window_at(limit.budget.window, sum_.since_ns)
        return known


# Budgets of several workers of one gateway: the leader reserves for all, in its memory (`LocalLedger`), while no other
# process writes the tape. A worker asks it before a call goes out, and reports the use of the call when its span is
# durable.
#
# The reservations of a worker that dies are freed. If the leader dies, or another gateway takes over, each worker
# moves the reservations of its calls to the tape, where all see them.


class LedgerPeers(Protocol):
    """The workers of this gateway."""

    is_leader: bool
    """True in the leader."""

    @property
    def has_peers(self) -> bool:
        """True if there are, or will be, other workers."""
        ...

    def peer_processes(self) -> set[str]:
        """Names of the other workers that are connected with this one."""
        ...

    def request_leader(self, name: str, *said: Any) -> Awaitable[Any]:
        """Ask the leader; None if it does not answer."""
        ...

    def notify_leader(self, name: str, *said: Any) -> None: ...

    def request_peers(self, name: str, *said: Any) -> Awaitable[Mapping[str, Any]]:
        """Ask all other workers and return their answers."""
        ...


class ReserveRequest(msgspec.Struct):
    """A reservation, as it is sent to the leader."""

    who: bytes
    rollout: str
    began_ns: int
    claims: list[tuple[bytes, str | None, int, bool]]
    """(prefix of the budget's keys, owner, amount, whether the use cannot be counted) of each claim."""


class ReserveReply(msgspec.Struct):
    """The leader's answer to a reservation."""

    held: list[tuple[int, str | None, bytes]] = []
    """(index, owner, key of the sum) of the claims whose owners are known."""
    since: dict[bytes, int] = {}
    """Begin of the window (ns), by the key of a sum."""
    short: list[tuple[int, str | None, tuple[int, ...], tuple[int, int | None]]] = []
    """(index of the claim, owner, sum, window) of each budget that has no room."""


class RemoteLedger:
    """The calls of this process that have a reservation at the leader."""

    def __init__(self, limits: Sequence[Limit]) -> None:
        self._limits = limits
        self.open: dict[bytes, BudgetReservation] = {}

    def request(self, asked: BudgetReservation) -> ReserveRequest:
        """The message that asks for a reservation."""
        claims = [(claim.limit.prefix, claim.of, claim.amount, claim.unread) for claim in asked.claims]
        return ReserveRequest(asked.who, asked.rollout, asked.began_ns, claims)

    def accept_reply(self, asked: BudgetReservation, said: Any) -> list[BudgetShortfall]:
        """Take the leader's answer; return the budgets that have no room."""
        answer = msgspec.convert(said, ReserveReply)
        asked.resolved_claims = [(place, asked.claims[place]._replace(of=of), key) for place, of, key in answer.held]
        asked.since = answer.since
        if not answer.short and not asked.settled:
            self.open[asked.who] = asked
        return [
            BudgetShortfall(asked.claims[place]._replace(of=of), BudgetSum(*sum_), BudgetWindow(*window))
            for place, of, sum_, window in answer.short
        ]

    def drain(self) -> list[BudgetReservation]:
        """Return all reservations at the leader, which keeps them no longer."""
        calls = list(self.open.values())
        self.open.clear()
        return calls


class LedgerServer:
    """The leader's reservations for the calls of another worker."""

    def __init__(self, limits: Iterable[Limit], here: LocalLedger) -> None:
        self._limits = {limit.prefix: limit for limit in limits}
        self._here = here
        self._open: dict[bytes, BudgetReservation] = {}

    def parse(self, said: Any) -> BudgetReservation | None:
        """The requested reservation; None if this process does not know one of its budgets."""
        told = msgspec.convert(said, ReserveRequest)
        if not all(prefix in self._limits for prefix, *_ in told.claims):
            return None
        claims = [BudgetClaim(self._limits[prefix], of, amount, unread) for prefix, of, amount, unread in told.claims]
        return BudgetReservation(claims, told.rollout, told.began_ns, told.who)

    def reserve(
        self, asked: BudgetReservation, reserve: Callable[[BudgetReservation], Awaitable[list[BudgetShortfall] | None]]
    ) -> Awaitable[ReserveReply | None]:
        """Reserve in memory; None if it must be done on the tape."""
        # Noted at once: the worker's next message may be that the call has ended.
        self._open[asked.who] = asked
        return self._reserve(asked, reserve)

    async def _reserve(
        self, asked: BudgetReservation, reserve: Callable[[BudgetReservation], Awaitable[list[BudgetShortfall] | None]]
    ) -> ReserveReply | None:
        if asked.settled:
            return ReserveReply()
        short = await reserve(asked)
        held = [(place, claim.of, key) for place, claim, key in asked.resolved_claims]
        if short is not None and not short:
            return ReserveReply(held, asked.since)
        self._open.pop(asked.who, None)
        if short is None:
            return None
        # Claims are not hashable: a limit may contain a list.
        places = {id(claim): place for place, claim, _ in asked.resolved_claims}
        return ReserveReply(held, short=[(places[id(one.claim)], one.claim.of, *_numbers(one)) for one in short])

    def settle(self, said: Any, used: Sequence[tuple[int, bool, bool]]) -> None:
        """Called when a call of the worker has ended, and the tape has its span."""
        told = self.parse(said)
        if told is None:
            return
        asked = self._open.pop(told.who, told)
        asked.settled = True
        if not asked.resolved_claims:
            # The reservation may have been on the tape, so the cached sums are out of date.
            self._here.forget_sums()
        else:
            self._here.settle(asked, [BudgetCharge(*one) for one in used])

    def release_all(self) -> None:
        """Free all reservations: the worker has died or left, and its use is on the tape."""
        for asked in self._open.values():
            self._here.discard(asked)
        self._open.clear()


def _numbers(short: BudgetShortfall) -> tuple[tuple[int, ...], tuple[int, int | None]]:
    sum_, window = short.sum, short.window
    return (
        (sum_.since_ns, sum_.used, sum_.guessed, sum_.reserved, sum_.running, sum_.unread),
        (window.since_ns, window.ends_ns),
    )
