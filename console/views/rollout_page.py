"""A rollout as one page of HTML: when each call ran, what was said, the tools, the costs, and what differs from another
rollout. Pure.

The page is made as `console.views.pages` makes all: self-contained, without script, every foreign text escaped. It can
be sent to somebody who has no gateway, so it is kept below a megabyte: longer texts are cut, with the command that
prints them whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from penstock.console.views.pages import document, table
from penstock.console.views.rollout_tree import (
    MOST,
    ConversationPrefixes,
    RequestedToolRuns,
    StepPair,
    TranscriptStep,
    align_steps,
    attempt_line,
    differing_words,
    message_text,
    nested_spans,
)
from penstock.console.views.rollouts import cost, gaps, label, length, served_versions, span_line, sums, tools
from penstock.console.views.svg import text
from penstock.console.views.table import Listing, abbreviate, compact, duration, moment, number, size
from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.base import TOOLS
from penstock.gateway.model.rollout import Attempt, RolloutSummary, Totals
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.toml import pluralized
from penstock.gateway.model.tools import ToolUse
from penstock.gateway.model.turn import Message, Part, Turn

LARGEST: Final = 1_000_000
"""Bytes of a page."""
LIMITS: Final = (50_000, 20_000, 8_000, 3_000, 1_000, 300)
"""Characters of a text that are shown: the first of these with which the page is small enough, else the last."""
_FRAME: Final = 20_000
"""Bytes of a page that are kept for its head and its style."""
_ROOM: Final = 700_000
"""Bytes of the messages of all calls, where even the shortest texts make a page too large."""
OPEN: Final = 600
"""Characters up to which a text is shown at once, and not behind a line that opens it."""
NAME: Final = 1_000
"""Characters of the line of a call, whose model may have any name."""
GIST: Final = 100
"""Characters of an answer beside the line of its call."""
BACKGROUND: Final = frozenset({"stdout", "stderr", "exit"})
"""Events of a runner, which have no place among the bars."""
STYLE: Final = """
body { max-width: 72rem; } h1, h3 { overflow-wrap: anywhere; } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.facts { display: flex; flex-wrap: wrap; gap: .4rem 1.6rem; padding: 0; margin: .8rem 0; }
.facts div { min-width: 4rem; } .facts dt { color: var(--dim); font-size: .85rem; } .facts dd { margin: 0; }
.wide { overflow-x: auto; }
.wide td, .wide th { white-space: nowrap; } .texts td, .texts th { text-align: left; }
pre { margin: .2rem 0; overflow-wrap: anywhere; font: .87rem/1.45 ui-monospace, monospace; }
ol.fall { list-style: none; padding: 0; margin: .4rem 0; }
ol.fall li { display: grid; grid-template-columns: minmax(0, 20rem) 1fr 5.5rem; gap: 0 .8rem; align-items: center;
  padding: .12rem 0; border-bottom: 1px solid var(--rule); font-size: .9rem; }
ol.fall a { color: inherit; text-decoration: none; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
ol.fall .took { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; color: var(--dim); }
.track { position: relative; height: .8rem; background: var(--band); }
.track i { position: absolute; top: 0; bottom: 0; min-width: 2px; background: var(--c0); }
.track .llm { background: var(--c1); } .track .tool, .track .mcp { background: var(--c3); }
.track .bad { background: var(--limit); } .track .waits { opacity: .45; }
.call { border-left: 3px solid var(--rule); padding: .1rem 0 .1rem .7rem; margin: .35rem 0; }
.call > summary, p.call { color: var(--text); overflow-wrap: anywhere; } .bad { border-color: var(--limit); }
.call:target { border-color: var(--c1); } .said { margin: .5rem 0; } .who { font-weight: bold; margin: 0; }
.answer { border-left: 3px solid var(--c3); padding-left: .6rem; } .answer .who { color: var(--c3); }
.tool-call { color: var(--c1); }
.pair { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 0 1.2rem; margin: .6rem 0;
  border-top: 1px solid var(--rule); padding-top: .3rem; }
del { color: var(--limit); } ins { color: var(--c3); text-decoration: none; font-weight: bold; }
@media (max-width: 44rem) { body { padding: .8rem; } .pair { grid-template-columns: minmax(0, 1fr); }
  ol.fall li { grid-template-columns: minmax(0, 1fr) auto; } ol.fall .track { grid-column: 1 / -1; grid-row: 2; } }
"""


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """A rollout as a page shows it."""

    rollout: RolloutSummary
    details: Sequence[SpanDetail]
    """Its spans, or the first of them, in order."""
    asked: Mapping[str, RequestedToolRuns] = field(default_factory=dict[str, RequestedToolRuns])
    """The tool runs that its calls requested, by attempt."""
    tools: Sequence[ToolUse] = ()
    """The tools that it used."""


@dataclass(frozen=True, slots=True)
class ComparedRollout:
    """The rollout that a page compares with."""

    rollout: RolloutSummary
    theirs: Sequence[TranscriptStep]
    """The steps of its newest attempt."""
    ours: Sequence[TranscriptStep]
    """Those of an attempt of the rollout on the page."""


def rollout_page(record: RolloutRecord, now_ns: int, other: ComparedRollout | None = None) -> str:
    """The whole page as of `now_ns`, nanoseconds since the epoch. At most `LARGEST` bytes, unless thousands of calls,
    or of steps that differ, are on it."""
    title, body = f"{record.rollout.id}: {record.rollout.status}", list[str]()
    for limit in LIMITS:
        body, room = list[str](), LARGEST - _FRAME
        for piece in _RolloutPage(record, limit).body(now_ns, other):
            body.append(piece)
            room -= len(piece.encode())
            if room < 0 and limit != LIMITS[-1]:
                break
        if room >= 0:
            break
    return document(title, body, STYLE)


class _RolloutPage:
    def __init__(self, record: RolloutRecord, limit: int) -> None:
        """`limit`: characters of a text that are shown."""
        self._record, self._rollout, self._limit = record, record.rollout, limit
        spans = [detail.span for detail in record.details]
        self._spans = {one.id: [it for it in spans if it.attempt == one.id] for one in self._rollout.attempts}
        answered = [d.span for d in record.details if d.turn is not None and d.turn.choices and d.span.kind == "llm"]
        self._last = answered[-1] if answered else None
        self._room = _ROOM // max(1, len(spans)) if limit == LIMITS[-1] else LARGEST
        """Bytes of the messages of a call."""

    def body(self, now_ns: int, other: ComparedRollout | None) -> Iterator[str]:
        yield from self._head(now_ns)
        if other is not None:
            yield from self._comparison(other)
        for number_, attempt in enumerate(self._rollout.attempts):
            if spans := self._spans[attempt.id]:
                yield from self._attempt(number_, attempt, spans)
            elif not attempt.spans:
                yield f"<h2>{text(_spaced(attempt_line(attempt, False).plain))}</h2><p>Nothing was recorded of it.</p>"
        if not self._rollout.attempts:
            yield "<p>Nobody has tried it yet, so there are no calls.</p>"
        yield from self._models()
        if self._record.tools:
            yield "<h2>Tools</h2>" + _listing("Tools that were run, and what asked for each", tools(self._record.tools))

    # -- the top -----------------------------------------------------------------------------------------------------

    def _head(self, now_ns: int) -> Iterator[str]:
        one, t = self._rollout, self._rollout.totals
        first, last = one.attempts[0].created_ns if one.attempts else one.created_ns, one.last_seen_ns
        facts = {
            "status": str(one.status),
            "reward": number(one.reward) or "none",
            "mode": one.mode,
            "group": one.group or "",
            "served by": served_versions(detail.span for detail in self._record.details),
            "calls": pluralized(t.calls, "call"),
            "errors": f"{t.errors:,}" if t.errors else "",
            "tokens": sums(t) if t.calls or t.told else "",
            "cost": cost(t),
            "took": duration(last - first) if last > first else "",
            "started": f"{moment(first)[:19]} UTC",
            "attempts": f"{len(one.attempts):,}",
            "missing": gaps(t),
        }
        yield f"<header><h1>{text(one.id)}</h1>{_facts(facts)}"
        if one.input is not None:
            task = one.input if isinstance(one.input, str) else compact(one.input)
            yield f'<p class="who">task</p>{self._long(task, f"penstock show {one.id} --json")}'
        shown, there = len(self._record.details), sum(attempt.spans for attempt in one.attempts)
        if shown < there:
            yield f"<p>{shown:,} of {there:,} spans are shown: --calls {there} shows all.</p>"
        yield f'<p class="dim">As of {moment(now_ns)[:19]} UTC.</p></header>'

    # -- attempts ----------------------------------------------------------------------------------------------------

    def _attempt(self, place: int, attempt: Attempt, spans: Sequence[Span]) -> Iterator[str]:
        yield f"<h2>{text(_spaced(attempt_line(attempt, False).plain))}</h2>"
        asked = self._record.asked.get(attempt.id, RequestedToolRuns())
        yield "<h3>When each ran</h3>" + _waterfall(place, spans, asked.callers)
        yield "<h3>What was said</h3>"
        conversations, offered, inferred = ConversationPrefixes(), list[str](), asked.inferred
        read = {d.span.sequence: d for d in self._record.details if d.span.attempt == attempt.id}
        for span in spans:
            turn = read[span.sequence].turn
            said = list[str]()
            if turn is not None:
                names = [tool.name for tool in turn.tools]
                known = conversations.known_length(turn.messages) if span.kind == "llm" else 0
                said = [*self._turn(span, turn, known, names if names != offered else [])]
                if span.kind == "llm":
                    conversations.add(turn)
                    offered = names
            mark = "sub-agent, inferred: " if span.sequence in inferred else ""
            yield self._call(f"s{place}-{span.sequence}", span, turn, said, mark)
        for asker, run in asked.elsewhere:
            where = f"#{asker} had it run in {run.span.rollout}/{run.span.attempt}: "
            said = [] if run.turn is None else [*self._turn(run.span, run.turn, 0, [])]
            yield self._call(f"e{place}-{asker}-{run.span.sequence}", run.span, run.turn, said, where)

    def _call(self, anchor: str, span: Span, turn: Turn | None, said: Sequence[str], where: str = "") -> str:
        bad = " bad" if span.status in (SpanStatus.ERROR, SpanStatus.INTERRUPTED) else ""
        line = text(abbreviate(where + _spaced(span_line(span).plain), NAME))
        if not said:
            return f'<p class="call{bad}" id="{anchor}">{line}</p>'
        is_open = " open" if span is self._last else ""
        answer = "" if turn is None or not turn.choices else message_text(turn.choices[0].message)
        gist = f'<br><span class="dim">→ {text(abbreviate(answer, GIST))}</span>' if answer else ""
        head = f"<summary>{line}{gist}</summary>"
        return f'<details class="call{bad}" id="{anchor}"{is_open}>{head}{"".join(said)}</details>'

    def _turn(self, span: Span, turn: Turn, known: int, offered: Sequence[str]) -> Iterator[str]:
        """Yields what a call said, less the pieces for which the page has no room."""
        whole = f"penstock show {span.rollout}/{span.attempt}#{span.sequence}"
        room, left = self._room, 0
        for piece in self._pieces(turn, known, offered, whole):
            size_ = len(piece.encode())
            if size_ <= room:
                room -= size_
                yield piece
            else:
                left += 1
        if left:
            yield f'<p class="dim">… {pluralized(left, "part")} of this call not shown: {text(whole)}</p>'

    def _pieces(self, turn: Turn, known: int, offered: Sequence[str], whole: str) -> Iterator[str]:
        """Yields the messages that a call added to the conversation, and its answers."""
        if offered:
            more = f" … {len(offered) - MOST:,} more" if len(offered) > MOST else ""
            yield f'<p class="dim">Tools on offer: {text(", ".join(offered[:MOST]) + more)}</p>'
        if known:
            yield f'<p class="dim">… {pluralized(known, "message")} as before</p>'
        added = turn.messages[known:]
        for message in added[:MOST]:
            yield self._message(message.role, message, whole)
        if len(added) > MOST:
            yield f'<p class="dim">… {len(added) - MOST:,} more messages: {text(whole)} --json</p>'
        for choice in turn.choices[:MOST]:
            many = f" {choice.index + 1} of {len(turn.choices)}" if len(turn.choices) > 1 else ""
            ended = f" ({choice.finish})" if choice.finish else ""
            yield self._message(f"answer{many}{ended}", choice.message, whole, "said answer")
        for problem in filter(None, (turn.error, *turn.problems)):
            yield f'<div class="said bad"><p class="who">error</p>{self._long(problem, whole)}</div>'

    def _message(self, who: str, message: Message, whole: str, kind: str = "said") -> str:
        name = f" {message.name}" if message.name else ""
        parts = "".join(self._part(part, whole) for part in message.parts[:MOST])
        return f'<div class="{kind}"><p class="who">{text(who + name)}</p>{parts}</div>'

    def _part(self, part: Part, whole: str) -> str:
        match part.type:
            case "text":
                return self._long(part.text or "", whole)
            case "tool_call":
                return self._long(f"{part.name}({part.arguments or ''})", whole, "tool-call")
            case "tool_call_response":
                return self._long(part.text or compact(part.data), whole)
            case "media":
                what = f"media, {size(len(compact(part.data)))} as JSON, is not shown: {whole} --raw request"
                return f'<p class="dim">{text(what)}</p>'
            case _:
                return f'<p class="dim">{text(part.type)}</p>{self._long(part.text or compact(part.data), whole)}'

    def _long(self, said: str, whole: str, kind: str = "") -> str:
        """A text, behind a line if it is long, and cut if it is too long. `whole`: the command that prints all."""
        cut = said[: self._limit]
        more = ""
        if len(said) > self._limit:
            more = f'<p class="dim">… {len(said) - self._limit:,} characters are not shown: {text(whole)}</p>'
        shown = f'<pre class="{kind}">{text(cut)}</pre>{more}'
        if len(cut) <= OPEN:
            return shown
        first = " ".join(cut[:OPEN].split())[:100]
        return f"<details><summary>{text(first)} … {len(said):,} characters</summary>{shown}</details>"

    # -- models ------------------------------------------------------------------------------------------------------

    def _models(self) -> Iterator[str]:
        calls = [detail.span for detail in self._record.details if detail.span.kind == "llm"]
        names = list(dict.fromkeys(span.model or span.dialect for span in calls))
        if not calls:
            return
        rows = list[Sequence[str]]()
        for name in names:
            mine = [span for span in calls if (span.model or span.dialect) == name]
            errors = sum(span.status == SpanStatus.ERROR for span in mine)
            used = Totals(
                input_tokens=sum((it.usage.input_tokens or 0) if it.usage else 0 for it in mine),
                output_tokens=sum((it.usage.output_tokens or 0) if it.usage else 0 for it in mine),
                uncounted=sum(it.usage is None for it in mine),
            )
            took = duration(sum(span.duration_ns or 0 for span in mine))
            rows.append((abbreviate(name, NAME), f"{len(mine):,}", f"{errors or ''}", sums(used), _cost(mine), took))
        heads = ("model", "calls", "errors", "tokens", "cost", "time in calls")
        yield f'<h2>Models</h2><div class="wide">{table("Calls on this page, by model", heads, rows)}</div>'

    # -- the comparison ----------------------------------------------------------------------------------------------

    def _comparison(self, other: ComparedRollout) -> Iterator[str]:
        pairs = align_steps(other.theirs[:MOST], other.ours[:MOST])
        differ = sum(pair.sign != "=" for pair in pairs)
        yield f"<h2>Against {text(other.rollout.id)}</h2>"
        rows = [_figures(one) for one in (other.rollout, self._rollout)]
        heads = ("", "status", "reward", "calls", "errors", "tokens")
        yield f'<div class="wide">{table("Both rollouts", heads, rows)}</div>'
        if not differ:
            yield f"<p>{pluralized(len(pairs), 'step')}, and all are equal.</p>"
        left = max(len(other.theirs), len(other.ours)) - MOST
        if left > 0:
            yield f"<p>{left:,} steps after the first {MOST:,} are not compared.</p>"
        if differ:
            yield (
                f"<p>{differ:,} of {pluralized(len(pairs), 'step')} differ. "
                f"<del>Struck out</del> is only in {text(other.rollout.id)}, <ins>bold</ins> only in "
                f"{text(self._rollout.id)}.</p>"
            )
        for equal, several in groupby(pairs, lambda pair: pair.sign == "="):
            if equal:
                whole = f"penstock show {other.rollout.id}"
                yield self._equal([pair.left for pair in several if pair.left is not None], whole)
            else:
                yield from (self._pair(pair) for pair in several)

    def _equal(self, steps: Sequence[TranscriptStep], whole: str) -> str:
        said = "".join(
            f'<div class="said"><p class="who">{text(one.who)}</p>{self._long(one.text, whole)}</div>' for one in steps
        )
        return f"<details><summary>… {pluralized(len(steps), 'equal step')}</summary>{said}</details>"

    def _pair(self, pair: StepPair) -> str:
        one, other = (("" if it is None else it.text[: self._limit]) for it in pair)
        words = list(differing_words(one, other))
        left = "".join(f"{text(both)}<del>{text(mine)}</del>" if mine else text(both) for both, mine, _ in words)
        right = "".join(f"{text(both)}<ins>{text(mine)}</ins>" if mine else text(both) for both, _, mine in words)
        sides = zip(pair, (left, right), strict=True)
        return f'<div class="pair">{"".join(self._side(step, said) for step, said in sides)}</div>'

    def _side(self, step: TranscriptStep | None, said: str) -> str:
        if step is None:
            return '<div><p class="dim">no such step</p></div>'
        cut = len(step.text) - self._limit
        more = f'<p class="dim">… {cut:,} characters are not shown</p>' if cut > 0 else ""
        return f'<div><p class="who">{text(step.who)} in call #{step.call}</p><pre>{said}</pre>{more}</div>'


def _figures(one: RolloutSummary) -> tuple[str, ...]:
    t = one.totals
    return one.id, str(one.status), number(one.reward) or "none", f"{t.calls:,}", f"{t.errors:,}", sums(t)


def _spaced(line: str) -> str:
    """A line of a terminal, whose pieces are two spaces apart there."""
    return line.replace("  ", " · ")


def _facts(facts: Mapping[str, str]) -> str:
    shown = (f"<div><dt>{name}</dt><dd>{text(value)}</dd></div>" for name, value in facts.items() if value)
    return f'<dl class="facts">{"".join(shown)}</dl>'


def _waterfall(place: int, spans: Sequence[Span], asked: Mapping[int, int]) -> str:
    """A bar for each span, from its start to its end; the pale part of a call is the wait for its first byte."""
    start = min(span.start_ns for span in spans)
    whole = max(1, max(span.end_ns or span.start_ns for span in spans) - start)
    depths: dict[int | None, int] = {None: -1}
    rows = list[str]()
    for span, parent in nested_spans(spans, asked):
        depths[span.sequence] = depth = depths.get(parent, -1) + 1
        if span.kind == "event" and span.name in BACKGROUND:
            continue
        took = (span.end_ns or span.start_ns) - span.start_ns
        wait = min(took, span.first_byte_ns or 0)
        kind = "bad" if span.status == SpanStatus.ERROR else span.kind if span.kind in ("llm", *TOOLS) else ""
        bars = _bar(f"{kind} waits", span.start_ns - start, wait, whole) if wait else ""
        bars += _bar(kind, span.start_ns - start + wait, took - wait, whole)
        name = abbreviate(" ".join(filter(None, label(span))), NAME)
        inside = f"padding-left: {min(depth, 8) * 0.8:.1f}rem"
        rows.append(
            f'<li><a href="#s{place}-{span.sequence}" style="{inside}">{text(name)}</a>'
            f'<span class="track" aria-hidden="true">{bars}</span><span class="took">{text(length(span))}</span></li>'
        )
    return f'<ol class="fall">{"".join(rows)}</ol>'


def _bar(kind: str, start: int, took: int, whole: int) -> str:
    left = min(99.7, start / whole * 100)
    return f'<i class="{kind}" style="left: {left:.2f}%; width: {min(100 - left, took / whole * 100):.2f}%"></i>'


def _listing(caption: str, rows: Listing) -> str:
    """A listing of a terminal as a table, without the columns that are empty."""
    cells = [[cell.plain for cell in row] for row in rows.rows]
    shown = [at for at, _ in enumerate(rows.columns) if any(row[at] for row in cells)]
    heads = [rows.columns[at].name for at in shown]
    return f'<div class="wide texts">{table(caption, heads, [[row[at] for at in shown] for row in cells])}</div>'


def _cost(spans: Iterable[Span]) -> str:
    """The cost of calls, as lists show it; empty where nothing was used that costs."""
    charged = [span for span in spans if span.cost is not None or span.unpriced]
    known = [span.cost for span in charged if span.cost is not None]
    return cost(Totals(cost=sum(known) if known else None, unpriced=sum(bool(span.unpriced) for span in charged)))
