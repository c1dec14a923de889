"""Figures of a gateway, for `/api/stats`. Sums are over all spans if an index has them, else over the newest ones:
counting those runs in slices in a worker thread.

Calls that were made to try a release are counted as spans, but are in no sum.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final, Literal

from penstock.gateway.api.pagination import SLICE, TapeSource, summary_of
from penstock.gateway.api.tool_stats import ToolTally, failures_by_rollout, latencies
from penstock.gateway.followers.index.protocol import TotalResult
from penstock.gateway.model.answers import ModelStats, RewardStats, ServerState, Stats
from penstock.gateway.model.base import CALLS, SpanKind
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.negotiation import refused
from penstock.gateway.model.release_calls import is_release_call
from penstock.gateway.model.rollout import Reward, RewardSource, Totals
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.token_estimate import lacks_token_counts


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

    spans: int = 0
    since_ns: int | None = None
    totals: Totals = field(default_factory=Totals)
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
            settled = self.answered.settles(span)
            for totals in (self.totals, self.by_model[model]):
                count_call(totals, span, settled)

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


def count_call(totals: Totals, span: Span, settled: bool) -> None:
    """Count a call. `settled`: it was refused and its agent then succeeded in another form."""
    totals.calls += 1
    totals.errors += span.status in (SpanStatus.ERROR, SpanStatus.INTERRUPTED) and not settled
    totals.cancelled += span.status == SpanStatus.CANCELLED
    totals.tool_calls += span.tool_calls
    if span.usage is not None:
        totals.input_tokens = (totals.input_tokens or 0) + (span.usage.input_tokens or 0)
        totals.output_tokens = (totals.output_tokens or 0) + (span.usage.output_tokens or 0)
    totals.uncounted += lacks_token_counts(span, by_name(span.dialect))


_SUMS: Final = ("calls", "errors", "cancelled", "input_tokens", "output_tokens", "tool_calls", "uncounted")
_MODEL: Final = (*_SUMS, "median_ns", "p95_ns")
"""Figures of a model in the index."""
BREAKER: Final[tuple[Literal["closed", "probing", "open"], ...]] = ("closed", "probing", "open")
"""States of a breaker, by the numbers of the metric `penstock_mcp_breaker`."""


NEWEST: Final = 10_000
"""Most spans that are counted without an index, the newest first."""


async def gather(
    tape: TapeSource, most: int | None, metrics: Metrics, total: Callable[[], TotalResult | None] | None = None
) -> Stats:
    """Figures over the `most` newest spans; None for all, if `total` finds them in an index."""
    found = await asyncio.to_thread(total) if most is None and total is not None else None
    sums = await _counted(tape, NEWEST if most is None else most) if found is None else _summed(found)
    return Stats(
        **sums,
        tape=tape.figures(),
        cursor=tape.cursor(),
        gaps=metrics.recording_gaps,
        servers={
            name: ServerState(waiting=waiting, breaker=BREAKER[metrics.mcp_breaker[(name,)]])
            for (name,), waiting in metrics.mcp_waiting.items()
        },
    )


def _summed(found: TotalResult) -> dict[str, Any]:
    """The sums of an index."""
    rows = [{name: row[name] for name in _MODEL} for row in found.models]
    totals = {name: sum(row[name] for row in rows) for name in _SUMS}
    return {
        "counted_spans": found.counted_spans,
        "complete": True,
        "since_ns": found.since_ns,
        "totals": Totals(**totals),
        "by_model": {row["value"]: ModelStats(**of_model) for row, of_model in zip(found.models, rows, strict=True)},
        "by_status": found.by_status,
        "by_kind": found.by_kind,
        "by_tool": found.by_tool,
        "rewards": found.rewards,
    }


async def _counted(tape: TapeSource, most: int) -> dict[str, Any]:
    """The sums of the newest spans."""
    tally, before, complete = SpanTally(), None, False
    while not complete and tally.spans < most:
        wanted = min(SLICE, most - tally.spans)
        before, complete = await asyncio.to_thread(_count_slice, tape, tally, before, wanted)
    failed = await asyncio.to_thread(failures_by_rollout, tally.tools, partial(summary_of, tape))
    return {
        "counted_spans": tally.spans,
        "complete": complete,
        "since_ns": tally.since_ns,
        "totals": Totals(**dict(tally.totals)),
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
