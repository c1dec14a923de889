"""Figures of calls by a common property: model, agent, day ... From the whole tape if there is an index, else from the
newest spans."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import islice
from math import ceil
from typing import Any, Final

from aiohttp import web
from pydantic import Field

from penstock.gateway.api.contents import contents
from penstock.gateway.api.context import CONTROL
from penstock.gateway.api.guard import answer, query_of
from penstock.gateway.api.index_lookup import index_lookup
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.pagination import SCAN_BODIES, TapeSource, page, recent_walk, span_filter, summary_of
from penstock.gateway.api.stats import AnsweredAttempts, count_call
from penstock.gateway.api.tool_stats import latencies
from penstock.gateway.followers.index.protocol import SumRequest
from penstock.gateway.model.attributes import UNREAD
from penstock.gateway.model.base import Noun
from penstock.gateway.model.breakdown import Breakdown, BreakdownRow, UnreadList, UnreadRow
from penstock.gateway.model.breakdown_dimensions import BreakdownDimension
from penstock.gateway.model.facts import version_labels
from penstock.gateway.model.prices import Prices, TokenCounts
from penstock.gateway.model.release_calls import is_release_call
from penstock.gateway.model.rollout import Rollout, RolloutSummary, Totals
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.reading.filters.query import Query, parse

QUARTILES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
UNREAD_CALLS: Final = 10_000
"""Most calls with unread keys, and most spans, that are looked at."""
UNREAD_SPANS: Final = 200_000
SCANNED: Final = 20_000
"""Most spans that are looked at without an index, the newest first."""


class BreakdownQuery(Noun):
    """Parameters of a breakdown."""

    by: BreakdownDimension
    """What calls are put together by."""
    filter: str = Field(default="", max_length=4096)
    """Only calls of which all these terms hold, such as `since:7d agent:planner`."""
    limit: int = Field(default=1000, ge=1, le=5000)
    """How many rows at most."""


async def get_breakdown(request: web.Request) -> web.Response:
    """Calls, errors, tokens, latencies and rewards by model, agent, version, day or whatever else calls have in common.
    Sums are over the whole tape where there is an index, else over its newest spans: `complete` says which."""
    control, asked, now_ns = request.app[CONTROL], query_of(request, BreakdownQuery), time.time_ns()
    query = parse(asked.filter, "spans", now_ns)
    index = None if query.on_bodies else control.index
    if index is not None:
        question = SumRequest(asked.by, asked.filter, now_ns, asked.limit)
        if (found := await control.heavy.run(index.sum, question)) is not None:
            rows = [BreakdownRow.model_validate(row) for row in found.rows]
            return answer(_priced(control.prices, by=asked.by, rows=rows, more=found.values - len(rows), complete=True))
    most = SCAN_BODIES if query.needs_bodies or asked.by == "tool" else SCANNED
    return answer(
        await control.heavy.run(scan_breakdown, control.tape, asked.by, query, most, asked.limit, control.prices)
    )


def _priced(prices: Prices, **found: Any) -> Breakdown:
    return Breakdown(currency=prices.file.currency, prices_as_of=prices.file.as_of, **found)


@dataclass(slots=True)
class _Group:
    """Calls that have a value in common."""

    totals: Totals = field(default_factory=Totals)
    durations: list[int] = field(default_factory=list[int])
    rollouts: set[str] = field(default_factory=set[str])
    costs: list[float] = field(default_factory=list[float])
    unpriced: int = 0
    reported: int = 0


def scan_breakdown(
    tape: TapeSource, by: BreakdownDimension, query: Query, most: int, limit: int = 1000, prices: Prices | None = None
) -> Breakdown:
    """The same from a scan of the newest spans."""
    prices, tools = prices or Prices(), contents(tape).tools
    wanted, groups = span_filter(tape, query), defaultdict[str, _Group](_Group)
    rollout = lru_cache(maxsize=4096)(partial(summary_of, tape))
    answered, looked_at = AnsweredAttempts(), 0
    for looked_at, (_, span) in enumerate(islice(tape.recent(), most + 1), 1):
        if looked_at > most:
            break
        if span.kind != "llm" or is_release_call(span) or span.status == SpanStatus.OPEN:
            continue
        settled = answered.settles(span)
        tokens = TokenCounts.of(span.usage)
        cost = prices.cost(span.model_served, span.model, span.start_ns, tokens)
        values = _values(by, span, rollout, tools) if wanted(span) else ()
        for value in values:
            group = groups[value]
            count_call(group.totals, span, settled)
            group.durations += [] if span.duration_ns is None else [span.duration_ns]
            group.rollouts.add(span.rollout)
            group.costs += [] if cost is None else [cost]
            group.reported += tokens.own_cost is not None
            group.unpriced += cost is None and tokens[:2] != (None, None)
    rows = [_row(value, group, rollout) for value, group in groups.items()]
    rows.sort(key=lambda row: (-row.calls, row.value))
    complete = looked_at <= most
    return _priced(
        prices, by=by, rows=rows[:limit], more=max(0, len(rows) - limit), complete=complete,
        looked_at=None if complete else most,
    )  # fmt: skip


def _row(value: str, group: _Group, rollout: Callable[[str], RolloutSummary | None]) -> BreakdownRow:
    found = sorted(
        one.reward for name in group.rollouts if (one := rollout(name)) is not None and one.reward is not None
    )
    quartiles = [found[_place(share, len(found))] for share in QUARTILES] if found else None
    sums = dict(group.totals) | latencies(group.durations)
    mean = sum(found) / len(found) if found else None
    return BreakdownRow(
        value=value,
        rollouts=len(group.rollouts),
        rewarded=len(found),
        reward=mean,
        reward_quartiles=quartiles,
        cost=sum(group.costs) if group.costs else None,
        unpriced=group.unpriced,
        reported=group.reported,
        **sums,
    )


def _place(share: float, count: int) -> int:
    """Index of a quantile among so many ordered values, as in DuckDB's `quantile_disc`."""
    return max(0, ceil(share * count) - 1)


def _values(
    by: BreakdownDimension, span: Span, rollout: Callable[[str], Rollout | None], tools: Callable[[Span], Sequence[str]]
) -> Sequence[str]:
    """The values that a call is counted under: one or several."""
    if by == "tool":
        return list(dict.fromkeys(tools(span))) or [""]
    if by == "version":
        return version_labels(span.versions) or [""]
    if by == "arm":
        return (span.arm or "").split(",")
    if by in _TIMES:
        return (datetime.fromtimestamp(span.start_ns // 10**9, UTC).strftime(_TIMES[by]),)
    if by in ("mode", "group", "origin"):
        found = rollout(span.rollout)
        return (str(getattr(found, by, None) or ""),)
    value = getattr(span, by)
    return ("unknown" if by == "model" else "",) if value is None else (str(value),)


_TIMES: Final[Mapping[str, str]] = {"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d"}


class UnreadQuery(Noun):
    """Parameters of what was not read."""

    filter: str = Field(default="", max_length=4096)
    """Only calls of which all these terms hold, such as `since:7d dialect:chat unread:choices*`."""


async def get_unread(request: web.Request) -> web.Response:
    """What answers held that was not read when they were recorded: text, tool calls or counts under keys that this
    version does not know, and token ids that cannot be. For each path of keys how many answers had it, when, and one of
    them."""
    control, asked, now_ns = request.app[CONTROL], query_of(request, UnreadQuery), time.time_ns()
    # A filter on certain paths concerns only calls with unread keys.
    query = parse(f"{asked.filter} unread:*".strip(), "spans", now_ns)
    walk, most = recent_walk(control.tape, query, index_lookup(control, "spans", query, now_ns)), UNREAD_CALLS
    run = control.heavy.run if query.needs_bodies else asyncio.to_thread
    found = await page(walk, None, most, SCAN_BODIES if query.needs_bodies else UNREAD_SPANS, run)
    return answer(UnreadList(rows=unread_rows(found.rows), complete=found.mark is None))


def unread_rows(spans: Iterable[Span]) -> list[UnreadRow]:
    """Unread keys of answers, of spans with the newest first, grouped by wire format and path."""
    rows: dict[tuple[str, str], UnreadRow] = {}
    for span in spans:
        gaps: dict[str, str] = (span.attributes or {}).get(UNREAD, {})
        for key, kind in gaps.items():
            example = f"{span.rollout}/{span.attempt}#{span.sequence}"
            new = UnreadRow(
                dialect=span.dialect, key=key, kind=kind, calls=0, first_ns=span.start_ns, last_ns=span.start_ns,
                example=example,
            )  # fmt: skip
            row = rows.setdefault((span.dialect, key), new)
            row.calls += 1
            row.first_ns, row.last_ns = min(row.first_ns, span.start_ns), max(row.last_ns, span.start_ns)
    return sorted(rows.values(), key=lambda row: (-row.calls, row.dialect, row.key))


ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "GET", "/api/breakdown", "breakdown", "Figures by what calls have in common", Breakdown, get_breakdown,
        query=BreakdownQuery,
    ),
    ApiRoute(
        "GET", "/api/unread", "unread", "What was not read of answers", UnreadList, get_unread, query=UnreadQuery,
    ),
)  # fmt: skip
"""This part of the API."""
