"""The tape for a terminal: nouns in, rich renderables out. Pure: no console, no clock, no network.

Strangers (models, web pages, tools) wrote the texts on the tape. Control characters in them are made visible, so that
none can control the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from penstock.console.views.noun import LimitedSelection, NounRows, NounView, limited
from penstock.console.views.table import (
    Column,
    Listing,
    abbreviate,
    age,
    ago,
    clean,
    compact,
    duration,
    figure,
    joined,
    moment,
    money,
    number,
    plain,
    size,
    tally,
)
from penstock.gateway.model.answers import Change, RewardStats, ServerState, Stats
from penstock.gateway.model.base import CALLS
from penstock.gateway.model.facts import (
    AGENT_ID,
    COMPACTED,
    COMPACTION,
    HOSTED_EVENT,
    HOSTED_SESSION,
    TRIES,
    UNREAD,
    own_attribute,
    version_labels,
)
from penstock.gateway.model.rollout import Reward, RolloutSummary, Totals
from penstock.gateway.model.span import UNITS, Span, SpanStatus, Usage
from penstock.gateway.model.state import Hit, SearchRow
from penstock.gateway.model.toml import pluralized
from penstock.gateway.model.tools import ToolStats, ToolUse

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

# The few most telling attributes of an agent's span, as short texts. Pure.
#
# Instrumentations write dozens: ids of threads, versions, whole requests as JSON. A line has room for four. The
# attributes of the tables come first, then those that the agent's author has set; never JSON, and nothing that is
# part of the span's name.

MOST, LONGEST = 4, 60
"""Attributes of a span, and characters of one."""
NAMED = {
    "gen_ai.agent.name": "agent",
    "gen_ai.tool.name": "tool",
    "tool.name": "tool",
    "gen_ai.request.model": "model",
    "llm.model_name": "model",
    "gen_ai.tool.call.arguments": "arguments",
    "gen_ai.tool.call.result": "result",
    "url.full": "url",
    "http.url": "url",
    "http.route": "route",
    "http.response.status_code": "http",
    "http.status_code": "http",
    "db.query.text": "query",
    "db.statement": "query",
    "input.value": "input",
    "output.value": "output",
}
"""Labels of the attributes that are shown first, in this order; of several attributes with one label only the first is
shown."""
TOKENS = (
    ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
    ("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"),
    ("llm.token_count.prompt", "llm.token_count.completion"),
)
FURNITURE = (
    *("otel.", "span.kind", "openinference.", "telemetry.", "service.", "process.", "thread.", "host.", "os.", "code."),
    *("gen_ai.", "llm.", "openai.", "input.", "output.", "metadata", "session.", "user_agent.", "penstock."),
    *("http.", "url.", "server.", "client.", "network.", "net.", "db.", "agentlightning.", "langfuse.", "error.type"),
)
"""Prefixes of the names of attributes that tell little, or that the tables above contain."""


def facts(span: Span) -> list[str]:
    """The attributes as texts such as `model gpt-5`, `120 → 7 tokens`, `city Bern`; the reason of a failure comes
    last."""
    attributes = span.attributes or {}
    found = dict.fromkeys((*_named(attributes, span.name or ""), *_tokens(attributes), *_others(attributes)))
    why = _short(attributes.get("otel.status_description"))
    return list(found)[:MOST] + ([why] if why else [])


def _named(attributes: Mapping[str, Any], name: str) -> Iterator[str]:
    seen: set[str] = set()
    for key, label in NAMED.items():
        value = _short(attributes.get(key))
        if value and label not in seen:
            seen.add(label)
            if value not in name:
                yield f"{label} {value}"


def _tokens(attributes: Mapping[str, Any]) -> Iterator[str]:
    for pair in TOKENS:
        if any(name in attributes for name in pair):
            given, made = (_short(attributes.get(name)) or "?" for name in pair)
            yield f"{given} → {made} tokens"
            return


def _others(attributes: Mapping[str, Any]) -> Iterator[str]:
    for key, value in attributes.items():
        if not key.startswith(FURNITURE) and (text := _short(value)):
            yield f"{key} {text}"


def _short(value: Any) -> str:
    """A value on one line, cut to `LONGEST`; empty for lists, maps and JSON."""
    if not isinstance(value, str | int | float):
        return ""
    text = " ".join(str(value).lower().split() if isinstance(value, bool) else str(value).split())
    if text[:1] in ("{", "["):
        return ""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1].rstrip()}…"


NO_ROLLOUTS = (
    "The tape has no rollouts yet: `penstock enqueue` makes them of tasks, and any agent does whose base URL is the "
    "gateway's, with /v1 behind it where its SDK wants that."
)
STYLES = {
    "ok": "green", "succeeded": "green", "error": "red", "failed": "red", "timeout": "red", "interrupted": "magenta",
    "unresponsive": "magenta", "environment": "magenta", "cancelled": "yellow", "open": "cyan", "running": "cyan",
    "preparing": "cyan", "queuing": "blue", "requeuing": "blue", "system": "blue", "developer": "blue", "user": "bold",
    "assistant": "bold green", "tool": "yellow",
}  # fmt: skip
BRIEF = 240
"""Maximum number of characters of a text that is shown briefly."""
PRINTED = ("stdout", "stderr")
"""Names of events that are pieces of an agent's output."""
ID_END = 6
"""Characters at the end of a sub-agent's id by which people tell it from others: ids may begin with the time."""
LOGGED = "otel.body"
"""The attribute that contains the line of a log, in an event made of one."""


# --- figures ---


def sums(t: Totals) -> str:
    """Tokens in and out: `1,200 → 80`, or `≥1,200 → ≥80` where the tokens of some calls were not counted."""
    least = "≥" if t.uncounted else ""
    return " → ".join("?" if n is None else f"{least}{n:,}" for n in (t.input_tokens, t.output_tokens))


def cost(t: Totals) -> str:
    """The cost of calls: `$0.12`, `≥$0.12` where that of some is unknown, `?` where that of all is; empty where nothing
    was used that costs."""
    unknown = t.unpriced or t.uncounted
    return (f"≥{money(t.cost)}" if unknown else money(t.cost)) if t.cost is not None else "?" if unknown else ""


def tool_calls(r: RolloutSummary) -> int:
    """Tool calls: those that models asked for, or those that ran on servers behind the gateway, if these are more."""
    return max(r.totals.tool_calls, r.tool_runs)


def unpriced(rows: Iterable[Totals]) -> Iterator[Text]:
    """A line that says how many calls have no price, if any."""
    if calls := sum(row.unpriced for row in rows):
        yield Text(f"In no cost: {pluralized(calls, 'call')} of models without a price (penstock prices).")


def total_cost(t: Totals) -> str:
    """The cost of calls with the number of those that have none, such as `≥$0.12 (3 calls without a price)`."""
    known = cost(t)
    missing = f" ({pluralized(t.unpriced, 'call')} without a price)" if t.unpriced else ""
    return f"cost unknown{missing}" if known == "?" else f"{known}{missing}"


# --- tables ---


SPANS = (
    Column("attempt"), figure("#"), Column("started (UTC)", 3), Column("what", 8),
    Column("model", narrows="cut", least=16), Column("status"), figure("http", 4), figure("latency", 7),
    figure("first byte", 1), figure("tokens", 6), figure("cost", 5), figure("tool calls", 2),
    Column("finish", narrows="cut", least=32),
)  # fmt: skip
RECENT = (
    Column("call"), figure("ago", 4), Column("what", 1), Column("model", 3, narrows="cut", least=16), Column("status"),
    figure("http", 2), figure("latency", 7), figure("tokens", 6), figure("cost", 5), Column("error", optional=True),
)  # fmt: skip
SUMS = (
    Column("model"), figure("calls"), figure("errors", 5), figure("cancelled", 2), figure("tokens", 7),
    figure("cost", 6), figure("tool calls", 1), figure("median", 3), figure("p95", 4),
)  # fmt: skip
USED = (
    Column("tool", narrows="cut", least=12), Column("server", 2), figure("calls"), figure("errors", 6),
    figure("cancelled", 1), figure("median", 3), figure("p95", 4), figure("in failed rollouts", 8),
    figure("in others", 7),
)  # fmt: skip
TOOLS = (
    figure("#"), Column("tool", narrows="cut", least=12), Column("server", 2), Column("status", 3), figure("took", 4),
    Column("asked by"), Column("rule", 5, optional=True), Column("known", 1),
    Column("why", narrows="cut", least=24),
)  # fmt: skip


def _stands(r: RolloutSummary) -> Text:
    """The status, with a note if the rollout is ambiguous."""
    return joined(status(r.status), Text("ambiguous", style="yellow") if r.totals.ambiguous else "")


def _attempts(r: RolloutSummary) -> str:
    return f"{r.tries}/{r.config.max_attempts}" if r.origin == "queued" else f"{len(r.attempts)}"


def _last_call(r: RolloutSummary, now_ns: int) -> str:
    return ago(r.last_seen_ns, now_ns) if r.totals.calls or r.tool_runs else ""


class RolloutSelection(LimitedSelection):
    """The options of the list of rollouts."""

    filter: str = ""
    """Terms such as status:waiting group:q1 reward>0.5 model:qwen*. Those about calls (model, latency ...) must all
    hold for one call of the rollout."""


async def _fetch(client: Client, selection: RolloutSelection) -> NounRows[RolloutSummary]:
    terms = selection.filter
    none = "No rollout matches." if terms else NO_ROLLOUTS
    return await limited(selection.limit, lambda most: client.rollouts(terms, most), none)


ROLLOUTS = NounView[RolloutSelection, RolloutSummary](
    "rollouts",
    RolloutSummary,
    _fetch,
    selection=RolloutSelection,
    key=lambda one: one.id,
    columns={
        Column("rollout"): lambda one, _: plain(one.id),
        Column("group", 8, optional=True): lambda one, _: plain(one.group),
        Column("mode", 2): lambda one, _: one.mode,
        Column("status"): lambda one, _: _stands(one),
        figure("attempts", 4): lambda one, _: _attempts(one),
        figure("reward", 11): lambda one, _: number(one.reward),
        figure("model calls", 10): lambda one, _: plain(one.totals.calls or ""),
        figure("errors", 7): lambda one, _: plain(one.totals.errors or ""),
        figure("tokens", 5): lambda one, _: sums(one.totals) if one.totals.calls or one.totals.told else "",
        figure("cost", 9): lambda one, _: cost(one.totals),
        figure("tool calls", 1): lambda one, _: plain(tool_calls(one) or ""),
        figure("age", 6): lambda one, now_ns: age(one.created_ns, now_ns),
        Column("last call", 3): _last_call,
    },
    concerns=frozenset({"rollouts"}),
)


def spans(rows: Iterable[Span]) -> Listing:
    """A line for each span. A span that is no call has its name in the column of models, and its content in the last
    one."""
    made = Listing(*SPANS)
    for s in rows:
        end = plain(s.error, "red") if s.error else plain(s.finish if s.kind in CALLS else content(s))
        times = (length(s), duration(s.first_byte_ns), tokens(s), call_cost(s), s.tool_calls or "")
        head = (plain(s.attempt), plain(s.sequence), moment(s.start_ns)[5:], _what(s), plain(s.model or s.name))
        end = Text(", ").join(filter(None, (end, missing_part(s))))
        made.add_row(*head, status(s.status), plain(s.http_status), *map(plain, times), end)
    return made


def recent(rows: Iterable[Span], now_ns: int) -> Listing:
    """A line for each call of several rollouts, with the name that `penstock show` takes."""
    made = Listing(*RECENT)
    for s in rows:
        facts = (plain(s.http_status), length(s), tokens(s), call_cost(s), error_text(s))
        place = plain(f"{s.rollout}/{s.attempt}#{s.sequence}")
        made.add_row(place, age(s.start_ns, now_ns), _what(s), plain(s.model or s.name), status(s.status), *facts)
    return made


def tools(rows: Iterable[ToolUse]) -> Listing:
    """A line for each tool that was run."""
    made = Listing(*TOOLS)
    for use in rows:
        asked = f"{use.asked_in or ''}#{use.asked_by}" if use.asked_by else _may_have_asked(use)
        took = duration(None if use.end_ns is None else use.end_ns - use.start_ns)
        took = took if use.span is not None or not took else f"≤ {took}"
        took = took if use.measured_ns is None else f"{duration(use.measured_ns)} by the agent"
        where = plain(use.server or "inside the agent")
        span = plain(f"{use.run_in or ''}#{use.span}" if use.span else "")
        known = map(plain, (asked, use.rule, use.grade, use.reason))
        made.add_row(span, plain(use.tool), where, status(use.status), took, *known)
    return made


def _may_have_asked(use: ToolUse) -> str:
    return ", ".join(f"{one}?" for one in (*(f"#{one}" for one in use.candidates), *use.elsewhere))


def stats(figures: Stats) -> Group:
    """The sums, model by model, the rewards, and the tape."""
    whole = "all spans" if figures.complete else f"the newest {figures.counted_spans:,} spans"
    ended = ", ".join(f"{count:,} {status}" for status, count in sorted(figures.by_status.items()))
    sums = Listing(*SUMS)
    for name, m in figures.by_model.items():
        sums.add_row(plain(name), *_sums(m), duration(m.median_ns), duration(m.p95_ns))
    sums.add_row(Text("all", style="bold"), *_sums(figures.totals), "", "")
    tape = ", ".join(f"{clean(k)} {size(n) if k.endswith('bytes') else f'{n:,}'}" for k, n in figures.tape.items())
    lines = [f"Sums over {whole}. Calls of models and tools: {ended or 'none'}.", f"Tape: {tape}."]
    gaps = [Text(f"{pluralized(figures.gaps, 'call')} could not be recorded.", style="red")] if figures.gaps else []
    what = f"Not in these sums: {pluralized(figures.told, 'call')} that only telemetry tells of, among the newest spans"
    untold = [Text(f"{what}. `penstock rollouts` has their tokens.")] if figures.told else []
    tools_used = [tool_figures(figures.by_tool)] if figures.by_tool else []
    told = servers(figures.servers)
    return Group(
        Text(lines[0]),
        sums,
        *unpriced([figures.totals]),
        *untold,
        *tools_used,
        *_rewards(figures.rewards),
        Text(lines[1]),
        *gaps,
        *told,
    )


def servers(servers: Mapping[str, ServerState]) -> Iterator[Text]:
    """A line for each server that requests do not reach at once, and why."""
    for name, server in sorted(servers.items()):
        if server.breaker != "closed":
            doing = "is left alone" if server.breaker == "open" else "is tried by one request"
            yield Text(f"Server {clean(name)} {doing}, because it has failed (its breaker is open).", style="red")
        if server.waiting:
            yield Text(f"{server.waiting:,} requests wait for server {clean(name)} (max_concurrent).")


def tool_figures(tools: Sequence[ToolStats]) -> Listing:
    """A line for each tool. The last two columns give the share of failed rollouts in which it was run, and that of
    other rollouts: a tool that is in many of the former and few of the latter is worth a look."""
    made = Listing(*USED)
    for it in tools:
        shares = ("" if share is None else f"{share:.0%}" for share in (it.share_of_failed, it.share_of_others))
        counts = (f"{it.calls:,}", f"{it.errors:,}", f"{it.cancelled:,}")
        made.add_row(plain(it.tool), plain(it.server), *counts, duration(it.median_ns), duration(it.p95_ns), *shares)
    return made


def _rewards(given: RewardStats) -> Iterator[Text]:
    if given.count:
        sources = ", ".join(f"{count:,} {source}" for source, count in sorted(given.by_source.items()))
        mean = f", mean {number(given.mean)}" if given.mean is not None else ""
        untrusted = f", {given.untrusted:,} untrusted" if given.untrusted else ""
        yield Text(f"Rewards: {sources}{mean}{untrusted}.")


def _sums(t: Totals) -> Iterator[str]:
    yield from (f"{t.calls:,}", f"{t.errors:,}", f"{t.cancelled:,}", sums(t), cost(t), f"{t.tool_calls:,}")


def change(entry: Change) -> Text:
    """A line of the change feed."""
    line = Text().append(f"{entry.cursor:>6} ", "dim")
    if entry.span is not None:
        s = entry.span
        return line.append_text(joined(f"{clean(s.rollout)}/{clean(s.attempt)}", span_line(s)))
    noun = entry.rollout or entry.attempt
    name = f"{entry.attempt.rollout}/{entry.attempt.id}" if entry.attempt else noun.id if noun else entry.name or ""
    return line.append_text(joined(clean(name), entry.kind, status(noun.status) if noun else ""))


# --- lines ---


def span_line(span: Span) -> Text:
    """A span on one line; a call without a model is shown by its path, a span that is no call by its name."""
    return joined(*span_facts(span))


def span_facts(span: Span, brief: bool = True) -> tuple[str | Text, ...]:
    """The pieces of the line of a span. `brief`: the beginning of its texts is on the line."""
    if span.kind not in CALLS:
        failed = status(span.status) if span.status == SpanStatus.ERROR else ""
        return (*label(span), failed, clean(content(span, brief)), length(span))
    first = f"first byte {duration(span.first_byte_ns)}" if span.first_byte_ns is not None else ""
    charged = "no price" if span.unpriced else money(span.cost)
    used = units(span) or (f"{counted} tokens" if (counted := tokens(span)) else "")
    facts = (duration(span.duration_ns), first, used, charged)
    asked = pluralized(span.tool_calls, "tool call") if span.tool_calls else ""
    again = Text(f"retry of #{span.retry_of}", style="dim") if span.retry_of is not None else ""
    ended = status(span.status), span.error or "", Text(compaction(span), style="yellow"), again, missing_part(span)
    return (*label(span), *ended, *facts, asked, _tried(span))


def compaction(span: Span) -> str:
    """The compaction of the conversation that a call asks for, or comes after; empty without one."""
    asked, after = own_attribute(span, COMPACTION), own_attribute(span, COMPACTED)
    return clean(f"compaction ({asked})" if asked else f"after a compaction ({after})" if after else "")


def missing_part(span: Span) -> Text:
    """The part of an ended call that is missing on the tape, or was not read; empty where nothing is missing."""
    if span.kind not in CALLS or span.status in (SpanStatus.OPEN, SpanStatus.INTERRUPTED):
        return Text()
    if span.body is None and span.request_bytes + span.response_bytes:
        return Text("not recorded", style="red")
    unread = "not all read" if UNREAD in (span.attributes or {}) else ""
    return Text("recorded in part" if span.truncated else unread, style="yellow")


def error_text(span: Span) -> Text:
    """A span's error, and the part of it that is missing on the tape."""
    return Text(", ").join(filter(None, (plain(span.error, "red"), missing_part(span))))


def _tried(span: Span) -> str:
    """The upstream that served a call, if others failed to serve it before."""
    tries = (span.attributes or {}).get(TRIES, [])
    before = ", ".join(f"{one['upstream']} ({one['why']})" for one in tries)
    return clean(f"by {span.upstream} after {before}") if before else ""


def label(span: Span) -> tuple[str, ...]:
    """The texts that identify a span: number, kind, agent, and model or name."""
    if span.kind not in CALLS:
        return f"#{span.sequence}", _what(span), clean(span.name) if span.name not in (None, _what(span)) else ""
    name = span.model or span.name or f"{span.method} {span.path}"
    return f"#{span.sequence}", _what(span), _agent(span), clean(name)


def _agent(span: Span) -> str:
    """The name of the agent that made a call, with the end of its id if it is a sub-agent: there may be several."""
    agent_id: str | None = own_attribute(span, AGENT_ID)
    return clean(f"{span.agent or ''} …{agent_id[-ID_END:]}" if agent_id else span.agent or "")


def content(span: Span, brief: bool = True) -> str:
    """The content of a span that is no call: value and reason of a reward, a few attributes of an agent's span or
    event. `brief`: with the beginning of its texts."""
    if span.kind == "reward":
        return "  ".join(filter(None, _reward(Reward.of(span), brief)))
    if not brief:
        return ""
    if span.kind == "otel":
        return "  ".join(facts(span))
    attributes = span.attributes or {}
    if isinstance(text := attributes.get("text" if span.name in PRINTED else LOGGED), str):
        return abbreviate(text, BRIEF)
    # Attributes with the origin of a log record, or of a session's event, are left out: every one has them.
    own = {
        name: value
        for name, value in attributes.items()
        if not name.startswith("otel.") and name not in (HOSTED_SESSION, HOSTED_EVENT)
    }
    said = list(own.values())
    return abbreviate(said[0] if len(said) == 1 and isinstance(said[0], str) else compact(own or None), BRIEF)


def texts(span: Span) -> dict[str, str]:
    """The whole texts of a span that is no call, by name; empty where its line has all of them."""
    found = {name: one if isinstance(one, str) else compact(one) for name, one in (span.attributes or {}).items()}
    if span.kind == "reward":
        found = {"reason": Reward.of(span).reason or ""}
    line = content(span)
    return {} if all(text in line for text in found.values()) else found


def _reward(given: Reward, brief: bool) -> Iterator[str]:
    yield number(given.value)
    yield from (f"{name} {number(value)}" for name, value in given.dimensions.items())
    yield f"by {given.source}"
    yield f"of #{given.span}" if given.span else ""
    yield "" if given.trusted else "untrusted"
    yield "late" if given.late else ""
    yield abbreviate(given.reason or "", BRIEF) if brief else ""


def length(span: Span) -> str:
    """The duration of a span; empty for one without a duration, such as a reward or an event."""
    return duration(span.duration_ns) if span.kind in CALLS or span.duration_ns else ""


def _what(span: Span) -> str:
    return span.dialect if span.kind == "llm" else span.kind


def tokens(span: Span) -> str:
    """Tokens in and out as counted; ~80 is an estimate, ? is unknown. Empty for a span that uses no tokens. Of calls
    with media without tokens their units."""
    if used := units(span):
        return used
    if span.estimate is None:
        known = span.usage or (Usage() if _uncounted(span) else None)
        return "" if known is None else " → ".join(map(tally, (known.input_tokens, known.output_tokens)))
    known, guess = span.usage or Usage(), span.estimate
    pairs = ((known.input_tokens, guess.input_tokens), (known.output_tokens, guess.output_tokens))
    return " → ".join(f"~{about:,}" if count is None and about is not None else tally(count) for count, about in pairs)


def units(span: Span) -> str:
    """The use of a call with media that has no tokens, such as `2.5 seconds`; empty for others."""
    usage = span.usage or Usage()
    if usage.billed is None or usage.input_tokens is not None or usage.output_tokens is not None:
        return ""
    found = {name: usage.billed[name] for name in UNITS if name in usage.billed}
    return ", ".join(f"{it:,g} {name if it != 1 else UNITS[name]}" for name, it in found.items())


def call_cost(span: Span) -> str:
    """The cost of a call; `?` where its model has no price or its tokens were not counted."""
    return "?" if span.unpriced or (span.cost is None and _uncounted(span)) else money(span.cost)


def _uncounted(span: Span) -> bool:
    # Imported here: most commands show no calls, and need no wire formats.
    from penstock.gateway.wire.dialects import by_name
    from penstock.gateway.wire.dialects.tokens import lacks_token_counts

    return lacks_token_counts(span, by_name(span.dialect))


def summary_facts(r: RolloutSummary) -> tuple[str | Text, ...]:
    """A rollout at first glance: status, calls, tokens, cost, time from its first attempt to its last sign of life,
    reward."""
    t, first = r.totals, next(iter(r.attempts), None)
    took = 0 if first is None else r.last_seen_ns - first.created_ns
    return (
        status(r.status),
        pluralized(t.calls, "model call"),
        Text(pluralized(t.errors, "error"), style="red") if t.errors else "",
        pluralized(tool_calls(r), "tool call") if tool_calls(r) else "",
        *((f"{sums(t)} tokens", total_cost(t)) if t.calls or t.told else ()),
        *((f"{pluralized(t.told, 'call')} told by telemetry alone",) if t.told else ()),
        duration(took) if took > 0 else "",
        "no reward" if r.reward is None else f"reward {number(r.reward)}",
        gaps(t),
    )


def served_versions(spans: Iterable[Span]) -> str:
    """The versions of resources that served the calls, and the arms: `planner@v2 (candidate of planner-1)`; empty where
    no resource was used. Several versions of one resource are all named."""
    served: dict[str, None] = {}
    for span in spans:
        arms = (arm.partition(":") for arm in (span.arm or "").split(",") if arm)
        among = ", ".join(f"{arm} of {release}" for release, _, arm in arms)
        if span.versions:
            served[", ".join(version_labels(span.versions)) + (f" ({among})" if among else "")] = None
    return ", ".join(served)


def gaps(t: Totals) -> str:
    """Missing or uncertain calls of the sums; empty when there are none."""
    missing = f"{t.gaps:,} not recorded" if t.gaps else ""
    return "  ".join(filter(None, (missing, f"{t.ambiguous:,} ambiguous" if t.ambiguous else "")))


def status(word: str) -> Text:
    """A status word in its colour."""
    return Text(word, style=style(word))


def style(word: str) -> str:
    """The colour of a status or a role; empty for others."""
    return STYLES.get(word, "")


# The results of a search, for a terminal.

BEFORE = 32
"""Maximum number of characters before a hit that are shown: the hit must be visible on a narrow terminal."""
MATCH = "bold reverse"


def findings(found: Iterable[SearchRow], now_ns: int) -> Group:
    """A line for each span, and one for each passage of it."""
    return Group(*(line for finding in found for line in _finding(finding, now_ns)))


def _finding(finding: SearchRow, now_ns: int) -> Iterator[Text]:
    span = finding.span
    about = [it for it in (span.kind, span.name, span.agent, span.model) if it]
    line = Text(f"{span.rollout}/{span.attempt}#{span.sequence}", style="bold", no_wrap=True, overflow="ellipsis")
    yield line.append(f"  {ago(span.start_ns, now_ns)}  {clean(' '.join(about))}", style="not bold dim")
    for hit in finding.hits:
        yield passage(hit)
    if finding.more:
        yield Text(f"  {finding.more:,} more in this call", style="dim")


def passage(hit: Hit) -> Text:
    """A passage on one line: who says it, and the text within what stands around it."""
    line = Text("  ", no_wrap=True, overflow="ellipsis")
    who = " ".join(filter(None, (hit.role, _KINDS.get(hit.part, hit.part))))
    line.append(f"{' '.join(clean(who).split())}: ", style="dim")
    before, match, after = (" ".join(clean(it).split()) for it in (hit.before, hit.match, hit.after))
    if hit.before[-1:].isspace():
        before += " "
    if len(before) > BEFORE:
        before = f"…{before[-BEFORE:]}"
    line.append(before).append(match, style=MATCH)
    line.append(f" {after}" if hit.after[:1].isspace() else after)
    return line.append(f"  ({hit.times} times)", style="dim") if hit.times > 1 else line


_KINDS = {"text": "", "tool_call": "calls", "tool_call_response": "result"}
"""Words for the types of parts; other types are shown as they are."""
