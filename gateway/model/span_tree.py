"""Finds the span of an instrumented agent in which a call was made. Pure.

An agent that reports its own spans also reports how they are nested. For its calls it does so only if its HTTP client
sends a `traceparent`. For other calls the parent is inferred, when the spans are read, from the spans of the same
attempt on the tape:

1. The span with the id of the call's response made the call: as `gen_ai.response.id`, or at the beginning of the answer
   that OpenInference keeps as `output.value`.
2. Otherwise the parent is the innermost span that was open when the call began. A call may outlive it: a span may end
   with the head of a stream.
3. If several branches were open side by side, those with the id of another response are left out. If several remain,
   the parent is the innermost span that contains them all; their ends are its candidates.

Agent and gateway may have different clocks; then only the first rule is sure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.model.base import CALLS
from penstock.gateway.model.span import Span

RESPONSE_ID, OUTPUT = "gen_ai.response.id", "output.value"
_ANSWER = re.compile(r'\s*\{\s*"id"\s*:\s*"([^"\\]+)"')


@dataclass(frozen=True, slots=True)
class SpanNode:
    """The needed parts of an agent's span; the whole span may be large."""

    span_id: str
    parent_id: str | None
    trace_id: str
    start_ns: int
    end_ns: int
    response_id: str | None

    @classmethod
    def of(cls, span: Span) -> SpanNode:
        """The parts of a span of kind `otel`."""
        end = span.start_ns if span.end_ns is None else span.end_ns
        answered = _response_id(span.attributes or {})
        return cls(span.span_id or "", span.parent_id, span.trace_id or "", span.start_ns, end, answered)


def _response_id(attributes: Mapping[str, Any]) -> str | None:
    named, answer = attributes.get(RESPONSE_ID), attributes.get(OUTPUT)
    if isinstance(named, str) and named:
        return named
    found = _ANSWER.match(answer) if isinstance(answer, str) else None
    return None if found is None else found[1]


@dataclass(frozen=True, slots=True)
class ParentGuess:
    """The probable place of a call."""

    parent: SpanNode | None
    """The span in which the call was made."""
    candidates: tuple[SpanNode, ...] = ()
    """The spans in which it may have been made, when there are several; `parent` contains them."""


def guess_parents(agent: Iterable[SpanNode], calls: Iterable[Span]) -> dict[int, ParentGuess]:
    """By sequence, the guesses for those calls of one attempt that were made in a span of `agent`; the others are left
    out."""
    # A span that an exporter has sent twice is one span.
    by_id = {node.span_id: node for node in sorted(agent, key=lambda node: (node.start_ns, node.span_id))}
    answered = _answered(by_id.values())
    waiting = iter(by_id.values())
    following = next(waiting, None)
    open_now: list[SpanNode] = []
    found: dict[int, ParentGuess] = {}
    for call in sorted(calls, key=lambda call: call.start_ns):
        while following is not None and following.start_ns <= call.start_ns:
            open_now.append(following)
            following = next(waiting, None)
        open_now = [node for node in open_now if node.end_ns >= call.start_ns]
        sure = answered.get(call.response_id or "")
        guess = _innermost(call, open_now, by_id) if sure is None else ParentGuess(sure)
        if guess.parent is not None or guess.candidates:
            found[call.sequence] = guess
    return found


def _answered(nodes: Iterable[SpanNode]) -> dict[str, SpanNode]:
    """The innermost span of each response id; an id that several unrelated spans have is left out."""
    found: dict[str, SpanNode | None] = {}
    for node in nodes:
        if node.response_id:
            other = found.get(node.response_id, node)
            nested = other is not None and (node is other or node.parent_id == other.span_id)
            found[node.response_id] = node if nested else None
    return {name: node for name, node in found.items() if node is not None}


def _innermost(call: Span, open_now: Sequence[SpanNode], by_id: Mapping[str, SpanNode]) -> ParentGuess:
    lines = {node.span_id: [above.span_id for above in _above(node, by_id)] for node in open_now}
    outer = {above for line in lines.values() for above in line}
    leaves = [node for node in open_now if node.span_id not in outer]
    if len(leaves) > 1 and call.response_id:
        leaves = [node for node in leaves if node.response_id is None] or leaves
    if len(leaves) < 2:
        return ParentGuess(leaves[0] if leaves else None)
    first, *rest = (lines[leaf.span_id] for leaf in leaves)
    common = next((above for above in first if all(above in line for line in rest)), None)
    return ParentGuess(None if common is None else by_id[common], tuple(leaves))


def _above(node: SpanNode, by_id: Mapping[str, SpanNode]) -> Iterator[SpanNode]:
    """The spans that contain this one, innermost first. Their ids come from outside, so they may form a circle."""
    seen = {node.span_id}
    above = by_id.get(node.parent_id or "")
    while above is not None and above.span_id not in seen:
        seen.add(above.span_id)
        yield above
        above = by_id.get(above.parent_id or "")


def tree(spans: Sequence[Span], asked: Mapping[int, int] | None = None) -> dict[int | None, list[Span]]:
    """The spans of one attempt by the sequence of the span that contains them, None for none, each in order of time.
    `asked`: sequences of the model calls that asked for runs of tools, by the run's sequence."""
    agent = [span for span in spans if span.kind == "otel"]
    above = [span for span in spans if span.kind in ("otel", "tool", "mcp")]
    by_id = {span.span_id or "": span.sequence for span in reversed(above)}
    asked = asked or {}
    found = guess_parents(
        map(SpanNode.of, agent), (span for span in spans if span.kind in CALLS and span.parent_id is None)
    )
    parents: dict[int, int | None] = {}
    for span in spans:
        guess = found.get(span.sequence)
        named = span.parent_id if guess is None or guess.parent is None else guess.parent.span_id
        parent = asked.get(span.sequence, by_id.get(named) if named else None)
        parents[span.sequence] = _unless_circle(span.sequence, parent, parents)
    made: dict[int | None, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, span.sequence)) if agent else spans:
        made.setdefault(parents[span.sequence], []).append(span)
    return made


def _unless_circle(own: int, parent: int | None, parents: Mapping[int, int | None]) -> int | None:
    above = parent
    while above is not None and above != own:
        above = parents.get(above)
    return None if above == own else parent
