"""Reading the tape page by page, off the event loop, with a bound on the work that one page may cost.

A list is a *walk*: a generator that looks at one span or rollout after another and yields two values for each: a
*mark*, from which a later walk goes on, and a row, or None when the filter does not want it. `page` runs a walk in
slices, each in a worker thread and each a fresh generator, so no generator (nor a read transaction in it) lives longer
than a slice. A page ends when it is full, when the walk ends, or when it has looked at enough; its cursor lets the
caller go on. The cursor is the mark and the name of its list. It is opaque to clients and checked when it comes back.

Where there is an index (`gateway.index`), a walk looks only at what the index has found; the filter looks at it once
more. Marks are the same with an index and without, so that a list may begin with the one and end with the other.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

from penstock.gateway.api.contents import contents
from penstock.gateway.api.heavy import Run
from penstock.gateway.filters.query import Query
from penstock.gateway.index.questions import Found
from penstock.gateway.model.base import ID_PATTERN
from penstock.gateway.model.change import Change
from penstock.gateway.model.exchange import Exchange
from penstock.gateway.model.rollout import Attempt, Rollout, RolloutSummary
from penstock.gateway.model.span import Span
from penstock.gateway.model.summaries import summarised
from penstock.gateway.store.directory import TapeError
from penstock.gateway.store.wanted import EVERYTHING, Wanted

SCAN = 20_000
"""Heads looked at for one page."""
SCAN_BODIES = 1_000
"""The same when bodies must be read as well."""
SLICE = 500
"""Heads looked at between two turns of the event loop."""
SLICE_S, PAGE_S = 0.5, 3.0
"""How long a slice may take, and a page: what was found by then is answered, with a cursor to go on from."""

Mark = tuple[int | str, ...]
MARKS: dict[str, tuple[tuple[type, ...], ...]] = {
    "rollouts": ((int,), (int, str, int)),
    "spans": ((str, int),),
    "recent": ((int,),),
    "runs": ((int,),),
    "run_events": ((int, int),),
    "audit_log": ((int,),),
}
"""The shapes of mark that each list has."""


class Tape(Protocol):
    """The slice of the store that the control API reads."""

    def rollout(self, rid: str, /) -> Rollout | None: ...
    def named(self, rollouts: Iterable[str]) -> list[tuple[int, Rollout]]: ...
    def attempts(self, rid: str, /) -> list[Attempt]: ...
    def rollouts(self, before: int | None = None) -> Iterator[tuple[int, Rollout]]: ...
    def spans(self, rid: str, aid: str | None = None, after: tuple[str, int] | None = None, /) -> Iterator[Span]: ...
    def span(self, rid: str, aid: str, sequence: int, /) -> Span | None: ...
    def recent(self, before: int | None = None) -> Iterator[tuple[int, Span]]: ...
    def at(self, cursors: Iterable[int], /) -> Iterator[tuple[int, Span]]: ...
    def exchange(self, span: Span) -> Exchange | None: ...
    def exchanges(self, spans: Iterable[Span]) -> Iterator[tuple[Span, Exchange | None]]: ...
    def changes(self, since: int, limit: int, wanted: Wanted = EVERYTHING) -> tuple[list[Change], int]: ...
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
class Rows(Generic[T]):
    """What a page, or a slice of one, found."""

    rows: list[T]
    mark: Mark | None
    """Where to go on; None when the walk ended."""
    scanned: int = 0


Find = Callable[[int | None, int], Found | None]
"""(below which position, how many) -> where the rows are that a filter takes, None where there is no index to say."""
FIRST, MOST = 128, 4096
"""Positions that are asked for at first, and at most."""
Walk = Callable[[Mark | None], Iterator[tuple[Mark, T | None]]]


async def page(walk: Walk[T], mark: Mark | None, limit: int, most: int = SCAN, run: Run = asyncio.to_thread) -> Rows[T]:
    """Up to `limit` rows from `mark` on, looking at no more than `most` items. `run`: where slices run."""
    found: Rows[T] = Rows([], mark)
    until = time.monotonic() + PAGE_S
    while True:
        wanted, budget = limit - len(found.rows), most - found.scanned
        piece = await run(take, walk, found.mark, wanted, min(SLICE, budget))
        found.rows += piece.rows
        found.mark, found.scanned = piece.mark, found.scanned + piece.scanned
        if piece.mark is None or len(found.rows) >= limit or found.scanned >= most or time.monotonic() > until:
            return found


def take(walk: Walk[T], mark: Mark | None, limit: int, most: int) -> Rows[T]:
    """One slice of a page, in one go; it ends early where it takes long. Its time begins with its first item: where an
    index was slow to find that, the others that it has found come with it, and need not be found again."""
    found: Rows[T] = Rows([], mark)
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
    """What finds nothing: every row is looked at."""


def recent_walk(tape: Tape, query: Query, find: Find = scan) -> Walk[Span]:
    """Spans of all rollouts, newest change first."""

    def walk(mark: Mark | None) -> Iterator[tuple[Mark, Span | None]]:
        wanted = span_filter(tape, query)
        for position, span in _spans(tape, find, int(mark[0]) if mark else None):
            yield (position,), span if span is not None and wanted(span) else None

    return walk


def spans_walk(tape: Tape, query: Query, rid: str, aid: str | None) -> Walk[Span]:
    """Spans of a rollout or of one attempt, in order."""

    def walk(mark: Mark | None) -> Iterator[tuple[Mark, Span | None]]:
        wanted = span_filter(tape, query)
        for span in tape.spans(rid, aid, (str(mark[0]), int(mark[1])) if mark else None):
            yield (span.attempt, span.sequence), span if wanted(span) else None

    return walk


def rollouts_walk(tape: Tape, query: Query, find: Find = scan) -> Walk[RolloutSummary]:
    """Rollouts, newest first. A term about spans makes the walk go through the spans of each, and so the mark may
    stand in the middle of a rollout."""

    def walk(mark: Mark | None) -> Iterator[tuple[Mark, RolloutSummary | None]]:
        wanted = span_filter(tape, query)
        before, begun, after = _resume(mark)
        for position, rollout, hit in _rollouts(tape, find, before):
            if rollout is None:
                yield (position,), None
                continue
            try:
                if not query.matches_rollout(summary(tape, rollout) if query.needs_attempts else rollout):
                    yield (position,), None
                elif not query.needs_spans or any(map(wanted, hit)):
                    yield (position,), summary(tape, rollout)
                else:
                    yield from _through_spans(tape, rollout, position, after if position == begun else None, wanted)
            except TapeError as error:
                tape.pass_over(f"rollout {rollout.id}", error)
                yield (position,), None

    return walk


def named_rollouts(tape: Tape, query: Query, ids: Iterable[str]) -> list[RolloutSummary]:
    """Those of these rollouts that are there and match, newest first."""
    wanted, found = span_filter(tape, query), list[RolloutSummary]()
    for _, rollout in tape.named(ids):
        try:
            row = summary(tape, rollout)
            matches = query.matches_rollout(row if query.needs_attempts else rollout)
            if matches and (not query.needs_spans or any(map(wanted, tape.spans(rollout.id)))):
                found.append(row)
        except TapeError as error:
            tape.pass_over(f"rollout {rollout.id}", error)
    return found


def _spans(tape: Tape, find: Find, before: int | None) -> Iterator[tuple[int, Span | None]]:
    """The spans that an index finds below a position; all of them from where it finds none any more. None between two
    answers: a page may end there."""
    for found in _found(find, before):
        yield from tape.at(found.positions)
        if found.complete:
            return
        before = found.reached
        yield before, None
    yield from tape.recent(before)


def _rollouts(tape: Tape, find: Find, before: int | None) -> Iterator[tuple[int, Rollout | None, Iterable[Span]]]:
    """The same of rollouts, each with a span that its filter takes, where the index names one."""
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


def _found(find: Find, before: int | None) -> Iterator[Found]:
    """What an index finds, page by page: until a page is complete, or until there is no answer."""
    limit = FIRST
    while (found := find(before, limit)) is not None:
        yield found
        if not found.complete:
            before, limit = found.reached, min(4 * limit, MOST)


def _resume(mark: Mark | None) -> tuple[int | None, int | None, tuple[str, int] | None]:
    """Where to go on: below which rollout, in which one, and after which of its spans."""
    if mark is None:
        return None, None, None
    position = int(mark[0])
    return (position, None, None) if len(mark) == 1 else (position + 1, position, (str(mark[1]), int(mark[2])))


def _through_spans(
    tape: Tape, rollout: Rollout, position: int, after: tuple[str, int] | None, wanted: Callable[[Span], bool]
) -> Iterator[tuple[Mark, RolloutSummary | None]]:
    for span in tape.spans(rollout.id, None, after):
        if wanted(span):
            yield (position,), summary(tape, rollout)
            return
        yield (position, span.attempt, span.sequence), None
    yield (position,), None


def span_filter(tape: Tape, query: Query) -> Callable[[Span], bool]:
    """The filter as a predicate over a span alone; rollouts are looked up once each, and only if it asks for them.
    What is damaged is as if it were not there."""

    @lru_cache(maxsize=256)
    def rollout(rid: str) -> Rollout | None:
        if query.needs_attempts:
            return summary_of(tape, rid)
        return next((found for _, found in tape.named([rid])), None) if query.needs_rollout else None

    read = contents(tape)
    return lambda span: query.matches(rollout(span.rollout), span, read)


def summary(tape: Tape, rollout: Rollout) -> RolloutSummary:
    """A rollout with its attempts and their sums."""
    return summarised(rollout, tape.attempts(rollout.id))


def summary_of(tape: Tape, rid: str) -> RolloutSummary | None:
    """The same of the rollout of this name; None when there is none that can be read."""
    try:
        found = tape.rollout(rid)
        return None if found is None else summary(tape, found)
    except TapeError as error:
        tape.pass_over(f"rollout {rid}", error)
        return None


def encode_cursor(name: str, mark: Mark | None) -> str | None:
    """A mark as clients see it."""
    if mark is None:
        return None
    return base64.urlsafe_b64encode(json.dumps([name, *mark]).encode()).decode().rstrip("=")


def decode_cursor(name: str, cursor: str | None) -> Mark | None:
    """The mark back; raises CursorError when it is not a cursor of the list of this name."""
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
