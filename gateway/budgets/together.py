"""Budgets of several workers of one gateway: the first one reserves for all, in its memory (`budgets.here`), while no
other process writes the tape. A worker asks it before a call goes out, and says what the call has used when its span
is durable.

What a worker that dies had reserved is free. Where the first one dies, or another gateway takes over, each worker
brings what is reserved for its calls to the tape, where all see it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from penstock.gateway.budgets.here import Here
from penstock.gateway.budgets.limits import Limit
from penstock.gateway.budgets.operations import Claim, Reservation, Short, Sum, Used
from penstock.gateway.budgets.windows import Window


class Team(Protocol):
    """The workers of this gateway."""

    leads: bool
    """Whether this is the first one."""

    @property
    def several(self) -> bool:
        """Whether there are, or will be, others."""
        ...

    def processes(self) -> set[str]:
        """Names of the others that have a link with this one."""
        ...

    def ask_first(self, name: str, *said: Any) -> Awaitable[Any]:
        """What the first one answers; None where it does not."""
        ...

    def tell_first(self, name: str, *said: Any) -> None:
        """Says something to the first one."""
        ...

    def ask_others(self, name: str, *said: Any) -> Awaitable[Mapping[str, Any]]:
        """What the others answer."""
        ...


class Told(msgspec.Struct):
    """A reservation, as it goes to the first worker."""

    who: bytes
    rollout: str
    began_ns: int
    claims: list[tuple[bytes, str | None, int, bool]]
    """(prefix of the budget's keys, whose, how much, whether that is unread) of each."""


class Answer(msgspec.Struct):
    """What becomes of it."""

    held: list[tuple[int, str | None, bytes]] = []
    """(place, whose, key of the sum) of the claims whose budgets are known."""
    since: dict[bytes, int] = {}
    """When the window began, by the key of a sum."""
    short: list[tuple[int, str | None, tuple[int, ...], tuple[int, int | None]]] = []
    """(place, whose, sum, window) of each budget that has no room."""


class Calls:
    """The calls of this process for which the first worker has reserved something."""

    def __init__(self, limits: Sequence[Limit]) -> None:
        self._limits = limits
        self.open: dict[bytes, Reservation] = {}

    def told(self, asked: Reservation) -> Told:
        """As it is asked for."""
        claims = [(claim.limit.prefix, claim.of, claim.amount, claim.unread) for claim in asked.claims]
        return Told(asked.who, asked.rollout, asked.began_ns, claims)

    def answered(self, asked: Reservation, said: Any) -> list[Short]:
        """Takes the answer; what has no room for it."""
        answer = msgspec.convert(said, Answer)
        asked.held = [(place, asked.claims[place]._replace(of=of), key) for place, of, key in answer.held]
        asked.since = answer.since
        if not answer.short and not asked.settled:
            self.open[asked.who] = asked
        return [
            Short(asked.claims[place]._replace(of=of), Sum(*sum_), Window(*window))
            for place, of, sum_, window in answer.short
        ]

    def leave(self) -> list[Reservation]:
        """The first worker reserves nothing for them any more."""
        calls = list(self.open.values())
        self.open.clear()
        return calls


class ForOthers:
    """What the first worker reserves for the calls of another."""

    def __init__(self, limits: Iterable[Limit], here: Here) -> None:
        self._limits = {limit.prefix: limit for limit in limits}
        self._here = here
        self._open: dict[bytes, Reservation] = {}

    def asked(self, said: Any) -> Reservation | None:
        """What is asked for; None where one of its budgets is not known here."""
        told = msgspec.convert(said, Told)
        if not all(prefix in self._limits for prefix, *_ in told.claims):
            return None
        claims = [Claim(self._limits[prefix], of, amount, unread) for prefix, of, amount, unread in told.claims]
        return Reservation(claims, told.rollout, told.began_ns, told.who)

    def reserve(
        self, asked: Reservation, reserve: Callable[[Reservation], Awaitable[list[Short] | None]]
    ) -> Awaitable[Answer | None]:
        """Reserves it; None where that must be done on the tape."""
        # Known at once: what is said in the same breath may be that it has ended.
        self._open[asked.who] = asked
        return self._reserve(asked, reserve)

    async def _reserve(
        self, asked: Reservation, reserve: Callable[[Reservation], Awaitable[list[Short] | None]]
    ) -> Answer | None:
        if asked.settled:
            return Answer()
        short = await reserve(asked)
        held = [(place, claim.of, key) for place, claim, key in asked.held]
        if short is not None and not short:
            return Answer(held, asked.since)
        self._open.pop(asked.who, None)
        if short is None:
            return None
        # Claims have no hash: what a limit is made of may be a list.
        places = {id(claim): place for place, claim, _ in asked.held}
        return Answer(held, short=[(places[id(one.claim)], one.claim.of, *_numbers(one)) for one in short])

    def settled(self, said: Any, used: Sequence[tuple[int, bool, bool]]) -> None:
        """A call has ended, and the tape has its span."""
        told = self.asked(said)
        if told is None:
            return
        asked = self._open.pop(told.who, told)
        asked.settled = True
        if not asked.held:
            # What was reserved on the tape, or whatever it was, is in sums that are to be read again.
            self._here.forget_sums()
        else:
            self._here.settled(asked, [Used(*one) for one in used])

    def gone(self) -> None:
        """The worker has died or has left: what it has used is on the tape."""
        for asked in self._open.values():
            self._here.lost(asked)
        self._open.clear()


def _numbers(short: Short) -> tuple[tuple[int, ...], tuple[int, int | None]]:
    sum_, window = short.sum, short.window
    return (
        (sum_.since_ns, sum_.used, sum_.guessed, sum_.reserved, sum_.running, sum_.unread),
        (window.since_ns, window.ends_ns),
    )
