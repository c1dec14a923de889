"""The tape for a terminal: nouns in, rich renderables out. Pure: no console, no clock, no network.

Whatever stands on the tape was written by strangers (models, web pages, tools): control characters in it are made
visible, so that none of it can speak to the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gateway.model import Change, RolloutSummary, Span, Totals
from gateway.views import Stats

STYLES = {
    "ok": "green", "succeeded": "green", "error": "red", "failed": "red", "timeout": "red", "interrupted": "magenta",
    "unresponsive": "magenta", "cancelled": "yellow", "open": "cyan", "running": "cyan", "system": "blue",
    "developer": "blue", "user": "bold", "assistant": "bold green", "tool": "yellow",
}  # fmt: skip
YIELDING = ("rollout", "attempt", "model", "finish")
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F)
_VISIBLE = (
    {n: chr(0x2400 + n) for n in range(32) if n not in (9, 10)}
    | {0x7F: "␡"}
    | dict.fromkeys((*range(0x80, 0xA0), *_DIRECTIONS), "\ufffd")
)


def clean(value: object) -> str:
    """Text without anything that a terminal obeys."""
    return str(value).translate(_VISIBLE)


def plain(value: object, style: str = "") -> Text:
    """One value as a cell; None is empty."""
    return Text("" if value is None else clean(value), style=style)


# --- figures ---


def duration(ns: int | None) -> str:
    """12 µs, 3.4 ms, 1.25 s, 2 m 05 s, 3 h 07 m."""
    if ns is None:
        return ""
    if ns < 60 * 10**9:
        whole, unit = next((step for step in ((10**9, "s"), (10**6, "ms"), (10**3, "µs")) if ns >= step[0]), (1, "ns"))
        value = ns / whole
        return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    minutes, seconds = divmod(ns // 10**9, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} m" if hours else f"{minutes} m {seconds:02} s"


def size(count: int) -> str:
    """1.5 MiB."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"


def moment(ns: int) -> str:
    """A time of day in UTC, to the millisecond."""
    return f"{datetime.fromtimestamp(ns // 10**9, UTC):%Y-%m-%d %H:%M:%S}.{ns // 10**6 % 1000:03}"


def ago(ns: int, now_ns: int) -> str:
    """How long ago, in one unit."""
    seconds = max(0, now_ns - ns) // 10**9
    steps = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
    return next((f"{seconds // step} {unit} ago" for step, unit in steps if seconds >= step), "now")


def tokens(given: int | None, made: int | None) -> str:
    """1,200 → 80."""
    return "" if given is None and made is None else f"{_count(given)} → {_count(made)}"


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


# --- tables ---


def _table(*columns: str) -> Table:
    """A plain table; a column whose name begins with > is aligned right. Names give way when there is little room."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        side = "right" if column[0] == ">" else "left"
        table.add_column(column.lstrip(">"), justify=side, overflow="fold", no_wrap=column not in YIELDING)
    return table


def rollouts(rows: Iterable[RolloutSummary], now_ns: int) -> Table:
    """A line for each rollout."""
    table = _table("rollout", "mode", "status", ">attempts", ">calls", ">errors", ">tokens", ">tools", "last call")
    for r in rows:
        t = r.totals
        figures = (
            len(r.attempts),
            t.calls,
            t.errors or "",
            tokens(t.input_tokens, t.output_tokens),
            t.tool_calls or "",
        )
        table.add_row(plain(r.id), r.mode, status(r.status), *map(plain, figures), ago(r.last_seen_ns, now_ns))
    return table


def spans(rows: Iterable[Span]) -> Table:
    """A line for each span."""
    table = _table("attempt", ">#", "started (UTC)", "dialect", "model", "status", ">http", ">latency", ">first byte",
                   ">tokens", ">tools", "finish")  # fmt: skip
    for s in rows:
        end = plain(s.error, "red") if s.error else plain(s.finish)
        times = (duration(s.duration_ns), duration(s.first_byte_ns), _tokens(s), s.tool_calls or "")
        head = (plain(s.attempt), plain(s.sequence), moment(s.start_ns)[5:], s.dialect, plain(s.model))
        table.add_row(*head, status(s.status), plain(s.http_status), *map(plain, times), end)
    return table


def stats(figures: Stats) -> Group:
    """The sums, model by model, and the tape."""
    whole = "all spans" if figures.complete else f"the newest {figures.counted_spans:,} spans"
    ended = ", ".join(f"{count:,} {status}" for status, count in sorted(figures.by_status.items()))
    table = _table("model", ">calls", ">errors", ">cancelled", ">tokens", ">tools", ">median", ">p95")
    for name, m in figures.by_model.items():
        table.add_row(plain(name), *_sums(m), duration(m.median_ns), duration(m.p95_ns))
    table.add_row(Text("all", style="bold"), *_sums(figures.totals), "", "")
    tape = ", ".join(f"{clean(k)} {size(n) if k.endswith('bytes') else f'{n:,}'}" for k, n in figures.tape.items())
    lines = [f"Sums over {whole}: {ended or 'none'}.", f"Tape: {tape}."]
    gaps = [Text(f"{figures.gaps:,} calls could not be recorded.", style="red")] if figures.gaps else []
    return Group(Text(lines[0]), table, Text(lines[1]), *gaps)


def _sums(t: Totals) -> Iterator[str]:
    yield from (f"{t.calls:,}", f"{t.errors:,}", f"{t.cancelled:,}", tokens(t.input_tokens, t.output_tokens))
    yield f"{t.tool_calls:,}"


def change(entry: Change) -> Text:
    """One line of the change feed."""
    line = Text(f"{entry.cursor:>6} ", style="dim")
    if entry.span is not None:
        s = entry.span
        return line.append_text(joined(f"{clean(s.rollout)}/{clean(s.attempt)}", span_line(s)))
    noun = entry.rollout or entry.attempt
    name = f"{entry.attempt.rollout}/{entry.attempt.id}" if entry.attempt else noun.id if noun else ""
    return line.append_text(joined(clean(name), entry.kind, status(noun.status) if noun else ""))


# --- lines ---


def span_line(span: Span) -> Text:
    """A span on one line; one without a model is known by its path."""
    first = f"first byte {duration(span.first_byte_ns)}" if span.first_byte_ns is not None else ""
    facts = (duration(span.duration_ns), first, f"{_tokens(span)} tokens" if span.usage else "")
    asked = counted(span.tool_calls, "tool call") if span.tool_calls else ""
    what = span.dialect if span.kind == "llm" else span.kind
    name = (f"#{span.sequence}", what, span.agent or "", span.model or f"{span.method} {span.path}")
    return joined(*map(clean, name), status(span.status), span.error or "", *facts, asked)


def joined(*pieces: str | Text) -> Text:
    """Pieces on a line; empty ones leave no gap."""
    texts = (plain(piece) if isinstance(piece, str) else piece for piece in pieces)
    return Text("  ").join(text for text in texts if text)


def _tokens(span: Span) -> str:
    return tokens(span.usage.input_tokens, span.usage.output_tokens) if span.usage else ""


def total_tokens(t: Totals) -> str:
    """Tokens in and out, with the unit."""
    return f"{tokens(t.input_tokens, t.output_tokens)} tokens"


def counted(number: int, noun: str) -> str:
    """1 call, 2 calls."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def gaps(t: Totals) -> str:
    """What is missing; empty when nothing is."""
    return f"{t.gaps:,} not recorded" if t.gaps else ""


def status(word: str) -> Text:
    """A status in its colour."""
    return Text(word, style=style(word))


def style(word: str) -> str:
    """The colour of a status or a role."""
    return STYLES.get(word, "")


def compact(value: Any) -> str:
    """JSON on one line; None is empty."""
    return "" if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
