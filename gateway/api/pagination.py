"""Reads the tape page by page, off the event loop, with a bound on the work of one page.

A list is a *walk*: a generator that looks at one span or rollout after another and yields two values for each: a
*mark*, from which a later walk goes on, and a row, or None if the filter rejects it. `page` runs a walk in slices, each
in a worker thread and each a fresh generator, so no generator (nor a read transaction in it) lives longer than a slice.
A page ends when it is full, when the walk ends, or when it has looked at enough; its cursor lets the caller go on. The
cursor is the mark and the name of its list. It is opaque to clients and checked when it comes back.

With an index (`followers.index`), a walk looks only at rows that the index has found, and the filter checks them again.
Marks are the same with an index and without, so that a list may begin with one and end without.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count, takewhile
from threading import Lock
from typing import Any, Final, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

from aiohttp import web
from pydantic import BaseModel

from penstock.gateway.api import compression
from penstock.gateway.followers.index.link import FindRequest, FindResult, IndexLink
from penstock.gateway.model.answers import Change
from penstock.gateway.model.base import ID_PATTERN
from penstock.gateway.model.facts import TOOL
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.rollout import COMPUTED, Attempt, Rollout, RolloutSummary, Totals, sum_totals, summarised
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.turn import Exchange, Passage
from penstock.gateway.reading.filter_fields import Target
from penstock.gateway.reading.filters import ContentReaders, Query
from penstock.gateway.reading.told_calls import ToldCalls
from penstock.gateway.reading.turns import decode_body, encoding
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.view import ALL_CHANGES, ChangeFilter
from penstock.gateway.traffic.calls.passages import is_conversation, passages, tools_called

# Heavy reads: those that take the bytes of calls off the tape, or look through much of it.
#
# Few of them run at once, the others wait in order. Each holds several times the size of a call in memory, and
# computing in a thread takes the interpreter from the event loop, which serves all calls. So more threads would
# answer nobody sooner. They have threads of their own, so that nothing else ever waits behind them.
#
# A read has a place until the client has taken the answer, but only for a limited time. A client that takes its
# answer slowly keeps it in memory, and lets others go on. If a client leaves while it waits, nothing is read for it.

AT_ONCE: Final = 2
"""Most heavy reads that run at the same time."""
BLOCK: Final = 1 << 20
"""Bytes of calls, about, that are read before they are sent."""
TURN_S: Final = 1.0
"""Seconds for which a client keeps its place while it takes its answer."""

P = ParamSpec("P")


class ReadRunner(Protocol):
    """Runs a read: `HeavyReads.run`, or `asyncio.to_thread` for a cheap one."""

    async def __call__(self, do: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


@dataclass(frozen=True, slots=True)
class DeferredAnswer:
    """The answer of an operation that is a heavy read, not made yet."""

    make: Callable[[], BaseModel]


class HeavyReads:
    """The heavy reads of one gateway. On the loop only."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(AT_ONCE)
        self._threads = ThreadPoolExecutor(AT_ONCE, "penstock-reads")

    async def run(self, do: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function as soon as there is a place; return its result."""
        async with self._places:
            return await self._done(partial(do, *args, **kwargs))

    async def answer(
        self, request: web.Request, make: Callable[[], bytes], headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Send the body that a function makes, with gzip if due."""
        response = web.StreamResponse(headers=headers)

        def made() -> bytes:
            body, headers = compression.compress_body(request.headers, make())
            response.headers.update(headers)
            return body

        async def send(body: bytes) -> None:
            response.content_length = len(body)
            await response.prepare(request)
            await response.write(body)

        await self.send_result(made, send)
        return response

    async def send_result(self, make: Callable[[], T], send: Callable[[T], Awaitable[None]]) -> None:
        """Send the result of a function."""
        async with self._places:
            sending = asyncio.ensure_future(send(await self._done(make)))
            await _taken(sending, asyncio.get_running_loop().time() + TURN_S)
        await sending

    async def stream(self, response: web.StreamResponse, records: Iterator[bytes]) -> None:
        """Send records, about a megabyte at a time. After each turn another read gets the place."""
        while True:
            async with self._places:
                sending = await self._turn(response, records)
            if sending is None:
                return
            await sending

    async def _turn(self, response: web.StreamResponse, records: Iterator[bytes]) -> asyncio.Future[None] | None:
        """Send for `TURN_S`; return the write that is then under way, or None if all is sent."""
        until = asyncio.get_running_loop().time() + TURN_S
        while block := await self._done(partial(_block, records)):
            sending = asyncio.ensure_future(response.write(block))
            del block
            if not await _taken(sending, until):
                return sending
        return None

    async def _done(self, do: Callable[[], T]) -> T:
        # A place is free again when its client has left, though its thread may still be busy: with as many threads as
        # places, a read that waits for a thread is not begun if its client leaves as well.
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)


def _block(records: Iterator[bytes]) -> bytes:
    """The next records, about a megabyte; empty at the end."""
    block, size = list[bytes](), 0
    while size < BLOCK and (record := next(records, b"")):
        block.append(record)
        size += len(record)
    # A single large record is not copied.
    return b"".join(block)


async def _taken(sending: asyncio.Future[None], until: float) -> bool:
    """Wait until an answer is taken; False if it is late. If the client leaves, sending is cancelled."""
    try:
        await asyncio.wait({sending}, timeout=max(0.0, until - asyncio.get_running_loop().time()))
    except asyncio.CancelledError:
        if not sending.cancel():
            sending.exception()  # no client waits for the error
        raise
    if not sending.done():
        return False
    sending.result()
    return asyncio.get_running_loop().time() < until


SCAN = 20_000
"""Most heads that are looked at for one page."""
SCAN_BODIES = 1_000
"""The same if bodies must be read as well."""
SLICE = 500
"""Most heads that are looked at between two turns of the event loop."""
SLICE_S, PAGE_S = 0.5, 3.0
"""Seconds that a slice, and a page, may take: the rows found by then are returned, with a cursor to go on from."""
_KEPT: Final = 4_096
"""Most attempts whose costs are kept."""
_LOCKS: Final = 16

Mark = tuple[int | str, ...]
MARKS: dict[str, tuple[tuple[type, ...], ...]] = {
    "rollouts": ((int,), (int, str, int)),
    "spans": ((str, int),),
    "recent": ((int,),),
    "runs": ((int,),),
    "run_events": ((int, int),),
    "audit_log": ((int,),),
}
"""The shapes of marks, by list."""


class TapeSource(Protocol):
    """The part of the store that the control API reads."""

    def rollout(self, rid: str, /) -> Rollout | None: ...
    def named(self, rollouts: Iterable[str]) -> list[tuple[int, Rollout]]: ...
    def attempts(self, rid: str, /) -> list[Attempt]: ...
    def rollouts(self, before: int | None = None) -> Iterator[tuple[int, Rollout]]: ...
    def spans(
        self,
        rid: str,
        aid: str | None = None,
        after: tuple[str, int] | None = None,
        kinds: Collection[str] = (),
        /,
    ) -> Iterator[Span]: ...
    def span(self, rid: str, aid: str, sequence: int, /) -> Span | None: ...
    def recent(self, before: int | None = None) -> Iterator[tuple[int, Span]]: ...
    def at(self, cursors: Iterable[int], /) -> Iterator[tuple[int, Span]]: ...
    def exchange(self, span: Span) -> Exchange | None: ...
    def exchanges(self, spans: Iterable[Span]) -> Iterator[tuple[Span, Exchange | None]]: ...
    def changes(self, since: int, limit: int, wanted: ChangeFilter = ALL_CHANGES) -> tuple[list[Change], int]: ...
    def cursor(self) -> int: ...
    def identity(self) -> str: ...
    def figures(self) -> dict[str, int]: ...
    def find_response(self, response_id: str, /) -> Span | None: ...
    def pass_over(self, what: str, error: TapeError, /) -> None: ...


class CursorError(ValueError):
    """A paging cursor that is not one of this list's."""

    def __init__(self, message: str, given: str) -> None:
        super().__init__(message)
        self.given = given


T = TypeVar("T")


@dataclass(slots=True)
class PageRows(Generic[T]):
    """The rows that a page, or a slice of one, found."""

    rows: list[T]
    mark: Mark | None
    """Mark to go on from; None if the walk has ended."""
    scanned: int = 0


IndexLookup = Callable[[int | None, int], FindResult | None]
"""(position to look below, most rows) -> positions of rows that the filter accepts; None without an index."""
FIRST, MOST = 128, 4096
"""Number of positions in the first query to the index, and the most in a later one."""
Walk = Callable[[Mark | None], Iterator[tuple[Mark, T | None]]]


async def page(
    walk: Walk[T], mark: Mark | None, limit: int, most: int = SCAN, run: ReadRunner = asyncio.to_thread
) -> PageRows[T]:
    """Up to `limit` rows from `mark` on, looking at no more than `most` items. `run`: runs the slices."""
    found: PageRows[T] = PageRows([], mark)
    until = time.monotonic() + PAGE_S
    while True:
        wanted, budget = limit - len(found.rows), most - found.scanned
        piece = await run(take, walk, found.mark, wanted, min(SLICE, budget))
        found.rows += piece.rows
        found.mark, found.scanned = piece.mark, found.scanned + piece.scanned
        if piece.mark is None or len(found.rows) >= limit or found.scanned >= most or time.monotonic() > until:
            return found


def take(walk: Walk[T], mark: Mark | None, limit: int, most: int) -> PageRows[T]:
    """One slice of a page, in one go; it ends early if it takes long. Its time begins with its first item: if an index
    was slow to find that, the other rows that it has found come with it, and need not be found again."""
    found: PageRows[T] = PageRows([], mark)
    until = math.inf
    for found.mark, row in walk(mark):
        until = min(until, time.monotonic() + SLICE_S)
        found.scanned += 1
        if row is not None:
            found.rows.append(row)
        if len(found.rows) >= limit or found.scanned >= most or time.monotonic() > until:
            return found
    found.mark = None
    return found


def scan(before: int | None, limit: int) -> None:
    """An `IndexLookup` without an index: every row is looked at."""


def recent_walk(tape: TapeSource, query: Query, prices: Prices, find: IndexLookup = scan) -> Walk[Span]:
    """Spans of all rollouts, newest change first."""

    def walk(mark: Mark | None) -> Iterator[tuple[Mark, Span | None]]:
        wanted = span_filter(tape, query, prices)
        for position, span in _spans(tape, find, int(mark[0]) if mark else None):
            yield (position,), span if span is not None and wanted(span) else None

    return walk


def spans_walk(tape: TapeSource, query: Query, prices: Prices, rid: str, aid: str | None) -> Walk[Span]:
    """Spans of a rollout or of one attempt, in order."""

    def walk(mark: Mark | None) -> Iterator[tuple[Mark, Span | None]]:
        wanted = span_filter(tape, query, prices)
        for span in tape.spans(rid, aid, (str(mark[0]), int(mark[1])) if mark else None):
            yield (span.attempt, span.sequence), span if wanted(span) else None

    return walk


def rollouts_walk(
    tape: TapeSource, query: Query, costs: RolloutCosts, find: IndexLookup = scan
) -> Walk[RolloutSummary]:
    """Rollouts, newest first. A term about spans makes the walk go through the spans of each, so the mark may be in the
    middle of a rollout."""

    def walk(mark: Mark | None) -> Iterator[tuple[Mark, RolloutSummary | None]]:
        wanted = span_filter(tape, query, costs.prices)
        before, begun, after = _resume(mark)
        for position, rollout, hit in _rollouts(tape, find, before):
            if rollout is None:
                yield (position,), None
                continue
            try:
                if not _accepts(tape, query, costs, summary(tape, rollout) if query.needs_attempts else rollout):
                    yield (position,), None
                elif not query.needs_spans or any(map(wanted, hit)):
                    yield (position,), summary(tape, rollout)
                else:
                    yield from _through_spans(tape, rollout, position, after if position == begun else None, wanted)
            except TapeError as error:
                tape.pass_over(f"rollout {rollout.id}", error)
                yield (position,), None

    return walk


def _accepts(tape: TapeSource, query: Query, costs: RolloutCosts, rollout: Rollout) -> bool:
    """True if the terms about the rollout itself hold; those of its cost are tested last. It gets no cost itself: a
    list adds those of its rows."""
    if not query.matches_rollout(rollout):
        return False
    if query.on_cost and (priced := summary_of(tape, rollout.id)) is not None:
        costs.add(tape, [priced])
        rollout = priced
    return all(test(rollout, None) for test in query.on_cost)


def named_rollouts(tape: TapeSource, query: Query, costs: RolloutCosts, ids: Iterable[str]) -> list[RolloutSummary]:
    """The rollouts with these ids that exist and match, newest first."""
    wanted, found = span_filter(tape, query, costs.prices), list[RolloutSummary]()
    for _, rollout in tape.named(ids):
        try:
            row = summary(tape, rollout)
            matches = _accepts(tape, query, costs, row)
            if matches and (not query.needs_spans or any(map(wanted, tape.spans(rollout.id)))):
                found.append(row)
        except TapeError as error:
            tape.pass_over(f"rollout {rollout.id}", error)
    return found


def _spans(tape: TapeSource, find: IndexLookup, before: int | None) -> Iterator[tuple[int, Span | None]]:
    """The spans that an index finds below a position; all spans from where it has no answer any more. None between two
    answers: a page may end there."""
    for found in _found(find, before):
        yield from tape.at(found.positions)
        if found.complete:
            return
        before = found.reached
        yield before, None
    yield from tape.recent(before)


def _rollouts(
    tape: TapeSource, find: IndexLookup, before: int | None
) -> Iterator[tuple[int, Rollout | None, Iterable[Span]]]:
    """The same for rollouts, each with a span that its filter accepts, if the index names one."""
    for found in _found(find, before):
        hits = dict(zip(found.names, found.hits, strict=False))
        for position, rollout in tape.named(found.names):
            at = hits.get(rollout.id)
            yield position, rollout, () if at is None else (span for _, span in tape.at([at]))
        if found.complete:
            return
        before = found.reached
        yield before, None, ()
    yield from ((position, rollout, ()) for position, rollout in tape.rollouts(before))


def _found(find: IndexLookup, before: int | None) -> Iterator[FindResult]:
    """Yield the rows that an index finds, page by page, until it is complete or has no answer."""
    limit = FIRST
    while (found := find(before, limit)) is not None:
        yield found
        if not found.complete:
            before, limit = found.reached, min(4 * limit, MOST)


def _resume(mark: Mark | None) -> tuple[int | None, int | None, tuple[str, int] | None]:
    """The position to go on below, the position of the rollout to go on in, and its last span before."""
    if mark is None:
        return None, None, None
    position = int(mark[0])
    return (position, None, None) if len(mark) == 1 else (position + 1, position, (str(mark[1]), int(mark[2])))


def _through_spans(
    tape: TapeSource, rollout: Rollout, position: int, after: tuple[str, int] | None, wanted: Callable[[Span], bool]
) -> Iterator[tuple[Mark, RolloutSummary | None]]:
    for span in tape.spans(rollout.id, None, after):
        if wanted(span):
            yield (position,), summary(tape, rollout)
            return
        yield (position, span.attempt, span.sequence), None
    yield (position,), None


def span_filter(tape: TapeSource, query: Query, prices: Prices) -> Callable[[Span], bool]:
    """The filter as a predicate over a span alone; rollouts are looked up once each, and only if it needs them. Damaged
    records count as missing."""

    @lru_cache(maxsize=256)
    def rollout(rid: str) -> Rollout | None:
        if query.needs_attempts:
            return summary_of(tape, rid)
        return next((found for _, found in tape.named([rid])), None) if query.needs_rollout else None

    read, of_cost = contents(tape), "cost" in query.needs

    def matches(span: Span) -> bool:
        if of_cost:
            prices.charge(span)
        return query.matches(rollout(span.rollout), span, read)

    return matches


def summary(tape: TapeSource, rollout: Rollout) -> RolloutSummary:
    """A rollout with its attempts and their sums."""
    return summarised(rollout, tape.attempts(rollout.id))


@dataclass(slots=True)
class _Sums:
    """Sums over calls of an attempt."""

    costs: Totals = field(default_factory=Totals)
    tool_runs: int = 0

    def add(self, span: Span, prices: Prices) -> None:
        self.tool_runs += span.kind == "tool"
        if span.kind == "llm":
            self.costs.calls += 1
            prices.add(self.costs, span)

    def plus(self, other: _Sums) -> _Sums:
        return _Sums(sum_totals((self.costs, other.costs)), self.tool_runs + other.tool_runs)


class _KeptSums(NamedTuple):
    """The sums of an attempt as they were read last."""

    state: tuple[int, int]
    """How many spans the attempt had then, and how many model calls that had ended."""
    sums: _Sums
    through: int
    """Up to this sequence all of its calls had ended."""
    settled: _Sums
    """The sums up to there."""
    telemetry: ToldCalls
    """The calls that only the agent's telemetry tells of."""
    told: Totals
    """Their sums."""


class RolloutCosts:
    """Adds to rollouts what their calls cost, at the prices as they are now, how many tools ran, and the calls that
    only telemetry tells of. So nothing is computed while calls run, and a new list of prices holds for old calls too.
    Sums over calls that have ended are kept: a list that is read again reads newer calls only. Thread-safe."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self._kept = dict[tuple[str, str, int], _KeptSums]()
        self._locks = tuple(Lock() for _ in range(_LOCKS))

    def add(self, tape: TapeSource, rollouts: Iterable[RolloutSummary]) -> None:
        """Add costs and runs of tools to these rollouts and their attempts."""
        for rollout in rollouts:
            rollout.tool_runs = self.add_to_attempts(tape, rollout.attempts)
            rollout.totals = sum_totals(attempt.totals for attempt in rollout.attempts)

    def add_to_attempts(self, tape: TapeSource, attempts: Iterable[Attempt]) -> int:
        """Add costs to these attempts; return how many tools they ran."""
        runs = 0
        for attempt in attempts:
            # Lists that ask at the same time for an attempt of many calls read them once.
            with self._locks[hash((attempt.rollout, attempt.id)) % _LOCKS]:
                found, told = self._sums(tape, attempt)
            costs = {name: getattr(found.costs, name) for name in COMPUTED}
            attempt.totals, runs = attempt.totals.model_copy(update=costs), runs + found.tool_runs
            if told.told:
                attempt.totals = sum_totals((attempt.totals, told))
        return runs

    def _sums(self, tape: TapeSource, attempt: Attempt) -> tuple[_Sums, Totals]:
        # A rollout may be forgotten, and another one be made of its name.
        key, state = (attempt.rollout, attempt.id, attempt.created_ns), (attempt.spans, attempt.totals.calls)
        kept = self._kept.get(key)
        if kept is not None and kept.state == state:
            return kept.sums, kept.told
        telemetry = ToldCalls() if kept is None else kept.telemetry
        through, settled = (0, _Sums()) if kept is None else (kept.through, deepcopy(kept.settled))
        first_open, later = 0, _Sums()
        try:
            for span in tape.spans(attempt.rollout, attempt.id, (attempt.id, through), ("llm", "tool", "otel")):
                if span.sequence > attempt.spans:
                    break  # Begun since the attempt was read: `through` does not count it.
                telemetry.add(span)
                if span.kind == "llm" and span.status == SpanStatus.OPEN:
                    first_open = first_open or span.sequence
                else:
                    (later if first_open else settled).add(span, self.prices)
        except TapeError as error:
            tape.pass_over(f"a call of {attempt.rollout}/{attempt.id}", error)
            later.costs.unpriced += max(0, attempt.totals.calls - settled.costs.calls - later.costs.calls)
            return settled.plus(later), telemetry.totals(self.prices)
        sums, told = settled.plus(later), telemetry.totals(self.prices)
        if len(self._kept) >= _KEPT:
            self._kept.clear()
        through = first_open - 1 if first_open else attempt.spans
        self._kept[key] = _KeptSums(state, sums, through, settled, telemetry, told)
        return sums, told


def summary_of(tape: TapeSource, rid: str) -> RolloutSummary | None:
    """The same for a rollout's id; None if it does not exist or cannot be read."""
    try:
        found = tape.rollout(rid)
        return None if found is None else summary(tape, found)
    except TapeError as error:
        tape.pass_over(f"rollout {rid}", error)
        return None


def encode_cursor(name: str, mark: Mark | None) -> str | None:
    """The cursor for clients; None for no mark."""
    if mark is None:
        return None
    return base64.urlsafe_b64encode(json.dumps([name, *mark]).encode()).decode().rstrip("=")


def decode_cursor(name: str, cursor: str | None) -> Mark | None:
    """The mark of a cursor; raises `CursorError` if it is not a cursor of the list with this name."""
    if cursor is None:
        return None
    try:
        blob = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        kind, *mark = json.loads(blob)
    except (ValueError, TypeError, RecursionError):
        raise CursorError("is not a cursor that this gateway gave", cursor) from None
    if kind != name or not any(_fits(mark, shape) for shape in MARKS[name]):
        raise CursorError("is a cursor of another list", cursor)
    return tuple(mark)


def _fits(mark: list[Any], shape: tuple[type, ...]) -> bool:
    return len(mark) == len(shape) and all(
        type(value) is kind and (0 <= value < 2**62 if kind is int else re.fullmatch(ID_PATTERN, value) is not None)
        for value, kind in zip(mark, shape, strict=True)
    )


# The contents of calls, for filters and searches.


class ContentSource(Protocol):
    """The part of the store that is needed here."""

    def span(self, rid: str, aid: str, sequence: int, /) -> Span | None: ...
    def exchange(self, span: Span) -> Exchange | None: ...
    def pass_over(self, what: str, error: TapeError, /) -> None: ...


def passage_reader(tape: ContentSource) -> Callable[[Span], list[Passage]]:
    """A function that reads the passages which a span adds to the conversation; none of a damaged span. It remembers
    the first calls of attempts, and the last passages that it read."""

    @lru_cache(maxsize=256)
    def first_call(rid: str, aid: str) -> int | None:
        # Most often it is the very first span: reading later ones would cost more than everything else.
        spans = map(partial(tape.span, rid, aid), count(1))
        return next(
            (span.sequence for span in takewhile(bool, spans) if span is not None and is_conversation(span)), None
        )

    def read(span: Span) -> list[Passage]:
        try:
            return passages(
                span, tape.exchange(span), lambda: first_call(span.rollout, span.attempt) in (span.sequence, None)
            )
        except TapeError as error:
            tape.pass_over(_bodies_of(span), error)
            return []

    last: tuple[Span, list[Passage]] | None = None

    def read_once(span: Span) -> list[Passage]:
        # A filter asks for the tools and the texts of a span one after the other.
        nonlocal last
        if last is None or last[0] is not span:
            last = span, read(span)
        return last[1]

    return read_once


def contents(tape: ContentSource) -> ContentReaders:
    """The contents of calls that a filter may ask for."""
    read = passage_reader(tape)

    def tools(span: Span) -> Sequence[str]:
        if span.kind == "tool":
            return [str((span.attributes or {}).get(TOOL, ""))]
        return tools_called(read(span)) if span.tool_calls else ()

    def texts(span: Span) -> Sequence[str]:
        return [passage.text for passage in read(span)]

    def bodies(span: Span) -> Sequence[str]:
        exchange = None
        try:
            exchange = tape.exchange(span)
        except TapeError as error:
            tape.pass_over(_bodies_of(span), error)
        if exchange is None:
            return ()
        return (
            _text(exchange.request_body, exchange.request_headers),
            _text(exchange.response_body, exchange.response_headers),
        )

    return ContentReaders(tools, texts, bodies)


def _bodies_of(span: Span) -> str:
    return f"what {span.rollout}/{span.attempt}#{span.sequence} says"


def _text(body: bytes, headers: list[tuple[str, str]]) -> str:
    return decode_body(body, encoding(headers))[0].decode(errors="replace")


def index_lookup(index: IndexLink | None, target: Target, query: Query, now_ns: int) -> IndexLookup:
    """A function that queries the index, or `scan` if the index cannot help with this filter."""
    if index is None or not any(one.field.about != "bodies" for one in query.conditions):
        return scan
    text, silent, last = str(query), False, None

    def find(before: int | None, limit: int) -> FindResult | None:
        """Query the index. After one query without an answer the rest of the page is scanned. Rows that were found are
        not queried again."""
        nonlocal silent, last
        found = last.below(before) if last is not None and before is not None else None
        if found is None and not silent:
            last = found = index.find(FindRequest(target, text, now_ns, before, limit))
            silent = found is None
        return found

    return find
