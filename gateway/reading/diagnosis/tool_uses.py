"""The tools that an attempt used: runs on servers behind the gateway, joined with the answers that asked for them, and
runs inside the agent, which only the conversation shows. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from penstock.gateway.model.facts import POLICY_RULE, TOOL, TOOL_DURATIONS
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.tools import ToolList, ToolUse, UnansweredCall
from penstock.gateway.model.turn import Exchange
from penstock.gateway.reading.diagnosis.sub_agents import measured_tools, sub_agents
from penstock.gateway.reading.diagnosis.tool_calls import ModelCall, ToolRequest, read_tool_requests, share_messages
from penstock.gateway.reading.diagnosis.tool_join import (
    ImpliedRun,
    ToolCallRef,
    ToolRun,
    ToolRunLink,
    implied_runs,
    join,
)
from penstock.gateway.reading.diagnosis.tool_results import match_name
from penstock.gateway.reading.turns import plain_bodies, read_exchange
from penstock.gateway.wire.dialects import by_name

MOST_SPANS = 2_000
"""Maximum number of calls of an attempt whose bytes are read."""
_INSIDE = "the answer asked for it, and a later request carried the result"


RuleLookup = Callable[[str, str, str], str | None]
"""Returns the rule that applies to a tool inside the agent, by its name, its arguments as generated, and the agent's
name, empty for the main agent; None without one."""


def tools_used(
    spans: Iterable[Span],
    exchange_of: Callable[[Span], Exchange | None],
    rule_of: RuleLookup = lambda tool, arguments, agent: None,
) -> ToolList:
    """The tools that an attempt used, in order of time. `spans`: all spans of the attempt, in order."""
    calls: list[ModelCall] = []
    ids: dict[int, str | None] = {}
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
            calls.append(share_messages(model_call(span, exchange), calls[-1:]))
            ids[span.sequence] = span.span_id
        else:
            runs[str(span.sequence)] = span, run_of(span, exchange)
    asks = read_tool_requests(calls)
    took = _measured(calls, asks)
    links = join(asks, [run for _, run in runs.values()])
    on_servers = [_on_server(link, *runs[link.run], ids, took) for link in links]
    # An agent without a name is the main one here, and no other.
    agents = {call.sequence: call.agent or "" for call in calls}
    inside = [
        _inside(one, ids, rule_of(one.name, one.arguments, agents[one.asked[0].sequence]), took)
        for one in implied_runs(asks, links)
    ]
    return ToolList(
        tools=sorted([*on_servers, *inside], key=lambda use: (use.start_ns, use.span or 0)),
        unanswered=list(_unanswered(asks, on_servers, calls)),
        agents=sub_agents(calls, asks),
        skipped=skipped,
    )


Durations = Mapping[tuple[int, int, int], int]
"""Nanoseconds that tools took by their agent's clock, by the sequence, choice and place of the tool call."""


def _measured(calls: Iterable[ModelCall], asks: Iterable[ToolRequest]) -> Durations:
    took: dict[int, int] = {}
    for call in calls:
        if TOOL_DURATIONS in call.attributes:
            took |= measured_tools(call.attributes, call.turn.messages).took_ns
    return {
        (ask.call.sequence, ask.choice, ask.place): took[id(delivery.shown.part)]
        for ask in (asks if took else ())
        for delivery in ask.deliveries
        if len(delivery.asks) == 1 and id(delivery.shown.part) in took
    }


def _unanswered(
    asks: Sequence[ToolRequest], runs: Sequence[ToolUse], calls: Sequence[ModelCall]
) -> Iterator[UnansweredCall]:
    """The tool calls that later requests repeat without a result. The last answer of an agent often asks for a tool
    that ends it; no request repeats that one. Only ids that were given once identify their call."""
    without: dict[str, bool] = {}
    for call in calls:
        parts = [part for message in call.turn.messages for part in message.parts if part.id is not None]
        results = {part.id for part in parts if part.type == "tool_call_response"}
        without.update({part.id or "": part.id not in results for part in parts if part.type == "tool_call"})
    given = Counter(ask.id for ask in asks)
    for ask in asks:
        if ask.id is None or ask.deliveries or given[ask.id] > 1 or not without.get(ask.id):
            continue
        # No later call carries its result, so the run is identified by the tool call alone.
        fits = [use for use in runs if ask.call.sequence in (use.asked_by, *use.candidates)]
        run = next((use.span for use in fits if match_name(ask.name, use.server or "", use.tool)), None)
        yield UnansweredCall(asked_by=ask.call.sequence, call_id=ask.id, tool=ask.name, run=run)


def model_call(span: Span, exchange: Exchange) -> ModelCall:
    """A model call, parsed from its bytes."""
    return ModelCall(
        span.sequence,
        span.start_ns,
        span.end_ns,
        read_exchange(span.dialect, exchange, span),
        span.agent,
        span.retry_of,
        span.status == SpanStatus.OK,
        span.attributes or {},
    )


def run_of(span: Span, exchange: Exchange) -> ToolRun:
    """A run of a tool on a server, parsed from its bytes."""
    request, response = plain_bodies(exchange)
    arguments, result, error = by_name(span.dialect).tool_run(request, response, span.stream)
    name = str((span.attributes or {}).get(TOOL, ""))
    return ToolRun(
        str(span.sequence), span.upstream or "", name, arguments, result, span.start_ns, span.end_ns, span.status, error
    )


def _on_server(link: ToolRunLink, span: Span, run: ToolRun, ids: Mapping[int, str | None], took: Durations) -> ToolUse:
    asked, found = link.asked or ToolCallRef(0, None), (span.attributes or {}).get(POLICY_RULE)
    return ToolUse(
        span=span.sequence,
        span_id=span.span_id,
        server=run.server,
        tool=run.tool,
        grade=link.grade,
        reason=link.reason,
        asked_by=asked.sequence or None,
        asked_span_id=ids.get(asked.sequence),
        call_id=asked.call_id,
        candidates=[] if link.asked else sorted({one.sequence for one in link.candidates}),
        carried_by=link.carried_by,
        status=span.status,
        error=span.error,
        rule=None if found is None else str(found),
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        measured_ns=took.get((asked.sequence, asked.choice, asked.place)),
    )


def _inside(one: ImpliedRun, ids: Mapping[int, str | None], rule: str | None, took: Durations) -> ToolUse:
    first = one.asked[0]
    known = len(one.asked) == 1
    return ToolUse(
        tool=one.name,
        grade="certain" if known else "ambiguous",
        reason=_INSIDE,
        asked_by=first.sequence if known else None,
        asked_span_id=ids.get(first.sequence) if known else None,
        call_id=first.call_id,
        candidates=[] if known else sorted({it.sequence for it in one.asked}),
        carried_by=one.carried_by,
        rule=rule,
        start_ns=one.start_ns,
        end_ns=one.end_ns,
        measured_ns=took.get((first.sequence, first.choice, first.place)) if known else None,
    )
