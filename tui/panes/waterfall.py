"""Spans as bars over the time of their attempt.

    ░░░░███████        a streamed call: waiting for the first byte, then reading
    ▒▒▒▒▒              waiting for an answer that came at once, or something that was run
    ███▶               still going on
    ██✗                ended badly
    ◆  ·               a reward; an event

Colours only repeat the signs. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views.runs import sparkline
from penstock.console.views.table import Column, Listing, duration, figure, joined, moment, size
from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.base import CALLS
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.turn import Chunk

WAITING, STREAMING, WHOLE, OPEN, FAILED, REWARD, EVENT = "░", "█", "▒", "▶", "✗", "◆", "·"
COLOURS: Final = {SpanStatus.OK: "green", SpanStatus.OPEN: "cyan", SpanStatus.CANCELLED: "yellow"}
KEY: Final = f"{WAITING} waits  {STREAMING} streams  {WHOLE} runs  {OPEN} goes on  {FAILED} failed  {REWARD} reward"


class TimeAxis(NamedTuple):
    """The time that a row of characters represents; ns since the epoch."""

    begin_ns: int
    end_ns: int

    @classmethod
    def of(cls, spans: Iterable[Span], now_ns: int) -> TimeAxis:
        """The time from the first begin to the last end; open spans end now."""
        found = list(spans)
        begin = min((span.start_ns for span in found), default=now_ns)
        end = max((_end(span, now_ns) for span in found), default=now_ns)
        return cls(begin, max(end, begin + 1))

    def place(self, at_ns: int, width: int) -> int:
        """The index of the character that a moment is in."""
        share = (at_ns - self.begin_ns) / (self.end_ns - self.begin_ns)
        return min(width - 1, max(0, int(share * width)))


def _end(span: Span, now_ns: int) -> int:
    return max(span.start_ns, span.end_ns if span.end_ns is not None else now_ns)


def heading(axis: TimeAxis, width: int) -> Text:
    """The axis as text: its length at its end."""
    length = duration(axis.end_ns - axis.begin_ns)
    return Text(f"0{length:>{max(1, width - 1)}}"[:width], style="dim", no_wrap=True)


def bar(span: Span, axis: TimeAxis, width: int, now_ns: int) -> Text:
    """A span as a bar of at least one character."""
    first = axis.place(span.start_ns, width)
    made = Text(" " * first, no_wrap=True)
    if span.kind == "reward":
        return made.append(REWARD, "bold magenta")
    if span.kind not in CALLS and span.end_ns in (None, span.start_ns):
        return made.append(EVENT, "dim")
    last = max(first, axis.place(_end(span, now_ns) - 1, width))
    style = COLOURS.get(span.status, "red")
    if span.first_byte_ns is None or not span.stream:
        signs = WHOLE * (last - first + 1)
    else:
        begun = max(first, axis.place(span.start_ns + span.first_byte_ns, width))
        signs = WAITING * (begun - first) + STREAMING * (last - begun + 1)
    if span.status == SpanStatus.OPEN:
        signs = signs[:-1] + OPEN
    elif span.status not in (SpanStatus.OK, SpanStatus.CANCELLED):
        signs = signs[:-1] + FAILED
    return made.append(signs, style)


# The time of a call: waiting for the first byte, then reading. Pure.

PARTS = (Column("part"), figure("took"), figure("share"), Column("of the call"))
BAR = 24


def timing(detail: SpanDetail, width: int) -> RenderableType:
    """The parts of a call's time, and the arrival of its bytes."""
    span = detail.span
    head = joined(Text("started", style="dim"), f"{moment(span.start_ns)} UTC")
    whole = span.duration_ns
    if whole is None:
        return Group(head, Text("It has not ended yet."))
    made = Listing(*PARTS)
    first = span.first_byte_ns
    parts = [("until the first byte", first), ("from there to the end", whole - first)] if first is not None else []
    for name, took in [*parts, ("all", whole)]:
        share = took / whole if whole else 0.0
        made.add_row(name, duration(took), f"{share:.0%}", "█" * round(share * BAR))
    sizes = joined(
        Text("bytes", style="dim"), f"{size(span.request_bytes)} sent", f"{size(span.response_bytes)} received"
    )
    chunks = detail.exchange.chunks if detail.exchange else []
    return Group(
        head,
        made,
        sizes,
        *_speed(span.usage.output_tokens if span.usage else None, whole, first if span.stream else None),
        *_arrival(chunks, width),
    )


def _speed(tokens: int | None, whole: int, first: int | None) -> Iterator[Text]:
    """Tokens a second: of a stream after its first byte, of a plain answer (`first` None) over the whole call."""
    took = whole - (first or 0)
    if tokens and took > 0:
        over = "over the call" if first is None else "after the first byte"
        yield joined(Text("speed", style="dim"), f"{tokens / (took / 1e9):,.1f} tokens a second {over}")


def _arrival(chunks: Sequence[Chunk], width: int) -> Iterator[Text]:
    if len(chunks) < 2:
        return
    begin, end, columns = chunks[0].at_ns, chunks[-1].at_ns, min(max(20, width - 12), 100)
    sums = [0.0] * columns
    for chunk in chunks:
        sums[min(columns - 1, (chunk.at_ns - begin) * columns // max(1, end - begin))] += chunk.size
    gap, at = max((after.at_ns - before.at_ns, before.at_ns) for before, after in pairwise(chunks))
    yield joined(Text("arrival", style="dim"), sparkline(sums))
    yield joined(Text("reads", style="dim"), f"{len(chunks):,}", f"longest pause {duration(gap)}, after {duration(at)}")
