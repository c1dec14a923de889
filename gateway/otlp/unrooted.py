"""Finds the agents' spans around calls of attempts that have no root.

An agent's spans come after the calls that were made in them. So only spans that follow a call in its attempt are read,
once for all calls of a piece of the feed, and an attempt is not read from its beginning again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice

from penstock.gateway.model.base import CALLS
from penstock.gateway.model.nesting import Guess, Node, guesses
from penstock.gateway.model.span import Span
from penstock.gateway.otlp.placement import Place, as_it_came, with_guess
from penstock.gateway.store import Store

LOOKED_AHEAD = 5_000
"""Most spans of an attempt that are read after a call."""
REMEMBERED = 256
"""Most attempts whose agents' spans are remembered."""
Name = tuple[str, str]


class Agent:
    """The spans of one attempt's agent, as far as they were read."""

    def __init__(self) -> None:
        self._nodes: deque[tuple[int, Node]] = deque()
        self._seen = 0

    def look(self, tape: Store, name: Name, first: int) -> list[Node]:
        """The agent's spans from this sequence on."""
        while self._nodes and self._nodes[0][0] < first:
            self._nodes.popleft()
        since = max(self._seen, first)
        for span in islice(tape.spans(*name, (name[1], since)), max(0, first + LOOKED_AHEAD - since)):
            self._seen = span.sequence
            if span.kind == "otel":
                self._nodes.append((span.sequence, Node.of(span)))
        return [node for _, node in self._nodes]


class Beside:
    """Finds the places of calls, piece by piece."""

    def __init__(self, tape: Store) -> None:
        self._tape = tape
        self._agents: OrderedDict[Name, Agent] = OrderedDict()
        self._guesses: dict[Name, dict[int, Guess]] = {}

    def forget(self) -> None:
        """Forget what was read, since more may have come."""
        self._guesses.clear()

    def place(self, span: Span, piece: Iterable[Span]) -> Place:
        """The place of a call. `piece`: the spans that are about to be placed, `span` among them."""
        if span.kind not in CALLS or span.parent_id is not None:
            return as_it_came(span, None)
        name = span.rollout, span.attempt
        if name not in self._guesses:
            calls = [one for one in piece if (one.rollout, one.attempt) == name and one.parent_id is None]
            self._guesses[name] = self._guess(name, [one for one in calls if one.kind in CALLS])
        return with_guess(span, self._guesses[name].get(span.sequence))

    def _guess(self, name: Name, calls: list[Span]) -> dict[int, Guess]:
        if not self._has_others(name):
            return {}
        agent = self._agents.setdefault(name, Agent())
        self._agents.move_to_end(name)
        if len(self._agents) > REMEMBERED:
            self._agents.popitem(last=False)
        return guesses(agent.look(self._tape, name, min(call.sequence for call in calls)), calls)

    def _has_others(self, name: Name) -> bool:
        """True if an attempt has spans other than calls that have ended: most have none."""
        return any(one.id == name[1] and one.spans > one.totals.calls for one in self._tape.attempts(name[0]))
