"""The cause of a span: the model call whose answer asked for a run of a tool, or the call that a call repeats.

Nothing on the wire tells which answer asked for a run of a tool; `gateway.reading.diagnosis.tool_join` infers it, as
well as possible when the span is sent. An attempt that has ended is complete, so it is joined once; of another one the
calls around the run are read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from penstock.gateway.followers.otlp import semconv
from penstock.gateway.model.span import Span
from penstock.gateway.model.tools import ToolUse
from penstock.gateway.reading.diagnosis.tool_uses import tools_used
from penstock.gateway.tape.store import Store

BEFORE, AFTER = 24, 12
"""Spans before and after a run that are read where its attempt goes on."""
REMEMBERED = 16
"""Most ended attempts whose runs are remembered."""


class Cause(NamedTuple):
    """A link to a span of the same attempt."""

    sequence: int
    link_type: str
    known: str | None = None
    """The grade of certainty, for a run of a tool."""


class CauseFinder:
    """Finds causes; for one thread at a time."""

    def __init__(self, tape: Store) -> None:
        self._tape = tape
        self._ended: OrderedDict[tuple[str, str], dict[int, ToolUse]] = OrderedDict()

    def find(self, span: Span) -> Iterator[Cause]:
        """Yield the causes of a span: for a run of a tool, all calls that may have asked for it, with the grade, or the
        one that did."""
        if span.kind == "llm" and span.retry_of is not None:
            yield Cause(span.retry_of, semconv.RETRY)
        if span.kind != "tool":
            return
        use = self._used(span).get(span.sequence)
        for sequence in () if use is None else [use.asked_by] if use.asked_by is not None else use.candidates:
            yield Cause(sequence, semconv.CAUSED, use.grade if use else None)

    def _used(self, span: Span) -> dict[int, ToolUse]:
        name = span.rollout, span.attempt
        found = self._ended.get(name)
        if found is not None and span.sequence in found:
            return found
        ended = any(one.id == span.attempt and one.ended_ns is not None for one in self._tape.attempts(span.rollout))
        first = 0 if ended else max(0, span.sequence - 1 - BEFORE)
        spans = self._tape.spans(*name, (span.attempt, first))
        used = tools_used(spans if ended else islice(spans, BEFORE + 1 + AFTER), self._tape.exchange).tools
        found = {use.span: use for use in used if use.span is not None}
        if ended:
            self._ended[name] = found
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
        return found
