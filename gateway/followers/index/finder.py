"""Answers from an index that has caught up: rows, found in columns by SQL and in texts by a search, and sums."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.gateway.followers.index.link import FindRequest, FindResult, SumRequest, SumResult, TotalResult
from penstock.gateway.followers.index.tables import IndexTables
from penstock.gateway.followers.index.texts import Hits, Needle, TextIndex, concatenate
from penstock.gateway.model.base import CALLS
from penstock.gateway.model.codes import BreakdownDimension
from penstock.gateway.model.span import KIND
from penstock.gateway.reading import filters
from penstock.gateway.reading.filters import SqlFragment, parse
from penstock.gateway.wire.dialects import DIALECTS

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


# Sums as SQL: over calls, grouped by a value, and over all spans, for `/api/stats` of a whole tape. `gateway.api.stats`
# computes the same by a scan.

QueryFunction = Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]
_DAY: Final = "strftime(make_timestamp(s.start_ns // 1000), '%Y-%m-%d{}')"
_VALUES: Final[Mapping[BreakdownDimension, str]] = {
    **{name: f"s.{name}" for name in ("agent", "upstream", "dialect", "status", "error", "finish")},
    "model": "coalesce(s.model, 'unknown')",
    "tool": "unnest(case when len(s.tools) > 0 then list_distinct(s.tools) else [''] end)",
    "version": "unnest(case when len(s.versions) > 0 then s.versions else [''] end)",
    "arm": "unnest(string_split(coalesce(s.arm, ''), ','))",
    "minute": _DAY.format(" %H:%M"),
    "hour": _DAY.format(" %H:00"),
    "day": _DAY.format(""),
    **{name: f'(select r."{name}" from rollouts r where r.number = s.number)' for name in ("mode", "group", "origin")},
}
_CALLS: Final = "s.kind = 'llm' and not s.of_release and s.status <> 'open'"
_REFUSED: Final = f"(s.status = 'error' and s.error = '{KIND}' and s.upstream is null)"
_ANSWERS: Final = ", ".join(f"'{dialect.name}'" for dialect in DIALECTS if dialect.generates)
_ANSWERED: Final = (
    "select number, attempt, max(cursor) as cursor from spans where kind = 'llm' and status = 'ok' and not of_release "
    f"and dialect in ({_ANSWERS}) group by number, attempt"
)
"""The last answer that each attempt got. A refusal before it does not count as an error
(`gateway.model.span`)."""
_COLUMNS: Final = (
    "value", "calls", "errors", "cancelled", "input_tokens", "output_tokens", "tool_calls", "uncounted", "cost",
    "unpriced", "reported", "median_ns", "p95_ns",
)  # fmt: skip
_EARNED: Final = ("rollouts", "rewarded", "reward", "reward_quartiles")


def quantiles(column: str) -> str:
    """SQL of the median and the 95th percentile, without NULLs: a call that died with its gateway has no duration."""
    return f"coalesce(quantile_disc({column}, [0.5, 0.95]), [null, null])"


def breakdown_rows(
    ask: QueryFunction, by: BreakdownDimension, where: SqlFragment, limit: int
) -> tuple[list[dict[str, Any]], int]:
    """(a row for each of the `limit` values with the most calls, the number of values)."""
    rows = call_breakdown_rows(ask, by, where)
    rollouts = ask(
        f"with c as (select distinct coalesce({_VALUES[by]}, '') as value, s.number from spans s "
        f"where {_CALLS} and ({where.text})) "
        "select value, count(*), count(r.reward), avg(r.reward), quantile_disc(r.reward, [0.0, 0.25, 0.5, 0.75, 1.0]) "
        "from c left join rollouts r on r.number = c.number group by value",
        where.values,
    )
    earned: dict[str, dict[str, Any]] = {
        value: dict(zip(_EARNED, of_value, strict=True)) for value, *of_value in rollouts
    }
    return [row | earned[row["value"]] for row in rows[:limit]], len(rows)


def call_breakdown_rows(ask: QueryFunction, by: BreakdownDimension, where: SqlFragment) -> list[dict[str, Any]]:
    """The rows of `breakdown_rows` without the figures of rollouts."""
    condition = f"{_CALLS} and ({where.text})"
    [(refused,)] = ask(f"select count(*) from spans s where {_REFUSED} and {condition}", where.values)
    settled = f"coalesce({_REFUSED} and d.cursor > s.cursor, false)" if refused else "false"
    answers = f" left join ({_ANSWERED}) d on d.number = s.number and d.attempt = s.attempt" if refused else ""
    calls = (
        f"select {_VALUES[by]} as value, s.number, s.status, s.duration_ns, s.input_tokens, s.output_tokens, "
        f"s.tool_calls, s.uncounted, s.cost, s.cost_reported, {settled} as settled from spans s{answers} "
        f"where {condition}"
    )
    rows = ask(
        f"with c as ({calls}) select coalesce(value, '') as value, count(*) as calls, "
        "count(*) filter (status in ('error', 'interrupted') and not settled), "
        "count(*) filter (status = 'cancelled'), cast(coalesce(sum(input_tokens), 0) as bigint), "
        "cast(coalesce(sum(output_tokens), 0) as bigint), cast(sum(tool_calls) as bigint), "
        "count(*) filter (uncounted), sum(cost), "
        "count(*) filter (cost is null and (input_tokens is not null or output_tokens is not null)), "
        "count(*) filter (cost_reported), "
        f"{quantiles('duration_ns')} from c group by 1 order by calls desc, 1",
        where.values,
    )
    return [dict(zip(_COLUMNS, (*row[:-1], *row[-1]), strict=True)) for row in rows]


_CALL_KINDS: Final = ", ".join(f"'{kind}'" for kind in CALLS)
_WENT: Final = (
    "select number, case when status = 'failed' then true when reward is not null then reward <= 0 "
    "when status in ('succeeded', 'ended') then false end as failed from rollouts"
)
"""True if a rollout failed, as `gateway.api.stats` defines it."""
_RUN: Final = "s.kind = 'tool' and not s.of_release and s.status <> 'open'"
_TOOL: Final = "coalesce(s.upstream, '') as server, s.tools[1] as tool"
_TOOL_COLUMNS: Final = (
    "server", "tool", "calls", "errors", "cancelled", "median_ns", "p95_ns", "failed", "rollouts", "share_of_failed",
    "share_of_others",
)  # fmt: skip


def compute_totals(ask: QueryFunction) -> TotalResult:
    kinds = ask("select kind, count(*), min(start_ns) from spans group by kind", ())
    statuses = ask(
        f"select status, count(*) from spans where kind in ({_CALL_KINDS}) and not of_release group by status", ()
    )
    return TotalResult(
        sum(count for _, count, _ in kinds),
        min((since for *_, since in kinds), default=None),
        {kind: count for kind, count, _ in kinds},
        dict(statuses),
        call_breakdown_rows(ask, "model", SqlFragment("true")),
        _tools(ask) if any(kind == "tool" for kind, *_ in kinds) else [],
        _rewards(ask),
    )


def _tools(ask: QueryFunction) -> list[dict[str, Any]]:
    runs = ask(
        f"select {_TOOL}, count(*) as calls, count(*) filter (s.status in ('error', 'interrupted')), "
        f"count(*) filter (s.status = 'cancelled'), {quantiles('s.duration_ns')} "
        f"from spans s where {_RUN} group by all order by calls desc, server, tool",
        (),
    )
    [(bad, good)] = ask(
        "select count(*) filter (w.failed), count(*) filter (not w.failed) "
        f"from (select distinct number from spans where not of_release) c join ({_WENT}) w on w.number = c.number",
        (),
    )
    went = {
        (server, tool): (failed, others)
        for server, tool, failed, others in ask(
            f"with c as (select distinct {_TOOL}, s.number from spans s where {_RUN}) "
            "select server, tool, count(*) filter (w.failed), count(*) filter (not w.failed) "
            f"from c join ({_WENT}) w on w.number = c.number group by all",
            (),
        )
    }
    made: list[dict[str, Any]] = []
    for *sums, lengths in runs:
        failed, others = went.get((sums[0], sums[1]), (0, 0))
        shares = (failed / bad if bad else None, others / good if good else None)
        row = (*sums, *lengths, failed, failed + others, *shares)
        made.append(dict(zip(_TOOL_COLUMNS, row, strict=True)))
    return made


def _rewards(ask: QueryFunction) -> dict[str, Any]:
    rows = ask(
        "select reward_source, count(*), count(*) filter (not reward_trusted), "
        "count(reward) filter (reward_trusted), sum(reward) filter (reward_trusted) "
        "from spans where kind = 'reward' and not of_release group by reward_source",
        (),
    )
    valued = sum(row[3] for row in rows)
    return {
        "count": sum(row[1] for row in rows),
        "untrusted": sum(row[2] for row in rows),
        "mean": sum(row[4] or 0.0 for row in rows) / valued if valued else None,
        "by_source": {row[0]: row[1] for row in rows},
    }
