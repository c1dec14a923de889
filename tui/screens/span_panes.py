"""The panes of a span: a bar over the time of its attempt, its times, its tokens, and its bytes. Pure.

    ░░░░███████        a streamed call: waiting for the first byte, then reading
    ▒▒▒▒▒              waiting for an answer that came at once, or something that was run
    ███▶               still going on
    ██✗                ended badly
    ◆  ·               a reward; an event

    The ca|pital of| Peru| is|?Lima|.

A token with a probability below one half has a `?` before it, one below a tenth `‼`. Colours only repeat the signs.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views.runs import sparkline
from penstock.console.views.table import Column, Listing, clean, duration, figure, joined, moment, size
from penstock.gateway.model.answers import Body, ExchangeView, SpanDetail
from penstock.gateway.model.base import CALLS
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.turn import Chunk
from penstock.gateway.wire.dialects.tokens import TokenLogprob
from penstock.tui.view import Pane

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


# -- the time of a call: waiting for the first byte, then reading ----


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


# -- the tokens of an answer with their probabilities ----


UNSURE, UNLIKELY = math.log(0.5), math.log(0.1)
MOST_TOKENS: Final = 2_000
"""The most tokens that are drawn."""
WORST: Final = 12
"""The number of least likely tokens that are listed."""
NONE = (
    "The engine gave no tokens with this answer. vLLM and SGLang give them for `return_token_ids` and `logprobs`: "
    "capture_tokens of the upstream asks for both, see docs/training-data.md."
)
UNLIKELY_ONES = (figure("at"), Column("token"), figure("id"), figure("probability"), figure("log-probability"))


def tokens(found: Sequence[TokenLogprob]) -> RenderableType:
    """The answer token by token, and the least likely tokens in a table."""
    if not found:
        return Text(NONE)
    known = [token.logprob for token in found if token.logprob is not None]
    pieces: list[RenderableType] = [Text(_sums(found, known), style="bold"), Text()]
    if any(token.text is not None for token in found):
        pieces.append(_marked(found[:MOST_TOKENS]))
    else:
        pieces.append(Text(" ".join(str(token.id) for token in found[:MOST_TOKENS])))
    if len(found) > MOST_TOKENS:
        pieces.append(Text(f"{len(found) - MOST_TOKENS:,} more tokens are not drawn.", style="dim"))
    return Group(*pieces, *_worst(found))


def _sums(found: Sequence[TokenLogprob], known: Sequence[float]) -> str:
    ids = "with their ids" if any(token.id is not None for token in found) else "without ids"
    count = f"{len(found):,} token{'s' if len(found) != 1 else ''}, {ids}"
    if not known:
        return f"{count}; no log-probabilities"
    mean = sum(known) / len(known)
    return f"{count}; mean log-probability {mean:.3f}, perplexity {math.exp(min(-mean, 700)):.4g}"


def _marked(found: Sequence[TokenLogprob]) -> Text:
    made = Text()
    for at, token in enumerate(found):
        sign, style = _doubt(token.logprob)
        text = clean(token.text if token.text is not None else f"<{token.id}>")
        made.append(("|" if at else "") + sign, "dim").append(text, style)
    return made


def _doubt(logprob: float | None) -> tuple[str, str]:
    if logprob is None or logprob >= UNSURE:
        return "", ""
    return ("?", "yellow") if logprob >= UNLIKELY else ("‼", "bold red")


def _worst(found: Sequence[TokenLogprob]) -> Iterator[RenderableType]:
    doubted = [(token.logprob, at) for at, token in enumerate(found) if (token.logprob or 0.0) < UNSURE]
    if not doubted:
        return
    made = Listing(*UNLIKELY_ONES)
    for logprob, at in sorted((logprob or 0.0, at) for logprob, at in doubted)[:WORST]:
        token = found[at]
        name = "" if token.text is None else repr(clean(token.text))
        made.add_row(
            str(at), name, "" if token.id is None else str(token.id), f"{math.exp(logprob):.2%}", f"{logprob:.3f}"
        )
    yield from (Text(), Text("The least likely tokens"), made)


# -- the bytes of a call as they went over the wire ----
#
# Headers, then the body: JSON indented, events with their times. Content encodings are undone before, by the gateway.
# Only the beginning of a large body is drawn; $PAGER has all of it.


MOST_CHARACTERS: Final = 64 << 10
"""The most characters of a body that are drawn."""


def exchange_panes(detail: SpanDetail) -> Sequence[Pane]:
    """The panes of the request and the response."""
    seen = detail.exchange
    if seen is None:
        return ()
    request, response = body(seen.request_body), body(seen.response_body)
    return [
        Pane(
            "Request",
            lambda width, height: _drawn(f"{detail.span.method} {seen.url}", seen.request_headers, request),
            lambda: request,
        ),
        Pane("Response", lambda width, height: _response(detail, seen, response), lambda: response),
    ]


def body(seen: Body) -> bytes:
    """The decoded bytes of a body."""
    return seen.text.encode() if seen.text is not None else base64.b64decode(seen.base64 or "")


def _drawn(first: str, headers: Sequence[tuple[str, str]], content: bytes) -> RenderableType:
    return Group(Text(clean(first), style="bold"), *_headers(headers), Text(), *_content(content))


def _response(detail: SpanDetail, seen: ExchangeView, content: bytes) -> RenderableType:
    first = "" if detail.span.http_status is None else f"HTTP {detail.span.http_status}"
    shown = _events(content, _times(seen, content)) if detail.span.stream and b"\n\n" in content else _content(content)
    trailers = [Text(), *_headers(seen.trailers)] if seen.trailers else []
    return Group(Text(first, style="bold"), *_headers(seen.response_headers), Text(), *shown, *trailers)


def _headers(headers: Sequence[tuple[str, str]]) -> Iterator[Text]:
    for name, value in headers:
        yield Text.assemble((clean(name), "cyan"), ": ", clean(value))


def _content(content: bytes) -> Iterator[Text]:
    if not content:
        yield Text("(empty)", style="dim")
        return
    text, note = _text(content), ""
    if len(text) > MOST_CHARACTERS:
        text, note = text[:MOST_CHARACTERS], f"{size(len(content))} in all; o opens all of it in $PAGER."
    yield Text(clean(text))
    if note:
        yield Text(note, style="dim")


def _text(content: bytes) -> str:
    """JSON indented; the size only, if the content is no text."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return f"({size(len(content))} that are no text)"
    if len(text) > 4 * MOST_CHARACTERS:
        return text
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _events(content: bytes, times: Sequence[Chunk]) -> Iterator[Text]:
    """Each event of a stream, after the time at which it was complete."""
    at, arrived, drawn, reads = 0, 0, 0, iter(times)
    last = None
    for event in content.split(b"\n\n"):
        at += len(event) + 2
        while arrived < min(at, len(content)) and (chunk := next(reads, None)) is not None:
            arrived, last = arrived + chunk.size, chunk
        if not event.strip():
            continue
        text = event.decode("utf-8", "replace")
        drawn += len(text)
        if drawn > MOST_CHARACTERS:
            yield Text(f"{size(len(content))} in all; o opens all of it in $PAGER.", style="dim")
            return
        stamp = "" if last is None else f"+{duration(last.at_ns)}"
        yield Text.assemble((f"{stamp:>9} ", "dim"), clean(text.replace("\n", "\n" + " " * 10)))


def _times(seen: ExchangeView, content: bytes) -> Sequence[Chunk]:
    """The arrival of the body's bytes; empty when they were encoded, because then it is unknown."""
    return seen.chunks if sum(chunk.size for chunk in seen.chunks) == len(content) else ()
