"""Reads the contents of calls from the tape for filters and searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import count, takewhile
from typing import Protocol

from penstock.gateway.model.facts import TOOL
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Exchange, Passage
from penstock.gateway.reading.filters import ContentReaders
from penstock.gateway.reading.turns import decode_body, encoding
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.traffic.calls.passages import is_conversation, passages, tools_called


class ContentSource(Protocol):
    """The part of the store that is needed here."""

    def span(self, rid: str, aid: str, sequence: int, /) -> Span | None: ...
    def exchange(self, span: Span) -> Exchange | None: ...
    def pass_over(self, what: str, error: TapeError, /) -> None: ...


def passage_reader(tape: ContentSource) -> Callable[[Span], list[Passage]]:
    """A function that reads the passages which a span adds to the conversation; none of a damaged span. It remembers
    the first calls of attempts, and the last passages that it read."""

    @lru_cache(maxsize=256)
    def first_call(rid: str, aid: str) -> int | None:
        # Most often it is the very first span: reading later ones would cost more than everything else.
        spans = map(partial(tape.span, rid, aid), count(1))
        return next(
            (span.sequence for span in takewhile(bool, spans) if span is not None and is_conversation(span)), None
        )

    def read(span: Span) -> list[Passage]:
        try:
            return passages(
                span, tape.exchange(span), lambda: first_call(span.rollout, span.attempt) in (span.sequence, None)
            )
        except TapeError as error:
            tape.pass_over(_bodies_of(span), error)
            return []

    last: tuple[Span, list[Passage]] | None = None

    def read_once(span: Span) -> list[Passage]:
        # A filter asks for the tools and the texts of a span one after the other.
        nonlocal last
        if last is None or last[0] is not span:
            last = span, read(span)
        return last[1]

    return read_once


def contents(tape: ContentSource) -> ContentReaders:
    """The contents of calls that a filter may ask for."""
    read = passage_reader(tape)

    def tools(span: Span) -> Sequence[str]:
        if span.kind == "tool":
            return [str((span.attributes or {}).get(TOOL, ""))]
        return tools_called(read(span)) if span.tool_calls else ()

    def texts(span: Span) -> Sequence[str]:
        return [passage.text for passage in read(span)]

    def bodies(span: Span) -> Sequence[str]:
        exchange = None
        try:
            exchange = tape.exchange(span)
        except TapeError as error:
            tape.pass_over(_bodies_of(span), error)
        if exchange is None:
            return ()
        return (
            _text(exchange.request_body, exchange.request_headers),
            _text(exchange.response_body, exchange.response_headers),
        )

    return ContentReaders(tools, texts, bodies)


def _bodies_of(span: Span) -> str:
    return f"what {span.rollout}/{span.attempt}#{span.sequence} says"


def _text(body: bytes, headers: list[tuple[str, str]]) -> str:
    return decode_body(body, encoding(headers))[0].decode(errors="replace")
