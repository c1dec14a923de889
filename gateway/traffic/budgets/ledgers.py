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
from penstock.gateway.traffic.budgets.limits import BudgetWindow, Limit
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
