"""Sums over the runs of tools: the figures in `/api/stats` of each tool of a server behind the gateway.

Heads tell which rollout ran which tool; the outcomes of rollouts are read from the tape afterwards, once per rollout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from penstock.gateway.model.attributes import TOOL
from penstock.gateway.model.rollout import RolloutStatus, RolloutSummary
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.tools import ToolStats

ToolName = tuple[str, str]
"""Server and tool."""
ENDED = {RolloutStatus.FAILED: True, RolloutStatus.SUCCEEDED: False}
"""True if a rollout with this status failed; other statuses are not conclusive."""


@dataclass(slots=True)
class ToolRunSums:
    """Sums of one tool."""

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
