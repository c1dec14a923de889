"""The interface of budgets for calls: reserves for each call before it goes out, and settles it. For the event loop.

A budget counts calls that use tokens. A call reserves once, however many upstreams are tried. A call that no budget
counts costs a check of each budget, and if none is configured there is no such service.

While this gateway alone writes the tape, reservations are in memory (`budgets.here`); with several workers, in the
leader's memory (`budgets.together`). If there are other gateways, reservations are on the tape, for all to see.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any, Final

from penstock.gateway.budgets import refusal
from penstock.gateway.budgets.bounds import Bound, Prompts
from penstock.gateway.budgets.claims import bound_of, budgets_of, claims_of, unread_of
from penstock.gateway.budgets.here import Here
from penstock.gateway.budgets.limits import Limit
from penstock.gateway.budgets.operations import (
    GUESSES,
    LEASE_NS,
    BudgetOperations,
    Claim,
    Reservation,
    Short,
    Used,
    limit_of,
)
from penstock.gateway.budgets.reader import BudgetReader
from penstock.gateway.budgets.spending import spent, used
from penstock.gateway.budgets.together import Answer, Calls, ForOthers, Team
from penstock.gateway.budgets.unread import uses_nothing
from penstock.gateway.budgets.windows import window_at
from penstock.gateway.calls.admitted import Admitted
from penstock.gateway.calls.record import Record
from penstock.gateway.http.errors import Refusal
from penstock.gateway.metrics import Metrics
from penstock.gateway.model.budget import Budget, BudgetUse
from penstock.gateway.model.prices import Prices, Tokens
from penstock.gateway.store import Store, keys
from penstock.gateway.store.directory import TapeError
from penstock.gateway.store.recorder import Recorder
from penstock.gateway.store.records import Entry
from penstock.gateway.store.transaction import Transaction

EVERY_S: Final = LEASE_NS / 3e9
"""Seconds between two rounds that renew leases and delete ended reservations and sums."""
_AT_ONCE: Final = 1000
"""Most sums that are deleted in one transaction."""
_log = logging.getLogger("penstock.budgets")


class Budgets:
    """All budgets. `start` before use, `stop` before the recorder closes."""

    def __init__(
        self,
        budgets: Iterable[Budget],
        prices: Prices,
        store: Store,
        recorder: Recorder,
        metrics: Metrics,
        now_ns: Callable[[], int],
        team: Team,
    ) -> None:
        self._limits = [Limit(budget) for budget in budgets]
        self._prices, self._recorder, self._metrics, self._now_ns = prices, recorder, metrics, now_ns
        self.reader = BudgetReader(store, self._limits)
        self._store, self._here, self._prompts = store, Here(store), Prompts()
        self._team, self._far = team, Calls(self._limits)
        self._alone = self._leaves = False
        """True if this is the leader of a gateway that alone writes the tape; true if another process takes over."""
        self._process, self._numbers = secrets.token_bytes(8), count()
        self._open = set[bytes]()
        """Calls with reservations on the tape; changed by the recorder's thread."""
        self._stopping, self._news = False, asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- a call ------------------------------------------------------------------------------------------------------

    def reserve(
        self, call: Admitted, record: Record, names: Mapping[str, str] = MappingProxyType({})
    ) -> asyncio.Future[list[Short]] | None:
        """Reserve the most that a call may use: done when that is on the tape, with the budgets that have no room for
        it. None if it is done at once, no budget counts the call, or it has reserved before. `names`: its model's
        names, by upstream. Raises `Refusal`."""
        request, record.correct = record.request, self.correct
        if record.settle is not None or request.websocket:
            return None
        if uses_nothing(call.dialect, request.method, call.path, request.headers):
            return None
        found = budgets_of(self._limits, call, record)
        if not found:
            return None
        claims, models = self._claims(found, call, record, names.values())
        who = self._process + keys.number(next(self._numbers))
        asked = Reservation(claims, call.address.rollout, request.started_ns, who)
        record.settle = Settlement(self, asked, models, names)
        if self._alone:
            # The recorder reports a tape that cannot be read.
            with suppress(TapeError):
                short = self._here.reserve(asked, self._now_ns())
                return asyncio.ensure_future(self._reserve_again(asked)) if short else None
        if not self._team.leads:
            return asyncio.ensure_future(self._reserve_far(asked))
        return self._recorder.submit(partial(self._reserve, asked))

    async def _reserve_again(self, asked: Reservation) -> list[Short]:
        short = await self._here_again(asked)
        return await self._recorder.submit(partial(self._reserve, asked)) if short is None else short

    async def _here_again(self, asked: Reservation) -> list[Short] | None:
        """Try again when there was no room: calls that have ended may be about to be settled. None if reservations are
        on the tape by now."""
        _ = await self._recorder.flush_all()
        if asked.settled:
            return []  # its client has left
        # All spans on the tape are settled here by now, so rereading the sums counts none twice.
        self._here.forget_sums()
        return self._here.reserve(asked, self._now_ns()) if self._alone else None

    async def _reserve_far(self, asked: Reservation) -> list[Short]:
        """Let the leader reserve, or reserve on the tape if the leader says so."""
        said = await self._team.ask_first("reserve", self._far.told(asked))
        if asked.settled:
            return []  # its client has left
        if said is None:
            return await self._recorder.submit(partial(self._reserve, asked))
        return self._far.answered(asked, said)

    def refusal(self, short: Sequence[Short], call: Admitted, record: Record) -> Refusal:
        """The refusal of a call for which these budgets have no room."""
        for one in short:
            self._metrics.budget_refusals[(one.claim.limit.budget.name,)] += 1
        return refusal.refusal(short, self._now_ns(), bound_of(self._prompts, call, record))

    def recorded(self, record: Record, kept: bool) -> None:
        """Called when the tape has the span of a call, or has lost it; frees its reservation in both cases."""
        settlement = record.settle
        if record.follows:
            self.forget_sums()
        if not isinstance(settlement, Settlement):
            return
        asked, used = settlement.asked, settlement.used
        if not self._team.leads:
            self._far.open.pop(asked.who, None)
            self._team.tell_first("settled", self._far.told(asked), used if kept else [Used(0)] * len(used))
        elif kept:
            self._here.settled(asked, used)
        else:
            self._here.lost(asked)
        if not kept:
            self._recorder.submit(settlement.release).add_done_callback(lambda done: done.exception())

    def forget_sums(self) -> None:
        """Drop cached sums, in this process or the leader: they were corrected on the tape."""
        if self._team.leads:
            self._here.forget_sums()
        else:
            self._team.tell_first("settled", self._far.told(Reservation([], "", 0, b"")), [])

    # -- of other workers --------------------------------------------------------------------------------------------

    def for_others(self) -> tuple[Mapping[str, Callable[..., Any]], Callable[[], None]]:
        """Handlers of another worker's messages to the leader, and one to call when that worker has died."""
        others = ForOthers(self._limits, self._here)

        def reserve(said: Any) -> Awaitable[Answer | None] | None:
            asked = others.asked(said) if self._alone else None
            return None if asked is None else others.reserve(asked, self._reserve_here)

        return {"reserve": reserve, "settled": others.settled}, others.gone

    async def _reserve_here(self, asked: Reservation) -> list[Short] | None:
        with suppress(TapeError):  # the recorder reports it
            return self._here.reserve(asked, self._now_ns()) and await self._here_again(asked)
        return None

    # ----------------------------------------------------------------------------------------------------------------

    def _claims(
        self, found: Sequence[tuple[Limit, str | None]], call: Admitted, record: Record, names: Iterable[str]
    ) -> tuple[list[Claim], list[str]]:
        """The claims of a call, and the names of its model if it costs money. Raises `Refusal`."""
        unread = unread_of(call, record)
        if unread is not None:
            for limit, _ in found:
                self._metrics.budget_unread[(limit.budget.name, limit.budget.of_unread)] += 1
                if limit.budget.of_unread == "refuse":
                    self._metrics.budget_refusals[(limit.budget.name,)] += 1
                    break
        units, began = {limit.budget.unit for limit, _ in found}, record.request.started_ns
        models = self._models(call, record, names) if "usd" in units else []
        if unread is not None:
            return list(claims_of(found, unread, call.model, [], b"")), models
        priced = [price for name in models if (price := self._prices.price(name, began)) is not None]
        bound = Bound(0, 0) if units == {"calls"} else bound_of(self._prompts, call, record)
        return list(claims_of(found, bound, call.model, priced, call.body)), models

    def _models(self, call: Admitted, record: Record, names: Iterable[str]) -> list[str]:
        """The names of its model: the client's, and those on the way."""
        sent = record.call.dialect.model(record.plain, record.call.path) if record.changed else None
        return list(dict.fromkeys(name for name in (call.model, sent, *names) if name))

    @property
    def names(self) -> list[str]:
        """Names of all configured budgets."""
        return [limit.budget.name for limit in self._limits]

    def uses(self, name: str | None = None) -> list[BudgetUse]:
        """The use of all budgets in the current windows; reads the tape. `name`: only of this budget."""
        return self.reader.uses(self._now_ns(), name, self._here.reserved())

    # -- on the recorder's thread ------------------------------------------------------------------------------------

    def _reserve(self, asked: Reservation, tape: Transaction) -> list[Short]:
        if asked.settled:
            return []  # its client has left while another worker, or the memory of this one, was asked
        self._open.add(asked.who)
        return BudgetOperations(tape).reserve(asked, self._now_ns())

    def settle(self, tape: Transaction, asked: Reservation, spent: Sequence[Used]) -> list[tuple[bytes, int, int]]:
        """Count the use of a call, and free its reservation."""
        self._open.discard(asked.who)
        return BudgetOperations(tape).settle(asked, spent)

    def correct(self, tape: Transaction, entry: Entry, answer: str) -> None:
        """Replace the guess for an answer by its use, after it was fetched."""
        do = BudgetOperations(tape)
        counted, models = do.guessed(answer)
        tape.delete(GUESSES, answer.encode())
        # A stopped answer has used something, whether its provider reports that or not.
        if entry.usage is None and entry.finish != "failed":
            return
        found = spent(entry if entry.usage is None else replace(entry, error=None))
        cost = partial(self.cost, entry.model_served, models, entry.start_ns)
        for key, since, amount in counted:
            limit = limit_of(key, self._limits)
            if limit is not None and limit.budget.unit != "calls":
                (one,) = used([Claim(limit, "", amount)], found, cost)
                do.correct(key, since, amount, one)

    def correct_batch(self, tape: Transaction, batch: str, results: Sequence[Entry]) -> None:
        """Count the use of results of a batch, now, in the budgets that count the call which has made it."""
        do, now = BudgetOperations(tape), self._now_ns()
        for key, _, _ in do.guessed(batch)[0]:
            limit = limit_of(key, self._limits)
            for entry in results if limit is not None else ():
                if limit is not None and limit.is_about(entry.model):
                    cost = partial(self.cost, entry.model_served, [entry.model or ""], entry.start_ns)
                    (one,) = used([Claim(limit, "", 0)], spent(entry), cost)
                    do.count(key, window_at(limit.budget.window, now).since_ns, None, one)

    def cost(self, served: str | None, models: Iterable[str], at_ns: int, tokens: Tokens) -> float | None:
        """Cost of tokens, in dollars, of the model that answered, or else of the requested one; None without a
        price."""
        found = (self._prices.cost(served, name, at_ns, tokens) for name in models)
        return next((dollars for dollars in found if dollars is not None), None)

    # -- meanwhile ---------------------------------------------------------------------------------------------------

    @property
    def or_none(self) -> Budgets | None:
        """These budgets; None if none is configured, so that calls skip them."""
        return self if self._limits else None

    async def start(self) -> None:
        """Begin to renew leases and to delete ended reservations and sums."""
        if self._limits:
            await self._safely(self._look_round)
            self._task = asyncio.ensure_future(self._run())

    async def share(self) -> None:
        """Move reservations from memory to the tape: another process takes over."""
        self._leaves, self._alone = True, False
        _ = await self._team.ask_others("share")
        await self._bring([asked for asked in self._here.leave() if asked.who[:8] == self._process])
        await self.bring()

    async def bring(self) -> None:
        """Move to the tape what the leader has reserved for calls of this process: the leader has died, or another
        process takes over."""
        await self._bring(self._far.leave())

    async def _bring(self, calls: Sequence[Reservation]) -> None:
        if calls:
            with suppress(TapeError):  # the recorder has reported it
                await self._recorder.submit(partial(self._keep, calls))

    def _keep(self, calls: Sequence[Reservation], tape: Transaction) -> None:
        self._open.update(asked.who for asked in BudgetOperations(tape).keep(calls, self._now_ns()))

    async def stop(self) -> None:
        """End the renewal of leases."""
        self._stopping = True
        self.look_again()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while not self._stopping:
            self._news.clear()
            await self._safely(self._tend)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._news.wait()

    def look_again(self) -> None:
        """Check soon whether this gateway alone writes the tape: a worker has come or gone."""
        self._news.set()

    async def _safely(self, do: Callable[[], Awaitable[None]]) -> None:
        try:
            await do()
        except TapeError:
            pass  # the recorder has reported it
        except Exception:
            _log.exception("budgets could not be tended")

    async def _look_round(self) -> None:
        """Keep reservations in memory if nobody else writes the tape."""
        if self._alone or self._leaves or not self._team.leads or await self._others_write():
            return
        if self._team.several:
            # After this, all reservations of this gateway's other workers are on the tape.
            if not await self._recorder.flush_others() or await self._others_write():
                return
        else:
            await self._recorder.submit(lambda tape: BudgetOperations(tape).bury(self._now_ns(), self._process))
        self._here.forget_sums()
        # A takeover may have begun meanwhile.
        self._alone = not self._leaves

    async def _others_write(self) -> bool:
        living = await asyncio.to_thread(self._store.living)
        return bool(living - {self._store.process} - self._team.processes())

    async def _tend(self) -> None:
        self._here.forget_sums()
        await self._look_round()
        if self._open:
            await self._recorder.submit(lambda tape: BudgetOperations(tape).renew(self._process, self._now_ns()))
        found = await asyncio.to_thread(self.reader.over, self._now_ns(), _AT_ONCE)
        if found or await asyncio.to_thread(self.reader.dead, self._now_ns()):
            await self._recorder.submit(lambda tape: BudgetOperations(tape).clear(found, self._limits, self._now_ns()))


class Settlement:
    """Settles the reservation of a call, in the transaction of its span. The call refers to it and not the other way
    round: with a reference cycle, thousands of calls would make the collector pause for 15 ms."""

    __slots__ = ("_budgets", "_models", "_names", "asked", "used")

    def __init__(self, budgets: Budgets, asked: Reservation, models: Sequence[str], names: Mapping[str, str]) -> None:
        """`models`: names of its model, the client's and those on the way; `names`: by upstream."""
        self._budgets, self.asked, self._models, self._names = budgets, asked, models, names
        self.used = [Used(0)] * len(asked.claims)
        """Use by the index of each claim."""

    def __call__(self, tape: Transaction, entry: Entry) -> None:
        """Called in the transaction of its span."""
        own = self._names.get(entry.upstream or "")
        models = self._models if own is None else [own, *self._models]
        cost = partial(self._budgets.cost, entry.model_served, models, entry.start_ns)
        claims, found = self.asked.claims, spent(entry)
        if entry.deferred is None:
            told = used(claims, found, cost)
        else:
            told = [Used(it.amount, guessed=it.limit.budget.unit != "calls") for it in claims]
        counts = entry.deferred is not None or found is not None
        self.used = [one._replace(unread=it.unread and counts) for it, one in zip(claims, told, strict=True)]
        counted = self._budgets.settle(tape, self.asked, self.used)
        if (later := entry.deferred or entry.batch) is not None:
            BudgetOperations(tape).guess(later, counted, models)

    def release(self, tape: Transaction) -> None:
        """Free the reservation: the span is lost."""
        self._budgets.settle(tape, self.asked, [Used(0)] * len(self.asked.claims))
