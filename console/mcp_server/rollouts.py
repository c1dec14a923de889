"""Tools that find rollouts and spans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from penstock.console.mcp_server.tool import (
    Cursor,
    ToolAnswer,
    ToolArguments,
    ToolContext,
    ToolDefinition,
    ToolResult,
    cut,
    moment,
    plain,
    read_rows,
)
from penstock.console.views import rollouts as display
from penstock.console.views.rollouts import content
from penstock.console.views.table import Column, Listing, abbreviate, age, clean, compact, figure, number
from penstock.console.views.table import plain as cell
from penstock.gateway.model.answers import RolloutPage, SpanPage
from penstock.gateway.model.base import CALLS, Id
from penstock.gateway.model.rollout import RolloutSummary
from penstock.gateway.model.span import Span

BRIEF = 200
"""Most characters of a task, a name, or the content of a span, in a list."""
LINE = 600
"""Most characters of a span on a line."""
FILTERS = """A filter is terms with spaces between, all of which must hold; a leading - negates, commas separate \
alternatives, * is a wildcard, quotes hold spaces. Times and lengths have units (us ms s m h d). Examples:
  reward<0.5 started>2h            went badly in the last two hours
  status:failed model:qwen*        failed, and called such a model
  -status:running group:q1,q2      ended, of two tasks
  text~"refund policy"             a message, tool call, result or error says it
  mode:val metadata.run=7          evaluation rollouts with this metadata"""
FIELDS = """Fields: status rollout mode origin group priority tries input reward cost worker attempt_status started \
agent model upstream error finish latency tokens input_tokens output_tokens tool_calls http text kind name \
metadata.KEY. Operators: `:` pattern, `=` exact, `~` contains, and > >= < <= for numbers and times."""

Filter = Annotated[str, Field(max_length=4000)]


class ListRolloutsArguments(ToolArguments):
    filter: Filter = ""
    """Terms, such as `status:failed reward<0.5`; all rollouts if empty."""
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """Rollouts in one answer."""
    cursor: Cursor = None
    """`next` of the answer before, to go on with older ones."""


class RolloutRow(ToolAnswer):
    """A rollout in a list."""

    id: str
    status: str
    mode: str
    group: str | None
    """The task it repeats."""
    reward: float | None
    """Of its newest attempt that has one; none if nobody has judged it."""
    attempts: int
    calls: int
    """Model calls."""
    errors: int
    input_tokens: int | None
    output_tokens: int | None
    cost: float | None
    """US dollars; a lower bound if calls are unpriced."""
    unpriced: int
    """Calls of models without a price."""
    tool_calls: int
    """Tool calls that models asked for, or that ran on servers behind the gateway, if these are more."""
    created: str | None
    task: str | None
    """The beginning of its input."""


class RolloutRows(ToolAnswer):
    """A page of rollouts, newest first."""

    rollouts: list[RolloutRow]
    next: str | None = None
    """Pass it as `cursor` to go on; none at the end."""


ROLLOUTS = (
    Column("rollout"), Column("status"), figure("reward"), Column("mode"), Column("group"), figure("model calls"),
    figure("errors"), Column("tokens in → out"), figure("cost"), figure("tool calls"), figure("age"), Column("task"),
)  # fmt: skip


async def list_rollouts(context: ToolContext, asked: ListRolloutsArguments) -> ToolResult:
    """Read pages of rollouts until `limit` rows match."""
    found = await read_rows(context.client, "/api/rollouts", RolloutPage, lambda page: page.rollouts, asked)
    answer = RolloutRows(rollouts=[_row(one) for one in found.rows], next=found.next)
    shown = plain(_table(found.rows, time.time_ns())) if found.rows else _nothing("rollout", asked.filter)
    return ToolResult(answer, shown + _more(found.next, found.scanned))


def _row(one: RolloutSummary) -> RolloutRow:
    t = one.totals
    return RolloutRow(
        id=one.id,
        status=one.status,
        mode=one.mode,
        group=one.group,
        reward=one.reward,
        attempts=len(one.attempts),
        calls=t.calls,
        errors=t.errors,
        input_tokens=t.input_tokens,
        output_tokens=t.output_tokens,
        cost=t.cost,
        unpriced=t.unpriced,
        tool_calls=display.tool_calls(one),
        created=moment(one.created_ns),
        task=_task(one),
    )


def _task(one: RolloutSummary) -> str | None:
    if one.input is None:
        return None
    return clean(abbreviate(one.input if isinstance(one.input, str) else compact(one.input), BRIEF))


def _table(rows: Sequence[RolloutSummary], now_ns: int) -> Listing:
    made = Listing(*ROLLOUTS)
    for one in rows:
        t = one.totals
        words = (one.id, one.status, number(one.reward) or None, one.mode, one.group, t.calls, t.errors or None)
        used = (display.sums(t) if t.calls else None, display.cost(t) or None, display.tool_calls(one) or None)
        made.add_row(*map(cell, (*words, *used, age(one.created_ns, now_ns), _task(one))))
    return made


def _nothing(what: str, filter: str) -> str:
    if filter:
        return f"No {what} matches {filter!r}."
    return f"The tape has no {what}s yet: an agent makes them whose base URL is the gateway's (see docs/quickstart.md)."


def _more(cursor: str | None, scanned: int) -> str:
    return "" if cursor is None else f"\n{scanned:,} were looked at and there are more: cursor={cursor!r} goes on."


class ListSpansArguments(ToolArguments):
    rollout: Id | None = None
    """Of this rollout, in order; of all rollouts, newest first, if not given."""
    filter: Filter = ""
    """Terms, such as `kind:llm status:failed latency>5s`."""
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    """Spans in one answer."""
    cursor: Cursor = None
    """`next` of the answer before, to go on."""


class SpanRow(ToolAnswer):
    """A span in a list."""

    rollout: str
    attempt: str
    sequence: int
    kind: str
    name: str | None
    status: str
    error: str | None
    model: str | None
    agent: str | None
    started: str | None
    milliseconds: float | None
    input_tokens: int | None
    output_tokens: int | None
    cost: float | None
    """US dollars; none without a price or a count."""
    tool_calls: int
    versions: dict[str, str] | None
    """Versions of prompts and models that served it."""
    says: str | None
    """Of a reward or an event what it says, shortened."""


class SpanRows(ToolAnswer):
    """A page of spans: of one rollout in order, of all newest first."""

    spans: list[SpanRow]
    next: str | None = None
    """Pass it as `cursor` to go on; none at the end."""


async def list_spans(context: ToolContext, asked: ListSpansArguments) -> ToolResult:
    """Read pages of spans until `limit` rows match, of one rollout or of all."""
    path = "/api/spans" if asked.rollout is None else f"/api/rollouts/{asked.rollout}/spans"
    found = await read_rows(context.client, path, SpanPage, lambda page: page.spans, asked)
    answer = SpanRows(spans=[_span_row(one) for one in found.rows], next=found.next)
    lines = [f"{clean(one.rollout)}/{clean(one.attempt)} {line(one)}" for one in found.rows]
    shown = "\n".join(lines) if lines else _nothing("span", asked.filter)
    return ToolResult(answer, shown + _more(found.next, found.scanned))


def line(span: Span) -> str:
    """A span as one line."""
    return clean(cut(display.span_line(span).plain, LINE))


def _short(text: str | None) -> str | None:
    return None if text is None else clean(cut(text, BRIEF))


def _span_row(one: Span) -> SpanRow:
    used = one.usage
    return SpanRow(
        rollout=one.rollout,
        attempt=one.attempt,
        sequence=one.sequence,
        kind=one.kind,
        name=_short(one.name),
        status=one.status,
        error=_short(one.error),
        model=_short(one.model),
        agent=_short(one.agent),
        started=moment(one.start_ns),
        milliseconds=None if one.duration_ns is None else round(one.duration_ns / 1e6, 1),
        input_tokens=used.input_tokens if used else None,
        output_tokens=used.output_tokens if used else None,
        cost=one.cost,
        tool_calls=one.tool_calls,
        versions=one.versions,
        says=None if one.kind in CALLS else clean(abbreviate(content(one), BRIEF)),
    )


TOOLS = (
    ToolDefinition(
        "list_rollouts",
        "List or search rollouts",
        "List rollouts (one task given to one agent), newest first, or search them with a filter. Begin here: find "
        f"what went badly, then read it with read_transcript.\n\n{FILTERS}\n\n{FIELDS}\n\n"
        "At most `limit` rows; `next` goes on.",
        ListRolloutsArguments,
        RolloutRows,
        list_rollouts,
    ),
    ToolDefinition(
        "list_spans",
        "List or search spans",
        "List spans: model calls (kind:llm), tool calls (kind:tool), other requests to servers of tools (kind:mcp), "
        "rewards (kind:reward), events (kind:event). Of one rollout in order, or of all rollouts, newest first. "
        "Filters are those of list_rollouts, about spans: `status:failed error:http_429`, `kind:reward source:judge`, "
        '`latency>10s model:gpt*`, `text~"cannot help"`. Read one with read_call. '
        "At most `limit` rows; `next` goes on.",
        ListSpansArguments,
        SpanRows,
        list_spans,
    ),
)
