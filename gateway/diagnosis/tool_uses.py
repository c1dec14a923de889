"""The tools that an attempt used: runs on servers behind the gateway, joined with the answers that asked for them, and
runs inside the agent, which only the conversation tells of. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.gateway.calls.turns import plain_bodies, read_exchange
from penstock.gateway.diagnosis.tool_calls import ModelCall, read_asks
from penstock.gateway.diagnosis.tool_join import Candidate, ImpliedRun, Link, ToolRun, implied_runs, join
from penstock.gateway.dialects.mcp import tool_run
from penstock.gateway.model.answers import ToolList, ToolUse
from penstock.gateway.model.attributes import POLICY_RULE, TOOL
from penstock.gateway.model.exchange import Exchange
from penstock.gateway.model.span import Span, SpanStatus

MOST_SPANS = 2_000
"""Calls of an attempt whose bytes are read."""
_INSIDE = "the answer asked for it, and a later request carried the result"


Rule = Callable[[str, str], str | None]
"""The rule that a tool inside the agent meets, by its name and its arguments as generated."""


def tools_used(
    spans: Iterable[Span],
    exchange_of: Callable[[Span], Exchange | None],
    rule_of: Rule = lambda tool, arguments: None,
) -> ToolList:
    """What an attempt used, in order of time. `spans`: all of the attempt, in order."""
    calls: list[ModelCall] = []
    runs: dict[str, tuple[Span, ToolRun]] = {}
    skipped = 0
    for span in spans:
        if span.kind not in ("llm", "tool"):
            continue
        if len(calls) + len(runs) >= MOST_SPANS:
            skipped += 1
        elif (exchange := exchange_of(span)) is None:
            continue
        elif span.kind == "llm":
            calls.append(_call(span, exchange))
        else:
            runs[str(span.sequence)] = span, _run(span, exchange)
    asks = read_asks(calls)
    links = join(asks, [run for _, run in runs.values()])
    ends = {call.sequence: call.end_ns or call.start_ns for call in calls}
    begins = {call.sequence: call.start_ns for call in calls}
    found = [_on_server(link, *runs[link.run]) for link in links]
    found += [_inside(one, ends, begins, rule_of(one.name, one.arguments)) for one in implied_runs(asks, links)]
    return ToolList(tools=sorted(found, key=lambda use: (use.start_ns, use.span or 0)), skipped=skipped)


def _call(span: Span, exchange: Exchange) -> ModelCall:
    return ModelCall(
        span.sequence,
        span.start_ns,
        span.end_ns,
        read_exchange(span.dialect, exchange, span),
        span.agent,
        span.retry_of,
        span.status == SpanStatus.OK,
    )


def _run(span: Span, exchange: Exchange) -> ToolRun:
    request, response = plain_bodies(exchange)
    arguments, result, error = tool_run(request, response, span.stream)
    name = str((span.attributes or {}).get(TOOL, ""))
    return ToolRun(
        str(span.sequence), span.upstream or "", name, arguments, result, span.start_ns, span.end_ns, span.status, error
    )


def _on_server(link: Link, span: Span, run: ToolRun) -> ToolUse:
    asked, found = link.asked or Candidate(0, None), (span.attributes or {}).get(POLICY_RULE)
    return ToolUse(
        span=span.sequence,
        server=run.server,
        tool=run.tool,
        grade=link.grade,
        reason=link.reason,
        asked_by=asked.sequence or None,
        call_id=asked.call_id,
        candidates=[] if link.asked else sorted({one.sequence for one in link.candidates}),
        carried_by=link.carried_by,
        status=span.status,
        rule=None if found is None else str(found),
        start_ns=span.start_ns,
        end_ns=span.end_ns,
    )


def _inside(one: ImpliedRun, ends: dict[int, int], begins: dict[int, int], rule: str | None) -> ToolUse:
    first = one.asked[0]
    known = len(one.asked) == 1
    return ToolUse(
        tool=one.name,
        grade="certain" if known else "ambiguous",
        reason=_INSIDE,
        asked_by=first.sequence if known else None,
        call_id=first.call_id,
        candidates=[] if known else sorted({it.sequence for it in one.asked}),
        carried_by=one.carried_by,
        rule=rule,
        start_ns=ends[first.sequence],
        end_ns=begins[one.carried_by],
    )
