"""Figures of a gateway, for `/api/stats`. Sums are over all spans if an index has them, else over the newest ones:
counting those runs in slices in a worker thread.

Calls that were made to try a release are counted as spans, but are in no sum.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import islice
from math import ceil
from typing import Any, Final, Literal

from aiohttp import web
from pydantic import Field

from penstock.gateway.api.guard import CONTROL, answer, query_of
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.pagination import (
    SCAN_BODIES,
    SLICE,
    TapeSource,
    contents,
    index_lookup,
    page,
    recent_walk,
    span_filter,
    summary_of,
)
from penstock.gateway.followers.index.link import SumRequest, TotalResult
from penstock.gateway.model.answers import (
    Breakdown,
    BreakdownRow,
    ModelStats,
    RewardStats,
    ServerState,
    Stats,
    UnreadList,
    UnreadRow,
)
from penstock.gateway.model.base import CALLS, Noun, SpanKind
from penstock.gateway.model.codes import BreakdownDimension
from penstock.gateway.model.facts import TOOL, UNREAD, is_release_call, version_labels
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.rollout import (
    UNFAILED,
    Reward,
    RewardSource,
    Rollout,
    RolloutStatus,
    RolloutSummary,
    Totals,
    sum_totals,
)
from penstock.gateway.model.span import Span, SpanStatus, refused
from penstock.gateway.model.tools import ToolStats
from penstock.gateway.reading.filters import Query, parse
from penstock.gateway.reading.told_calls import ToldCalls
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.tokens import lacks_token_counts

# Sums over the runs of tools: the figures in `/api/stats` of each tool of a server behind the gateway.
#
# Heads tell which rollout ran which tool; the outcomes of rollouts are read from the tape afterwards, once per
# rollout.

ToolName = tuple[str, str]
"""Server and tool."""
ENDED = {RolloutStatus.FAILED: True, **dict.fromkeys(UNFAILED, False)}
"""True if a rollout with this status failed; other statuses are not conclusive."""


@dataclass(slots=True)
class ToolRunSums:
    """Counts, durations (ns) and rollouts of the runs of one tool."""

    calls: int = 0
    errors: int = 0
    cancelled: int = 0
    durations: list[int] = field(default_factory=list[int])
    rollouts: set[str] = field(default_factory=set[str])


@dataclass(slots=True)
class ToolTally:
    """Sums that grow span by span."""

    tools: defaultdict[ToolName, ToolRunSums] = field(default_factory=lambda: defaultdict(ToolRunSums))
    rollouts: set[str] = field(default_factory=set[str])
    """Ids of all counted rollouts, with tools and without."""

    def add(self, span: Span) -> None:
        """Count a span of an agent."""
        self.rollouts.add(span.rollout)
        if span.kind != "tool" or span.status == SpanStatus.OPEN:
            return
        runs = self.tools[span.upstream or "", str((span.attributes or {}).get(TOOL, ""))]
        runs.calls += 1
        runs.errors += span.status in (SpanStatus.ERROR, SpanStatus.INTERRUPTED)
        runs.cancelled += span.status == SpanStatus.CANCELLED
        runs.durations += [] if span.duration_ns is None else [span.duration_ns]
        runs.rollouts.add(span.rollout)

    def figures(self, failed: dict[str, bool]) -> Iterator[ToolStats]:
        """Sums by tool, the busiest first. `failed`: by rollout, for those with a known outcome."""
        bad, good = ({one for one, it in failed.items() if it == wanted} for wanted in (True, False))
        for (server, tool), runs in sorted(self.tools.items(), key=lambda item: (-item[1].calls, item[0])):
            ran_bad, ran_good = len(runs.rollouts & bad), len(runs.rollouts & good)
            yield ToolStats(
                server=server,
                tool=tool,
                calls=runs.calls,
                errors=runs.errors,
                cancelled=runs.cancelled,
                rollouts=ran_bad + ran_good,
                failed=ran_bad,
                share_of_failed=ran_bad / len(bad) if bad else None,
                share_of_others=ran_good / len(good) if good else None,
                **latencies(runs.durations),
            )


def latencies(durations: list[int]) -> dict[str, int]:
    """Nearest-rank quantiles of durations in nanoseconds; {} for no durations."""
    ordered = sorted(durations)
    quantiles = (("median_ns", 50), ("p95_ns", 95))
    return {name: ordered[-(-len(ordered) * q // 100) - 1] for name, q in quantiles} if ordered else {}


def failures_by_rollout(tally: ToolTally, summary_of: Callable[[str], RolloutSummary | None]) -> dict[str, bool]:
    """By rollout id, True if it failed; only rollouts with a known outcome. Nothing is looked up if no tool was run."""
    found = (summary_of(one) for one in tally.rollouts) if tally.tools else ()
    known = ((one.id, failed(one)) for one in found if one is not None)
    return {name: bad for name, bad in known if bad is not None}


def failed(rollout: RolloutSummary) -> bool | None:
    """True if a rollout failed: it ended as failed, or its reward is 0 or less; None if neither is known."""
    ended = ENDED.get(rollout.status)
    if ended or rollout.reward is None:
        return ended
    return rollout.reward <= 0


class AnsweredAttempts:
    """The attempts with an answered call, while calls are looked at, the newest first."""

    def __init__(self) -> None:
        self._attempts = set[tuple[str, str]]()

    def settles(self, span: Span) -> bool:
        """True if a call was refused, and its agent then asked in another form and was answered. Must be called for
        each call in turn."""
        attempt = (span.rollout, span.attempt)
        settled = refused(span) and attempt in self._attempts
        if span.status == SpanStatus.OK and by_name(span.dialect).generates:
            self._attempts.add(attempt)
        return settled


@dataclass(slots=True)
class SpanTally:
    """Sums that grow span by span."""

    prices: Prices
    spans: int = 0
    since_ns: int | None = None
    by_status: Counter[str] = field(default_factory=Counter[str])
    by_kind: Counter[SpanKind] = field(default_factory=Counter[SpanKind])
    rewards: list[Reward] = field(default_factory=list[Reward])
    by_model: defaultdict[str, ModelStats] = field(default_factory=lambda: defaultdict(ModelStats))
    durations: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    tools: ToolTally = field(default_factory=ToolTally)
    answered: AnsweredAttempts = field(default_factory=AnsweredAttempts)

    def add(self, span: Span) -> None:
        self.spans += 1
        self.since_ns = span.start_ns if self.since_ns is None else min(self.since_ns, span.start_ns)
        self.by_kind[span.kind] += 1
        if is_release_call(span):
            return
        self.tools.add(span)
        self.by_status.update([span.status.value] if span.kind in CALLS else [])
        self.rewards += [Reward.of(span)] if span.kind == "reward" else []
        if span.kind == "llm" and span.status != SpanStatus.OPEN:
            model = "unknown" if span.model is None else span.model
            self.durations[model] += [] if span.duration_ns is None else [span.duration_ns]
            count_call(self.by_model[model], span, self.answered.settles(span), self.prices)

    def models(self) -> dict[str, ModelStats]:
        """Sums by model, the busiest first, with their latencies."""
        busiest = sorted(self.by_model.items(), key=lambda item: -item[1].calls)
        return {name: ModelStats(**(dict(stats) | latencies(self.durations[name]))) for name, stats in busiest}


def _rewards(given: list[Reward]) -> RewardStats:
    values = [reward.value for reward in given if reward.trusted and reward.value is not None]
    sources: Counter[RewardSource] = Counter(reward.source for reward in given)
    return RewardStats(
        count=len(given),
        untrusted=sum(not reward.trusted for reward in given),
        mean=sum(values) / len(values) if values else None,
        by_source=dict(sources),
    )


def count_call(totals: Totals, span: Span, settled: bool, prices: Prices) -> None:
    """Count a call. `settled`: it was refused and its agent then succeeded in another form."""
    prices.add(totals, span)
    totals.calls += 1
    totals.errors += span.status in (SpanStatus.ERROR, SpanStatus.INTERRUPTED) and not settled
    totals.cancelled += span.status == SpanStatus.CANCELLED
    totals.tool_calls += span.tool_calls
    if span.usage is not None:
        totals.input_tokens = (totals.input_tokens or 0) + (span.usage.input_tokens or 0)
        totals.output_tokens = (totals.output_tokens or 0) + (span.usage.output_tokens or 0)
    totals.uncounted += lacks_token_counts(span, by_name(span.dialect))


BREAKER: Final[tuple[Literal["closed", "probing", "open"], ...]] = ("closed", "probing", "open")
"""States of a breaker, by the numbers of the metric `penstock_mcp_breaker`."""


NEWEST: Final = 10_000
"""Most spans that are counted without an index, the newest first."""


async def gather(
    tape: TapeSource,
    most: int | None,
    metrics: Metrics,
    prices: Prices,
    total: Callable[[], TotalResult | None] | None = None,
) -> Stats:
    """Figures over the `most` newest spans; None for all, if `total` finds them in an index."""
    found = await asyncio.to_thread(total) if most is None and total is not None else None
    sums = await _counted(tape, NEWEST if most is None else most, prices) if found is None else _summed(found)
    # Telemetry of agents is rare, and what is in it is read span by span.
    told = await asyncio.to_thread(_told, tape, prices) if sums["by_kind"].get("otel") else 0
    return Stats(
        **sums,
        told=told,
        tape=tape.figures(),
        cursor=tape.cursor(),
        gaps=metrics.recording_gaps,
        servers={
            name: ServerState(waiting=waiting, breaker=BREAKER[metrics.mcp_breaker[(name,)]])
            for (name,), waiting in metrics.mcp_waiting.items()
        },
    )


def _told(tape: TapeSource, prices: Prices) -> int:
    """Number of calls among the newest spans that only telemetry tells of."""
    attempts = defaultdict[tuple[str, str], ToldCalls](ToldCalls)
    for _, span in islice(tape.recent(), NEWEST):
        if span.kind in ("llm", "otel"):
            attempts[span.rollout, span.attempt].add(span)
    return sum(one.totals(prices).told for one in attempts.values())


def _summed(found: TotalResult) -> dict[str, Any]:
    """The sums of an index."""
    by_model = {
        row["value"]: ModelStats(**{name: row[name] for name in row.keys() - {"value"}}) for row in found.models
    }
    return {
        "counted_spans": found.counted_spans,
        "complete": True,
        "since_ns": found.since_ns,
        "totals": sum_totals(by_model.values()),
        "by_model": by_model,
        "by_status": found.by_status,
        "by_kind": found.by_kind,
        "by_tool": found.by_tool,
        "rewards": found.rewards,
    }


async def _counted(tape: TapeSource, most: int, prices: Prices) -> dict[str, Any]:
    """The sums of the newest spans."""
    tally, before, complete = SpanTally(prices), None, False
    while not complete and tally.spans < most:
        wanted = min(SLICE, most - tally.spans)
        before, complete = await asyncio.to_thread(_count_slice, tape, tally, before, wanted)
    failed = await asyncio.to_thread(failures_by_rollout, tally.tools, partial(summary_of, tape))
    return {
        "counted_spans": tally.spans,
        "complete": complete,
        "since_ns": tally.since_ns,
        "totals": sum_totals(tally.by_model.values()),
        "by_model": tally.models(),
        "by_status": dict(tally.by_status),
        "by_kind": dict(tally.by_kind),
        "by_tool": list(tally.tools.figures(failed)),
        "rewards": _rewards(tally.rewards),
    }


def _count_slice(tape: TapeSource, tally: SpanTally, before: int | None, wanted: int) -> tuple[int | None, bool]:
    """Count up to `wanted` spans; return the position to go on from and whether the tape has ended."""
    rows = list(islice(tape.recent(before), wanted))
    for _, span in rows:
        tally.add(span)
    return (rows[-1][0] if rows else before), len(rows) < wanted


# Figures of calls by a common property: model, agent, day ... From the whole tape if there is an index, else from the
# newest spans.

QUARTILES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
UNREAD_CALLS: Final = 10_000
"""Most calls with unread keys, and most spans, that are looked at."""
UNREAD_SPANS: Final = 200_000
SCANNED: Final = 20_000
"""Most spans that are looked at without an index, the newest first."""


class BreakdownQuery(Noun):
    """The query parameters of figures by a common property of calls."""

    by: BreakdownDimension
    """What calls are put together by."""
    filter: str = Field(default="", max_length=4096)
    """Only calls of which all these terms hold, such as `since:7d agent:planner`."""
    limit: int = Field(default=1000, ge=1, le=5000)
    """How many rows at most."""
    spans: int = Field(default=SCANNED, ge=1, le=SCANNED)
    """How many of the newest spans are looked at where there is no index."""


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
    most = min(SCAN_BODIES if query.needs_bodies or asked.by == "tool" else SCANNED, asked.spans)
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


def scan_breakdown(
    tape: TapeSource, by: BreakdownDimension, query: Query, most: int, limit: int = 1000, prices: Prices | None = None
) -> Breakdown:
    """The same from a scan of the newest spans."""
    prices, tools = prices or Prices(), contents(tape).tools
    wanted, groups = span_filter(tape, query, prices), defaultdict[str, _Group](_Group)
    rollout = lru_cache(maxsize=4096)(partial(summary_of, tape))
    answered, looked_at = AnsweredAttempts(), 0
    for looked_at, (_, span) in enumerate(islice(tape.recent(), most + 1), 1):
        if looked_at > most:
            break
        if span.kind != "llm" or is_release_call(span) or span.status == SpanStatus.OPEN:
            continue
        settled = answered.settles(span)
        values = _values(by, span, rollout, tools) if wanted(span) else ()
        for value in values:
            group = groups[value]
            count_call(group.totals, span, settled, prices)
            group.durations += [] if span.duration_ns is None else [span.duration_ns]
            group.rollouts.add(span.rollout)
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


_TIMES: Final[Mapping[str, str]] = {"minute": "%Y-%m-%d %H:%M", "hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d"}


class UnreadQuery(Noun):
    """Parameters of what was not read."""

    filter: str = Field(default="", max_length=4096)
    """Only calls of which all these terms hold, such as `since:7d dialect:chat unread:choices*`."""


async def get_unread(request: web.Request) -> web.Response:
    """The parts of answers that were not read when they were recorded: text, tool calls or counts under keys that this
    version does not know, and token ids that cannot be. For each path of keys: how many answers had it, when, and one
    of them."""
    control, asked, now_ns = request.app[CONTROL], query_of(request, UnreadQuery), time.time_ns()
    # A filter on certain paths concerns only calls with unread keys.
    query = parse(f"{asked.filter} unread:*".strip(), "spans", now_ns)
    find, most = index_lookup(control.index, "spans", query, now_ns), UNREAD_CALLS
    walk = recent_walk(control.tape, query, control.prices, find)
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
