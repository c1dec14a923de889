"""Finds rows by an index that has caught up: columns by SQL, texts by a search, and both together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from penstock.gateway.followers.index.protocol import FindRequest, FindResult, SumRequest, SumResult
from penstock.gateway.followers.index.sums import breakdown_rows
from penstock.gateway.followers.index.tables import IndexTables
from penstock.gateway.followers.index.texts import Hits, Needle, TextIndex, concatenate
from penstock.gateway.reading import filters
from penstock.gateway.reading.filters import parse

SEARCH_S: Final = 0.5
"""Seconds after which a search of texts answers with the hits so far. The same question continues it; others are
answered between."""


class NoAnswerError(Exception):
    """A question that has no answer now, through no fault of the index. `again`: that of `IndexFailure`."""

    def __init__(self, reason: str, again: bool = False) -> None:
        super().__init__(reason)
        self.again = again


def find(tables: IndexTables, texts: TextIndex, asked: FindRequest) -> FindResult:
    """The positions of a page's rows, newest first. Raises `QueryError`."""
    query = parse(asked.filter, asked.target, asked.now_ns)
    where = filters.where(query, asked.target, tables.words)
    if asked.target == "rollouts":
        return _find_rollouts(tables, texts, where, asked, filters.needles(query))
    if needles := filters.needles(query):
        return _find_said(tables, texts, where.row, asked, needles)
    return _find_spans(tables, where.row, asked)


def sum_up(tables: IndexTables, texts: TextIndex, asked: SumRequest) -> SumResult:
    """Sums over the calls of a filter. Raises `QueryError`, and `NoAnswerError` if its search takes too long."""
    query = parse(asked.filter, "spans", asked.now_ns)
    for hits in _searched(texts, filters.needles(query)):
        tables.put_hits(hits.cursors)
        if hits.low and hits.last:
            raise NoAnswerError("a search of texts takes long: it goes on when it is asked again", again=True)
    where = filters.where(query, "spans", tables.words).row
    return SumResult(*breakdown_rows(tables.query, asked.by, where, asked.limit))


def _searched(texts: TextIndex, needles: Sequence[Needle]) -> Iterator[Hits]:
    """The hits of a search so far, after each of its parts."""
    found: list[list[Any]] = [[] for _ in needles]
    for hits in texts.search(needles, until=time.monotonic() + SEARCH_S) if needles else ():
        for some, more in zip(found, hits.cursors, strict=True):
            some.append(more)
        yield Hits(hits.low, [concatenate(some) for some in found], hits.last)


def _find_rollouts(
    tables: IndexTables, texts: TextIndex, where: filters.WhereClause, asked: FindRequest, needles: Sequence[Needle]
) -> FindResult:
    """A rollout's spans come after it in the log: once all spans from a position on are searched, so is every rollout
    from there on."""
    for hits in _searched(texts, needles):
        tables.put_hits(hits.cursors)
        found = _rollouts_from(tables, hits.low, where, asked)
        if not hits.low or not found.complete:
            return found
        if hits.last:
            reached = hits.low if asked.before is None else min(hits.low, asked.before)
            return msgspec.structs.replace(found, complete=False, reached=reached)
    return _rollouts_from(tables, 0, where, asked)


def _rollouts_from(tables: IndexTables, low: int, where: filters.WhereClause, asked: FindRequest) -> FindResult:
    source, hit, values = "rollouts r", "null", where.row.values
    if where.within is not None:
        inner = f"select s.number, max(s.cursor) as hit from spans s where {where.within.text} group by s.number"
        source, hit = f"rollouts r join ({inner}) h on h.number = r.number", "h.hit"
        values = (*where.within.values, *values)
    rows = tables.query(
        f"select r.number, r.rollout, {hit} from {source} where {_between('r.number', low, asked.before)}"
        f"({where.row.text}) order by r.number desc limit ?",
        (*values, asked.limit + 1),
    )
    shown = rows[: asked.limit]
    hits = [] if where.within is None else [hit for _, _, hit in shown]
    return _found([row[0] for row in rows], asked.limit, [row[1] for row in shown], hits)


def _find_spans(tables: IndexTables, condition: filters.SqlFragment, asked: FindRequest) -> FindResult:
    """Reads the newest files first: a page is often full before the others are read. Running calls may be anywhere."""
    ended: list[int] = []
    for source in ("fresh", tables.newest_file, tables.older_files):
        if source is not None and (missing := asked.limit + 1 - len(ended)) > 0:
            ended += _cursors(tables, source, condition, (0, asked.before), missing)
    running = _cursors(tables, "running", condition, (0, asked.before), asked.limit + 1)
    return _found(sorted([*ended, *running], reverse=True), asked.limit)


def _find_said(
    tables: IndexTables, texts: TextIndex, condition: filters.SqlFragment, asked: FindRequest, needles: Sequence[Needle]
) -> FindResult:
    """Searches the newest texts first, for the same reason; after `SEARCH_S` it answers with the hits so far."""
    found, high = list[int](), asked.before
    for hits in texts.search(needles, asked.before, time.monotonic() + SEARCH_S):
        tables.put_hits(hits.cursors)
        found += _cursors(tables, "spans", condition, (hits.low, high), asked.limit + 1 - len(found))
        if len(found) > asked.limit:
            break
        high = hits.low
        if high and hits.last:
            return FindResult(found, False, high)
    return _found(found, asked.limit)


def _cursors(
    tables: IndexTables, source: str, condition: filters.SqlFragment, between: tuple[int, int | None], limit: int
) -> list[int]:
    rows = tables.query(
        f"select s.cursor from {source} s where {_between('s.cursor', *between)}({condition.text}) "
        "order by s.cursor desc limit ?",
        (*condition.values, limit),
    )
    return [cursor for (cursor,) in rows]


def _between(column: str, low: int, high: int | None) -> str:
    return f"{column} >= {low} and " + ("" if high is None else f"{column} < {high} and ")


def _found(
    positions: list[int], limit: int, names: list[str] | None = None, hits: list[int] | None = None
) -> FindResult:
    """A page from positions that may be one more than it holds."""
    shown = positions[:limit]
    return FindResult(shown, len(positions) <= limit, shown[-1] if shown else 0, names or [], hits or [])
