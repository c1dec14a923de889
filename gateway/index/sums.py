"""Sums over calls as SQL, by a value that they have in common. `gateway.api.breakdown` makes the same by a scan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from penstock.gateway.dialects import DIALECTS
from penstock.gateway.filters.sql import Sql
from penstock.gateway.model.grouping import By
from penstock.gateway.model.negotiation import KIND

Ask = Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]
_DAY: Final = "strftime(make_timestamp(s.start_ns // 1000), '%Y-%m-%d{}')"
_VALUES: Final[Mapping[By, str]] = {
    **{name: f"s.{name}" for name in ("agent", "upstream", "dialect", "status", "error", "finish")},
    "model": "coalesce(s.model, 'unknown')",
    "version": "unnest(case when len(s.versions) > 0 then s.versions else [''] end)",
    "arm": "unnest(string_split(coalesce(s.arm, ''), ','))",
    "hour": _DAY.format(" %H:00"),
    "day": _DAY.format(""),
    **{name: f'(select r."{name}" from rollouts r where r.number = s.number)' for name in ("mode", "group", "origin")},
}
_CALLS: Final = "s.kind = 'llm' and not s.of_release and s.duration_ns is not null"
_REFUSED: Final = f"(s.status = 'error' and s.error = '{KIND}' and s.upstream is null)"
_ANSWERED: Final = ", ".join(f"'{dialect.name}'" for dialect in DIALECTS if dialect.generates)
_SETTLED: Final = (
    f"{_REFUSED} and exists (select 1 from spans t where t.number = s.number and t.attempt = s.attempt "
    "and t.cursor > s.cursor and not t.of_release and t.kind = 'llm' and t.status = 'ok' "
    f"and t.dialect in ({_ANSWERED}))"
)
"""A refusal after which its agent asked otherwise and was answered (`gateway.model.negotiation`)."""


def summed(ask: Ask, by: By, where: Sql) -> list[dict[str, str | int | float | None]]:
    """A row for each value, the busiest first."""
    condition = f"{_CALLS} and ({where.text})"
    [(refused,)] = ask(f"select count(*) from spans s where {_REFUSED} and {condition}", where.values)
    settled = f"({_SETTLED})" if refused else "false"
    calls = (
        f"select {_VALUES[by]} as value, s.number, s.status, s.duration_ns, s.input_tokens, s.output_tokens, "
        f"s.tool_calls, s.uncounted, s.ambiguous, {settled} as settled, {_REFUSED} as refused from spans s "
        f"where {condition}"
    )
    columns = (
        "value", "calls", "errors", "cancelled", "input_tokens", "output_tokens", "tool_calls", "uncounted",
        "median_ns", "p95_ns", "rollouts",
    )  # fmt: skip
    rows = ask(
        f"with c as ({calls}) select coalesce(value, '') as value, count(*) as calls, "
        "count(*) filter (status in ('error', 'interrupted') and not settled), "
        "count(*) filter (status = 'cancelled'), cast(coalesce(sum(input_tokens), 0) as bigint), "
        "cast(coalesce(sum(output_tokens), 0) as bigint), cast(sum(tool_calls) as bigint), "
        "count(*) filter (uncounted), quantile_disc(duration_ns, 0.5), quantile_disc(duration_ns, 0.95), "
        "count(distinct number) from c group by 1 order by calls desc, 1",
        where.values,
    )
    rewards = ask(
        f"with c as ({calls}) select d.value, count(r.reward), avg(r.reward) from "
        "(select distinct coalesce(value, '') as value, number from c) d join rollouts r on r.number = d.number "
        "group by 1",
        where.values,
    )
    earned = {value: {"rewarded": count, "reward": mean} for value, count, mean in rewards}
    return [dict(zip(columns, row, strict=True)) | earned.get(row[0], {}) for row in rows]
