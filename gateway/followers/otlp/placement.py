"""The place of an exported span: its trace, its parent and its links. Pure.

An attempt that a worker ran is exported as one trace of its own, whose root is the attempt. SDKs that do not read
`TRACEPARENT` begin a trace for each of their outermost spans. Those spans, and calls that were made in them, move into
the trace of the attempt: trace ids change, span ids do not. A call whose `traceparent` names a trace that the agent
reports elsewhere stays there. A span whose parent has never come is placed under the root and linked to that parent.

Other attempts have no root and may be part of somebody's larger trace: their spans stay in the traces they came in. A
call that named no caller joins the trace of the span that it was made in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.gateway.model.span import ParentGuess, Span, SpanNode, guess_parents, span_id, trace_id

MOST_LINKS = 8
"""Most candidates that a call is linked to."""


class SpanPlacement(NamedTuple):
    """The place of a span in a trace."""

    trace: str
    parent: str | None
    inferred: bool = False
    """True if the parent is inferred, not named."""
    links: tuple[tuple[str, str], ...] = ()
    """(trace id, span id) of spans it may belong to."""
    causes: tuple[tuple[str, str, str, str | None], ...] = ()
    """(trace id, span id, type of link, grade of certainty) of the spans that caused it."""
    moved: frozenset[str] = frozenset()
    """Traces that became part of `trace`: links to them become links to it."""


def root_id(rollout: str, attempt: str) -> str:
    """The span id of an attempt's root."""
    return span_id(trace_id(rollout, attempt), rollout, attempt, 0)


def original_placement(span: Span, root: str | None) -> SpanPlacement:
    """The place of a span in the trace that it came in. `root`: the parent of the gateway's own spans; None where there
    will be no root."""
    trace = trace_id(span.rollout, span.attempt)
    own = span.trace_id or trace
    return SpanPlacement(own, span.parent_id or (root if own == trace and span.kind != "otel" else None))


def guessed_placement(call: Span, guess: ParentGuess | None) -> SpanPlacement:
    """The place of a call of an attempt without a root, where the call named no caller."""
    if guess is None:
        return original_placement(call, None)
    links = tuple((node.trace_id, node.span_id) for node in guess.candidates[:MOST_LINKS])
    if guess.parent is None:
        return original_placement(call, None)._replace(links=links)
    return SpanPlacement(guess.parent.trace_id, guess.parent.span_id, True, links)


class AttemptTrace:
    """The trace of an attempt that has a root."""

    def __init__(self, rollout: str, attempt: str, agent: Sequence[SpanNode], calls: Iterable[Span]) -> None:
        """`agent`: the agent's spans; `calls`: the attempt's calls that named no caller."""
        self._trace, self._root = trace_id(rollout, attempt), root_id(rollout, attempt)
        self._moved = frozenset(node.trace_id for node in agent) - {self._trace}
        self._known = {node.span_id for node in agent}
        self._guesses = guess_parents(agent, calls)

    def place(self, span: Span) -> SpanPlacement:
        """The place of any span of the attempt."""
        own = span.trace_id or self._trace
        # A span of the agent may come after all others have been sent.
        moved = self._moved | {own} - {self._trace} if span.kind == "otel" else self._moved
        if own != self._trace and own not in moved:
            return original_placement(span, None)
        found = self._under_parent(span, own) if span.parent_id is not None else self._guessed(span)
        return found._replace(moved=moved)

    def _under_parent(self, span: Span, own: str) -> SpanPlacement:
        if own == self._trace or span.parent_id in self._known:
            return SpanPlacement(self._trace, span.parent_id)
        return SpanPlacement(self._trace, self._root, True, ((own, span.parent_id or ""),))

    def _guessed(self, span: Span) -> SpanPlacement:
        guess = self._guesses.get(span.sequence, ParentGuess(None))
        links = tuple((self._trace, node.span_id) for node in guess.candidates[:MOST_LINKS])
        if guess.parent is None:
            return SpanPlacement(self._trace, self._root, links=links)
        return SpanPlacement(self._trace, guess.parent.span_id, True, links)
