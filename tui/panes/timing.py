"""The time of a call: waiting for the first byte, then reading. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views.runs import sparkline
from penstock.console.views.table import Column, Listing, figure
from penstock.console.views.text import duration, joined, moment, size
from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.exchange import Chunk

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
