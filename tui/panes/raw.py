"""The bytes of a call as they went over the wire: headers, then the body, JSON indented, events with their times. Pure.

Content encodings are undone before, by the gateway. Only the beginning of a large body is drawn; $PAGER has all of it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views.table import clean, duration, size
from penstock.gateway.model.answers import Body, ExchangeView, SpanDetail
from penstock.gateway.model.turn import Chunk
from penstock.tui.view import Pane

MOST: Final = 64 << 10
"""The most characters of a body that are drawn."""


def panes(detail: SpanDetail) -> Sequence[Pane]:
    """The panes of the request and the response."""
    seen = detail.exchange
    if seen is None:
        return ()
    request, response = body(seen.request_body), body(seen.response_body)
    return [
        Pane(
            "Request",
            lambda _: _drawn(f"{detail.span.method} {seen.url}", seen.request_headers, request),
            lambda: request,
        ),
        Pane("Response", lambda _: _response(detail, seen, response), lambda: response),
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
    if len(text) > MOST:
        text, note = text[:MOST], f"{size(len(content))} in all; o opens all of it in $PAGER."
    yield Text(clean(text))
    if note:
        yield Text(note, style="dim")


def _text(content: bytes) -> str:
    """JSON indented; the size only, if the content is no text."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return f"({size(len(content))} that are no text)"
    if len(text) > 4 * MOST:
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
        if drawn > MOST:
            yield Text(f"{size(len(content))} in all; o opens all of it in $PAGER.", style="dim")
            return
        stamp = "" if last is None else f"+{duration(last.at_ns)}"
        yield Text.assemble((f"{stamp:>9} ", "dim"), clean(text.replace("\n", "\n" + " " * 10)))


def _times(seen: ExchangeView, content: bytes) -> Sequence[Chunk]:
    """The arrival of the body's bytes; empty when they were encoded, because then it is unknown."""
    return seen.chunks if sum(chunk.size for chunk in seen.chunks) == len(content) else ()
