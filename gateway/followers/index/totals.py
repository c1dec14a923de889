"""Sums over all spans as SQL, for `/api/stats` of a whole tape. `gateway.api.stats` computes the same by a scan."""

from __future__ import annotations

from typing import Any, Final

from penstock.gateway.followers.index.protocol import TotalResult
from penstock.gateway.followers.index.sums import QueryFunction, call_breakdown_rows, quantiles
from penstock.gateway.model.base import CALLS
from penstock.gateway.reading.filters.sql import SqlFragment

_CALL_KINDS: Final = ", ".join(f"'{kind}'" for kind in CALLS)
_WENT: Final = (
    "select number, case when status = 'failed' then true when reward is not null then reward <= 0 "
    "when status = 'succeeded' then false end as failed from rollouts"
)
"""True if a rollout failed, as `gateway.api.tool_stats` defines it."""
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
