"""Finds the agents' spans around calls of attempts that have no root.

An agent's spans come after the calls that were made in them. So only spans that follow a call in its attempt are read,
once for all calls of a piece of the feed, and an attempt is not read from its beginning again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice

from penstock.gateway.followers.otlp.placement import SpanPlacement, guessed_placement, original_placement
from penstock.gateway.model.base import CALLS
from penstock.gateway.model.span import Span
from penstock.gateway.model.span_tree import ParentGuess, SpanNode, guess_parents
from penstock.gateway.tape.store import Store

LOOKED_AHEAD = 5_000
"""Most spans of an attempt that are read after a call."""
REMEMBERED = 256
"""Most attempts whose agents' spans are remembered."""
Name = tuple[str, str]


class AgentSpans:
    """The spans of one attempt's agent, as far as they were read."""

    def __init__(self) -> None:
        self._nodes: deque[tuple[int, SpanNode]] = deque()
        self._seen = 0

    def read(self, tape: Store, name: Name, first: int) -> list[SpanNode]:
        """The agent's spans from this sequence on."""
        while self._nodes and self._nodes[0][0] < first:
            self._nodes.popleft()
        since = max(self._seen, first)
        for span in islice(tape.spans(*name, (name[1], since)), max(0, first + LOOKED_AHEAD - since)):
            self._seen = span.sequence
            if span.kind == "otel":
                self._nodes.append((span.sequence, SpanNode.of(span)))
        return [node for _, node in self._nodes]


class CallPlacer:
    """Finds the places of calls, piece by piece."""

    def __init__(self, tape: Store) -> None:
        self._tape = tape
        self._agents: OrderedDict[Name, AgentSpans] = OrderedDict()
        self._guesses: dict[Name, dict[int, ParentGuess]] = {}

    def forget(self) -> None:
        """Forget what was read, since more may have come."""
        self._guesses.clear()

    def place(self, span: Span, piece: Iterable[Span]) -> SpanPlacement:
        """The place of a call. `piece`: the spans that are about to be placed, `span` among them."""
        if span.kind not in CALLS or span.parent_id is not None:
            return original_placement(span, None)
        name = span.rollout, span.attempt
        if name not in self._guesses:
            calls = [one for one in piece if (one.rollout, one.attempt) == name and one.parent_id is None]
            self._guesses[name] = self._guess(name, [one for one in calls if one.kind in CALLS])
        return guessed_placement(span, self._guesses[name].get(span.sequence))

    def _guess(self, name: Name, calls: list[Span]) -> dict[int, ParentGuess]:
        if not self._has_others(name):
            return {}
        agent = self._agents.setdefault(name, AgentSpans())
        self._agents.move_to_end(name)
        if len(self._agents) > REMEMBERED:
            self._agents.popitem(last=False)
        return guess_parents(agent.read(self._tape, name, min(call.sequence for call in calls)), calls)

    def _has_others(self, name: Name) -> bool:
        """True if an attempt has spans other than calls that have ended: most have none."""
        return any(one.id == name[1] and one.spans > one.totals.calls for one in self._tape.attempts(name[0]))
