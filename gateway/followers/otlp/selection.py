"""Chooses the spans that are sent for a change of the tape, and their time and place.

Spans of an attempt that a worker runs wait for its end, which comes after the last span of its agent: then the whole
attempt is read from the tape and sent as one trace (`span_export.AttemptTrace`). Later spans are sent as they come.
Calls of other attempts wait for `otlp.wait` seconds, because SDKs send spans some seconds late; the feed waits with
them. The choice follows from the tape, so a gateway that is started again needs only the cursor.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import islice
from typing import NamedTuple

from penstock.gateway.followers.otlp import semconv
from penstock.gateway.followers.otlp.span_export import (
    MOST_LINKS,
    AttemptTrace,
    SpanPlacement,
    guessed_placement,
    original_placement,
    root_id,
)
from penstock.gateway.model.answers import Change
from penstock.gateway.model.base import CALLS
from penstock.gateway.model.facts import AGENT_ID, own_attribute
from penstock.gateway.model.rollout import Attempt, Reward
from penstock.gateway.model.span import ParentGuess, Span, SpanNode, SpanStatus, guess_parents
from penstock.gateway.model.tools import ToolUse
from penstock.gateway.reading.diagnosis.sub_agents import told_callers
from penstock.gateway.reading.diagnosis.tool_uses import tools_used
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import unless_damaged

# The cause of a span: the model call whose answer asked for a run of a tool, or the call that a call repeats.
#
# Nothing on the wire tells which answer asked for a run of a tool; `gateway.reading.diagnosis.tool_join` infers it,
# as well as possible when the span is sent. An attempt that has ended is complete, so it is joined once; of another
# one the calls around the run are read.

BEFORE, AFTER = 24, 12
"""Spans before and after a run that are read where its attempt goes on."""
REMEMBERED_CAUSES = 16
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
            if len(self._ended) > REMEMBERED_CAUSES:
                self._ended.popitem(last=False)
        return found


# Finds the agents' spans around calls of attempts that have no root.
#
# An agent's spans come after the calls that were made in them. So only spans that follow a call in its attempt are
# read, once for all calls of a piece of the feed, and an attempt is not read from its beginning again.

LOOKED_AHEAD = 5_000
"""Most spans of an attempt that are read after a call."""
LOOKED_BACK = 1_000
"""Most spans of an attempt that are read before a sub-agent's first call."""
REMEMBERED_PLACES = 256
"""Most attempts whose agents' spans are remembered."""


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
        self._started: OrderedDict[tuple[Name, str], str | None] = OrderedDict()
        """By attempt and sub-agent, the id of the call that started it."""

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
        place = guessed_placement(span, self._guesses[name].get(span.sequence))
        agent: str | None = own_attribute(span, AGENT_ID)
        if agent is not None and place.parent is None and (starter := self._starter(name, agent, span)) is not None:
            return place._replace(parent=starter, inferred=True)
        return place

    def _starter(self, name: Name, agent: str, call: Span) -> str | None:
        """The call that started a sub-agent, by the sub-agent's first call that is placed."""
        if (name, agent) not in self._started:
            first = max(0, call.sequence - LOOKED_BACK)
            before = list(islice(self._tape.spans(*name, (name[1], first)), call.sequence - first))
            starter = told_callers(before).get(call.sequence)
            self._started[name, agent] = next((one.span_id for one in before if one.sequence == starter), None)
            if len(self._started) > REMEMBERED:
                self._started.popitem(last=False)
        return self._started[name, agent]

    def _guess(self, name: Name, calls: list[Span]) -> dict[int, ParentGuess]:
        if not self._has_others(name):
            return {}
        agent = self._agents.setdefault(name, AgentSpans())
        self._agents.move_to_end(name)
        if len(self._agents) > REMEMBERED_PLACES:
            self._agents.popitem(last=False)
        return guess_parents(agent.read(self._tape, name, min(call.sequence for call in calls)), calls)

    def _has_others(self, name: Name) -> bool:
        """True if an attempt has spans other than calls that have ended: most have none."""
        return any(one.id == name[1] and one.spans > one.totals.calls for one in self._tape.attempts(name[0]))


REMEMBERED = 10_000
"""Most attempts that are known to have been sent, and most calls that were sent in their agent's trace."""

Name = tuple[str, str]
"""(rollout, attempt)."""
ExportItem = Attempt | tuple[Span, SpanPlacement]
"""The root of an attempt, or a span."""


class ExportedAttempt(NamedTuple):
    """An attempt that was sent."""

    ended_ns: int
    cursor: int
    """The cursor up to which all its spans were sent."""


class SpanSelector:
    """Chooses spans; for one thread at a time."""

    def __init__(self, tape: Store, wait_s: float, now_ns: Callable[[], int]) -> None:
        self._tape = tape
        self._wait_ns = int(wait_s * 1e9)
        self._now_ns = now_ns
        self._piece: Iterable[Change] = ()
        self._sent: OrderedDict[Name, ExportedAttempt] = OrderedDict()
        self._traces: dict[Name, AttemptTrace] = {}
        self._beside = CallPlacer(tape)
        self._joined: OrderedDict[tuple[str, str, int], str] = OrderedDict()
        self._causes = CauseFinder(tape)
        self._handed_out = lru_cache(maxsize=4096)(self._find_handed_out)

    def refresh(self, piece: Iterable[Change], attempt_goes_on: bool) -> None:
        """Forget what was read, since the tape may have grown. `piece`: the changes that come next; `attempt_goes_on`:
        the first of them has been sent in part."""
        self._piece = piece
        self._beside.forget()
        if not attempt_goes_on:
            self._traces.clear()

    def must_wait(self, change: Change) -> bool:
        """True if spans of a call's agent may still come, which would give the call's place."""
        span = change.span
        if span is None or span.kind not in CALLS or span.parent_id is not None or span.end_ns is None:
            return False
        # A clock that was set back must not hold up the feed.
        recent = 0 <= self._now_ns() - span.end_ns < self._wait_ns
        return recent and not self._handed_out(span.rollout, span.attempt)

    def select(self, change: Change) -> Iterator[ExportItem]:
        attempt, span = change.attempt, change.span
        if attempt is not None and attempt.ended_ns is not None:
            # The attempt was only quiet: an attempt without a worker has no reported end, and its calls have no root.
            if attempt.worker is None and attempt.outcome is None:
                return
            yield from self._ended(attempt, attempt.ended_ns, change.cursor)
        elif span is not None and span.status != SpanStatus.OPEN:
            if self._waits_for_end(span.rollout, span.attempt):
                yield from self._of_attempt(span, change.cursor)
            else:
                yield span, self._linked(span)

    def _waits_for_end(self, rollout: str, attempt: str) -> bool:
        return self._wait_ns > 0 and self._handed_out(rollout, attempt)

    def _find_handed_out(self, rollout: str, attempt: str) -> bool:
        return any(one.id == attempt and one.worker is not None for one in self._tape.attempts(rollout))

    def _ended(self, attempt: Attempt, ended_ns: int, cursor: int) -> Iterator[ExportItem]:
        """The spans of an attempt that has ended. The feed has the attempt at each of its changes: it is sent once, its
        root for each end."""
        name = attempt.rollout, attempt.id
        sent = self._sent.get(name)
        if sent is None and self._waits_for_end(*name):
            yield from self._whole(attempt, ended_ns)
        elif sent is None or sent.ended_ns != ended_ns:
            yield attempt
            self._remember(name, ExportedAttempt(ended_ns, cursor if sent is None else sent.cursor))

    def _of_attempt(self, span: Span, cursor: int) -> Iterator[ExportItem]:
        """A span of an attempt that is sent when it has ended."""
        name = span.rollout, span.attempt
        sent = self._sent.get(name)
        attempt = None if sent is not None else self._attempt(*name)
        if attempt is not None and attempt.ended_ns is not None:
            if span.kind != "reward" or not Reward.of(span).late:
                yield from self._whole(attempt, attempt.ended_ns)
                return
            # The attempt was sent before this gateway started: only spans after its end are still to be sent.
            sent = ExportedAttempt(attempt.ended_ns, cursor - 1)
            self._remember(name, sent)
        if sent is not None and cursor > sent.cursor:
            yield span, self._linked(span)

    def _whole(self, attempt: Attempt, ended_ns: int) -> Iterator[ExportItem]:
        name, cursor = (attempt.rollout, attempt.id), self._tape.cursor()
        yield attempt
        for span in self._tape.spans(*name, (attempt.id, 0)):
            if span.status != SpanStatus.OPEN:
                yield span, self._linked(span)
        self._remember(name, ExportedAttempt(ended_ns, cursor))

    def _remember(self, name: Name, sent: ExportedAttempt) -> None:
        self._sent[name] = sent
        self._sent.move_to_end(name)
        if len(self._sent) > REMEMBERED:
            self._sent.popitem(last=False)

    def _attempt(self, rollout: str, attempt: str) -> Attempt | None:
        return next((one for one in self._tape.attempts(rollout) if one.id == attempt), None)

    # -- the place of a span -----------------------------------------------------------------------------------------

    def _linked(self, span: Span) -> SpanPlacement:
        """The place of a span, with links to its causes."""
        causes = unless_damaged(partial(self._caused, span))
        return self._place(span)._replace(causes=tuple(causes or ()))

    def _caused(self, span: Span) -> list[tuple[str, str, str, str | None]]:
        causes: list[tuple[str, str, str, str | None]] = []
        for cause in islice(self._causes.find(span), MOST_LINKS):
            found = self._tape.span(span.rollout, span.attempt, cause.sequence)
            if found is not None and found.span_id is not None:
                causes.append((self._trace_of(found), found.span_id, cause.link_type, cause.known))
        return causes

    def _trace_of(self, call: Span) -> str:
        """The trace in which a call was sent, or will be."""
        return self._joined.get((call.rollout, call.attempt, call.sequence)) or self._place(call).trace

    def _place(self, span: Span) -> SpanPlacement:
        judged = judged_call(self._tape, span) if span.kind == "reward" else None
        if judged is not None:
            return SpanPlacement(self._trace_of(judged), judged.span_id)
        name = span.rollout, span.attempt
        if self._wait_ns <= 0:
            return original_placement(span, root_id(*name) if self._handed_out(*name) else None)
        return self._one_trace(name).place(span) if self._handed_out(*name) else self._beside_agent(span)

    def _one_trace(self, name: Name) -> AttemptTrace:
        found = self._traces.get(name)
        if found is None:
            agent: list[SpanNode] = []
            calls: list[Span] = []
            for span in self._tape.spans(*name, (name[1], 0)):
                if span.kind == "otel":
                    agent.append(SpanNode.of(span))
                elif span.kind in CALLS and span.parent_id is None:
                    calls.append(span)
            found = self._traces[name] = AttemptTrace(*name, agent, calls)
        return found

    def _beside_agent(self, span: Span) -> SpanPlacement:
        place = self._beside.place(span, (change.span for change in self._piece if change.span is not None))
        if place.inferred:
            self._joined[span.rollout, span.attempt, span.sequence] = place.trace
            if len(self._joined) > REMEMBERED:
                self._joined.popitem(last=False)
        return place


def judged_call(tape: Store, span: Span) -> Span | None:
    """The call that a reward judges; None if it does not judge one call."""
    sequence = Reward.of(span).span
    return None if sequence is None else tape.span(span.rollout, span.attempt, sequence)
