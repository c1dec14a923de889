"""The interface of budgets for calls: reserves for each call before it goes out, and settles it. For the event loop.

A budget counts calls that use tokens. A call reserves once, however many upstreams are tried. Which budgets count a
call is remembered by its model, key, agent, rollout and arms; if none is configured there is no such service.

A call that was refused, did not reach its upstream, or was left before the first byte of the answer has used nothing.
Any other has used what its provider reports. If the provider reports no counts, the estimate of its tokens counts, and
is marked as a guess; without an estimate, the reserved amount counts as a guess.

While this gateway alone writes the tape, reservations are in its memory (`ledgers.LocalLedger`); with several workers,
in the leader's (`ledgers.RemoteLedger`). If there are other gateways, reservations are on the tape, for all to see.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.prices import Price, Prices, TokenCounts
from penstock.gateway.model.state import Budget, BudgetUse
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.traffic.budgets.claims import (
    PromptCounter,
    TokenBound,
    bound_of,
    budget_refusal,
    budgets_of,
    claims_of,
    known_model,
    standing_headers,
    unified_headers,
    unread_claims,
    unread_of,
    uses_nothing,
)
from penstock.gateway.traffic.budgets.ledgers import LedgerPeers, LedgerServer, LocalLedger, RemoteLedger, ReserveReply
from penstock.gateway.traffic.budgets.operations import (
    GUESSES,
    LEASE_NS,
    BudgetCharge,
    BudgetClaim,
    BudgetOperations,
    BudgetReader,
    BudgetReservation,
    BudgetShortfall,
    Limit,
    limit_of,
    nanodollars,
    window_at,
)
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.wire.dialects.family import ANTHROPIC
from penstock.gateway.wire.http.request import Refusal

_UNUSED: Final = BudgetCharge(0)
_ONE_CALL: Final = BudgetCharge(1)
_NO_TOKENS: Final = TokenBound(0, 0)
EVERY_S: Final = LEASE_NS / 3e9
"""Seconds between two rounds that renew leases and delete ended reservations and sums."""
_AT_ONCE: Final = 1000
"""Most sums that are deleted in one transaction."""
_REMEMBERED: Final = 4096
"""Combinations of model, key, agent, rollout and arms whose budgets are remembered."""
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
        team: LedgerPeers,
    ) -> None:
        self._limits = [Limit(budget) for budget in budgets]
        self._prices, self._recorder, self._metrics, self._now_ns = prices, recorder, metrics, now_ns
        self.reader = BudgetReader(store, self._limits)
        self._store, self._local, self._prompts = store, LocalLedger(store), PromptCounter()
        self._budgets_of = lru_cache(_REMEMBERED)(partial(budgets_of, self._limits))
        self._team, self._remote = team, RemoteLedger(self._limits)
        self._alone = self._leaves = False
        """True if this is the leader of a gateway that alone writes the tape; true if another process takes over."""
        self._process, self._numbers = secrets.token_bytes(8), count()
        self._open = set[bytes]()
        """Calls with reservations on the tape; changed by the recorder's thread."""
        self._stopping, self._news = False, asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- a call ------------------------------------------------------------------------------------------------------

    def reserve(
        self, call: CallRequest, record: CallRecord, names: Mapping[str, str] = MappingProxyType({})
    ) -> asyncio.Future[list[BudgetShortfall]] | None:
        """Reserve the most that a call may use: done when that is on the tape, with the budgets that have no room for
        it. None if it is done at once, no budget counts the call, or it has reserved before. `names`: its model's
        names, by upstream. Raises `Refusal`."""
        request, dialect = record.request, call.dialect
        record.correct, record.count_results = self.correct, self.correct_batch
        if record.settle is not None or (request.websocket and not dialect.session):
            return None
        if not dialect.uses_tokens and uses_nothing(dialect, request.method, call.path, request.headers):
            return None
        model, address = call.model, call.address
        about = known_model(model, dialect, call.path) if dialect.unknown else model
        found = self._budgets_of(about, call.key, address.agent, address.rollout, record.arm)
        if not found.claims:
            return None
        hosted = call.families[:1] == (dialect.family,) and dialect.gives_work(
            request.method, call.path.partition("?")[0]
        )
        unread = None if hosted else unread_of(call, record)
        if unread is not None:
            self._note_unread(found.claims)
        models = self._models(call, record, names.values()) if found.priced else []
        if hosted:
            # It uses nothing itself. There must be room for something.
            claims = found.claims
        elif unread is not None:
            claims = unread_claims(found.claims, unread)
        else:
            bound = bound_of(self._prompts, call, record) if found.bounded else _NO_TOKENS
            prices = self._prices_of(models, request.started_ns) if models else []
            claims = claims_of(found.claims, bound, model, prices, call.body)
        who = self._process + next(self._numbers).to_bytes(8, "big")
        asked = BudgetReservation(claims, address.rollout, request.started_ns, who)
        record.settle = Settlement(self, asked, models, names, [_UNUSED] * len(claims))
        if self._alone:
            try:
                short = self._local.reserve(asked, self._now_ns())
                return asyncio.ensure_future(self._reserve_again(asked)) if short else None
            except TapeError:
                pass  # the recorder reports a tape that cannot be read
        if not self._team.is_leader:
            return asyncio.ensure_future(self._reserve_remotely(asked))
        return self._recorder.submit(partial(self._reserve, asked))

    async def _reserve_again(self, asked: BudgetReservation) -> list[BudgetShortfall]:
        short = await self._retry_locally(asked)
        return await self._recorder.submit(partial(self._reserve, asked)) if short is None else short

    async def _retry_locally(self, asked: BudgetReservation) -> list[BudgetShortfall] | None:
        """Try again when there was no room: calls that have ended may be about to be settled. None if reservations are
        on the tape by now."""
        _ = await self._recorder.flush_all()
        if asked.settled:
            return []  # its client has left
        # All spans on the tape are settled here by now, so rereading the sums counts none twice.
        self._local.forget_sums()
        return self._local.reserve(asked, self._now_ns()) if self._alone else None

    async def _reserve_remotely(self, asked: BudgetReservation) -> list[BudgetShortfall]:
        """Let the leader reserve, or reserve on the tape if the leader says so."""
        said = await self._team.request_leader("reserve", self._remote.request(asked))
        if asked.settled:
            return []  # its client has left
        if said is None:
            return await self._recorder.submit(partial(self._reserve, asked))
        return self._remote.accept_reply(asked, said)

    def refusal(self, short: Sequence[BudgetShortfall], call: CallRequest, record: CallRecord) -> Refusal:
        """The refusal of a call for which these budgets have no room."""
        for one in short:
            self._metrics.budget_refusals[(one.claim.limit.budget.name,)] += 1
        now = self._now_ns()
        made = budget_refusal(short, now, bound_of(self._prompts, call, record))
        if call.dialect.family is ANTHROPIC:
            made.headers = [*made.headers, *unified_headers(short, now)]
        return made

    def standing(self, record: CallRecord) -> Sequence[tuple[bytes, bytes]]:
        """Headers that tell Anthropic's clients how full the key's budget is; none if no budget counts the call for its
        key, or with all others."""
        if not isinstance(settlement := record.settle, Settlement):
            return ()
        try:
            return standing_headers(self._standings(settlement.asked.claims))
        except TapeError:
            return ()  # the recorder reports it

    def of_key(self, key: str) -> list[BudgetShortfall]:
        """The use of the budgets that count calls of any model with this key, alone or with all others. Raises
        `TapeError`."""
        return self._standings(self._budgets_of(None, key, None, "", None).claims)

    def _standings(self, claims: Iterable[BudgetClaim]) -> list[BudgetShortfall]:
        now, owners = self._now_ns(), ("key", "all")
        return [
            BudgetShortfall(claim, *self._local.standing(claim, now))
            for claim in claims
            if claim.limit.budget.per in owners
        ]

    def recorded(self, record: CallRecord, kept: bool) -> None:
        """Called when the tape has the span of a call, or has lost it; frees its reservation in both cases."""
        settlement = record.settle
        if record.follows:
            self.forget_sums()
        if not isinstance(settlement, Settlement):
            return
        asked, used = settlement.asked, settlement.used
        if not self._team.is_leader:
            self._remote.open.pop(asked.who, None)
            self._team.notify_leader("settled", self._remote.request(asked), used if kept else [_UNUSED] * len(used))
        elif kept:
            self._local.settle(asked, used)
        else:
            self._local.discard(asked)
        if not kept:
            self._recorder.submit(settlement.release).add_done_callback(lambda done: done.exception())

    def forget_sums(self) -> None:
        """Drop cached sums, in this process or the leader: they were corrected on the tape."""
        if self._team.is_leader:
            self._local.forget_sums()
        else:
            self._team.notify_leader("settled", self._remote.request(BudgetReservation([], "", 0, b"")), [])

    # -- calls of other workers --------------------------------------------------------------------------------------

    def peer_handlers(self) -> tuple[Mapping[str, Callable[..., Any]], Callable[[], None]]:
        """Handlers of another worker's messages to the leader, and one to call when that worker has died."""
        others = LedgerServer(self._limits, self._local)

        def reserve(said: Any) -> Awaitable[ReserveReply | None] | None:
            asked = others.parse(said) if self._alone else None
            return None if asked is None else others.reserve(asked, self._reserve_locally)

        return {"reserve": reserve, "settled": others.settle}, others.release_all

    async def _reserve_locally(self, asked: BudgetReservation) -> list[BudgetShortfall] | None:
        with suppress(TapeError):  # the recorder reports it
            return self._local.reserve(asked, self._now_ns()) and await self._retry_locally(asked)
        return None

    # ----------------------------------------------------------------------------------------------------------------

    def _note_unread(self, claims: Iterable[BudgetClaim]) -> None:
        for claim in claims:
            budget = claim.limit.budget
            self._metrics.budget_unread[(budget.name, "refuse" if budget.refuses_unknown else "pass")] += 1
            if budget.refuses_unknown:
                self._metrics.budget_refusals[(budget.name,)] += 1
                break

    def _models(self, call: CallRequest, record: CallRecord, names: Iterable[str]) -> list[str]:
        """The names of its model: the client's, and those on the way."""
        sent = record.call.dialect.model(record.plain, record.call.path) if record.changed else None
        return list(dict.fromkeys(name for name in (call.model, sent, *names) if name))

    def _prices_of(self, models: Iterable[str], at_ns: int) -> list[Price]:
        return [price for name in models if (price := self._prices.price(name, at_ns)) is not None]

    @property
    def names(self) -> list[str]:
        """Names of all configured budgets."""
        return [limit.budget.name for limit in self._limits]

    def uses(self, name: str | None = None) -> list[BudgetUse]:
        """The use of all budgets in the current windows; reads the tape. `name`: only of this budget."""
        return self.reader.uses(self._now_ns(), name, self._local.reserved())

    # -- on the recorder's thread ------------------------------------------------------------------------------------

    def _reserve(self, asked: BudgetReservation, tape: Transaction) -> list[BudgetShortfall]:
        if asked.settled:
            return []  # its client has left while another worker, or the memory of this one, was asked
        self._open.add(asked.who)
        return BudgetOperations(tape).reserve(asked, self._now_ns())

    def settle(
        self, tape: Transaction, asked: BudgetReservation, spent: Sequence[BudgetCharge]
    ) -> list[tuple[bytes, int, int]]:
        """Count the use of a call, and free its reservation."""
        self._open.discard(asked.who)
        return BudgetOperations(tape).settle(asked, spent)

    def correct(self, tape: Transaction, entry: SpanEntry, answer: str) -> None:
        """Replace the guess for an answer by its use, after it was fetched."""
        do = BudgetOperations(tape)
        counted, models = do.recorded_guess(answer)
        tape.delete(GUESSES, answer.encode())
        # A stopped answer has used something, whether its provider reports that or not.
        if entry.usage is None and entry.finish != "failed":
            return
        found = usage_of(entry if entry.usage is None else replace(entry, error=None))
        cost = partial(self.cost, entry.model_served, models, entry.start_ns)
        for key, since, amount in counted:
            limit = limit_of(key, self._limits)
            if limit is not None and limit.budget.unit != "calls":
                (one,) = charges([BudgetClaim(limit, "", amount)], found, cost)
                do.correct(key, since, amount, one)

    def correct_batch(self, tape: Transaction, batch: str, results: Sequence[SpanEntry]) -> None:
        """Count the use of results of a batch, or of turns of a hosted agent, now, in the budgets that count the call
        which has made the batch, or was the last to give the agent work."""
        do, now = BudgetOperations(tape), self._now_ns()
        for key, _, _ in do.recorded_guess(batch)[0]:
            limit = limit_of(key, self._limits)
            for entry in results if limit is not None else ():
                if limit is not None and limit.is_about(entry.model):
                    cost = partial(self.cost, entry.model_served, [entry.model or ""], entry.start_ns)
                    (one,) = charges([BudgetClaim(limit, "", 0)], usage_of(entry), cost)
                    do.count(key, window_at(limit.budget.window, now).since_ns, None, one)

    def cost(self, served: str | None, models: Iterable[str], at_ns: int, tokens: TokenCounts) -> float | None:
        """Cost of tokens, in dollars, of the model that answered, or else of the requested one; None without a
        price."""
        found = (self._prices.cost(served, name, at_ns, tokens) for name in models)
        return next((dollars for dollars in found if dollars is not None), None)

    # -- in the background -------------------------------------------------------------------------------------------

    @property
    def or_none(self) -> Budgets | None:
        """These budgets; None if none is configured, so that calls skip them."""
        return self if self._limits else None

    async def start(self) -> None:
        """Begin to renew leases and to delete ended reservations and sums."""
        if self._limits:
            await self._safely(self._try_local_mode)
            self._task = asyncio.ensure_future(self._run())

    async def move_to_tape(self) -> None:
        """Move reservations from memory to the tape: another process takes over."""
        self._leaves, self._alone = True, False
        _ = await self._team.request_peers("share")
        await self._bring([asked for asked in self._local.drain() if asked.who[:8] == self._process])
        await self.move_remote_to_tape()

    async def move_remote_to_tape(self) -> None:
        """Move to the tape what the leader has reserved for calls of this process: the leader has died, or another
        process takes over."""
        await self._bring(self._remote.drain())

    async def _bring(self, calls: Sequence[BudgetReservation]) -> None:
        if calls:
            with suppress(TapeError):  # the recorder has reported it
                await self._recorder.submit(partial(self._keep, calls))

    def _keep(self, calls: Sequence[BudgetReservation], tape: Transaction) -> None:
        self._open.update(asked.who for asked in BudgetOperations(tape).persist(calls, self._now_ns()))

    async def stop(self) -> None:
        """End the renewal of leases."""
        self._stopping = True
        self.recheck_writers()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while not self._stopping:
            self._news.clear()
            await self._safely(self._tend)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._news.wait()

    def recheck_writers(self) -> None:
        """Check soon whether this gateway alone writes the tape: a worker has come or gone."""
        self._news.set()

    async def _safely(self, do: Callable[[], Awaitable[None]]) -> None:
        try:
            await do()
        except TapeError:
            pass  # the recorder has reported it
        except Exception:
            _log.exception("budgets could not be tended")

    async def _try_local_mode(self) -> None:
        """Keep reservations in memory if nobody else writes the tape."""
        if self._alone or self._leaves or not self._team.is_leader or await self._others_write():
            return
        if self._team.has_peers:
            # After this, all reservations of this gateway's other workers are on the tape.
            if not await self._recorder.flush_other_workers() or await self._others_write():
                return
        else:
            await self._recorder.submit(
                lambda tape: BudgetOperations(tape).expire_leases(self._now_ns(), self._process)
            )
        self._local.forget_sums()
        # A takeover may have begun meanwhile.
        self._alone = not self._leaves

    async def _others_write(self) -> bool:
        living = await asyncio.to_thread(self._store.live_writers)
        return bool(living - {self._store.process} - self._team.peer_processes())

    async def _tend(self) -> None:
        self._local.forget_sums()
        await self._try_local_mode()
        if self._open:
            await self._recorder.submit(lambda tape: BudgetOperations(tape).renew(self._process, self._now_ns()))
        found = await asyncio.to_thread(self.reader.stale_keys, self._now_ns(), _AT_ONCE)
        if found or await asyncio.to_thread(self.reader.has_expired_lease, self._now_ns()):
            await self._recorder.submit(lambda tape: BudgetOperations(tape).clear(found, self._limits, self._now_ns()))


@dataclass(slots=True, eq=False)
class Settlement:
    """Settles the reservation of a call, in the transaction of its span. The call refers to it and not the other way
    round: with a reference cycle, thousands of calls would make the collector pause for 15 ms."""

    _budgets: Budgets
    asked: BudgetReservation
    _models: Sequence[str]
    """Names of its model: the client's and those on the way."""
    _names: Mapping[str, str]
    """Names of its model, by upstream."""
    used: list[BudgetCharge]
    """Use by the index of each claim."""
    opened: bool = False
    """True for a WebSocket that is open: it counts, even if its first span has nothing that the server has said."""

    def __call__(self, tape: Transaction, entry: SpanEntry) -> None:
        """Called in the transaction of its span."""
        own = self._names.get(entry.upstream or "")
        models = self._models if own is None else [own, *self._models]
        claims, found = self.asked.claims, usage_of(entry, self.opened)
        if entry.deferred is None:
            used = charges(claims, found, partial(self._budgets.cost, entry.model_served, models, entry.start_ns))
        else:
            used = [BudgetCharge(it.amount, guessed=it.limit.budget.unit != "calls") for it in claims]
        if entry.deferred is not None or found is not None:
            for place, claim in enumerate(claims):
                if claim.unread:
                    used[place] = used[place]._replace(unread=True)
        if entry.batch is not None:
            used = [
                one if it.limit.budget.unit == "calls" else one._replace(amount=0)
                for it, one in zip(claims, used, strict=True)
            ]
        self.used = used
        counted = self._budgets.settle(tape, self.asked, used)
        if (later := entry.deferred or entry.batch) is not None:
            BudgetOperations(tape).record_guess(later, counted, models)

    def release(self, tape: Transaction) -> None:
        """Free the reservation: the span is lost."""
        self._budgets.settle(tape, self.asked, [_UNUSED] * len(self.asked.claims))


def prices_of(config: GatewayConfig) -> Prices:
    """The list of prices. Raises `ConfigError` if it cannot be read."""
    try:
        return Prices(config.prices)
    except ConfigError as error:
        raise ConfigError(f"prices: {error}") from None


# -- the use of a call -------------------------------------------------------------------------------------------------


class CallUsage(NamedTuple):
    """The tokens that a call has used."""

    tokens: TokenCounts
    guessed: bool


def usage_of(entry: SpanEntry, opened: bool = False) -> CallUsage | None:
    """The tokens that a call has used; None if it has used nothing. `opened`: it has an answer, whatever the span
    says."""
    refused = entry.http_status is None or entry.http_status >= 400 or entry.error == "error_body"
    if entry.upstream is None or (entry.first_byte_ns is None and not opened) or refused:
        return None
    told = TokenCounts.of(entry.usage)
    if entry.estimate is None and entry.partial_tokens is None:
        return CallUsage(told, False)
    asked, made = entry.estimate or (None, None)
    output, guessed = told.output, asked is not None or made is not None
    if entry.partial_tokens is not None and output is not None and entry.partial_tokens > output:
        # For an answer that was broken off, some providers have reported only the count at its beginning.
        output, guessed = entry.partial_tokens, True
    prompt = asked if told.input is None else told.input
    output = made if output is None else output
    return CallUsage(told._replace(input=prompt, output=output), guessed)


def charges(
    claims: Sequence[BudgetClaim], found: CallUsage | None, cost: Callable[[TokenCounts], float | None]
) -> list[BudgetCharge]:
    """The use of each budget. `cost`: dollars of tokens; None without a price."""
    if found is None:
        return [_UNUSED] * len(claims)
    tokens, guessed = found
    used: list[BudgetCharge] = []
    for claim in claims:
        unit = claim.limit.budget.unit
        if unit == "calls":
            used.append(_ONE_CALL)
        elif unit == "tokens" and (tokens.input is not None or tokens.output is not None):
            used.append(BudgetCharge((tokens.input or 0) + (tokens.output or 0), guessed))
        elif unit == "usd" and (dollars := cost(tokens)) is not None:
            used.append(BudgetCharge(nanodollars(dollars), guessed))
        else:
            used.append(BudgetCharge(claim.amount, guessed=True))
    return used
