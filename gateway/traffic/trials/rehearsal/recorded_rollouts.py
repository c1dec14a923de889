"""Recorded rollouts that can be rehearsed: their input is known, they succeeded, and they ended with words. Runs on
threads; only reads the tape.

The newest rollouts that used the resource are drawn, found as `recorded_calls` finds calls, without those in which the
candidate has answered a call; their order follows from the seed. A rollout cannot be rehearsed if its provider ran
tools by itself, or if it ended with a tool call that nobody answered (some agents hand over their result in a tool
call): the judge compares the last answer, and no agent may see a tool call in a rehearsal.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from penstock.gateway.model.release import Release
from penstock.gateway.model.release_calls import is_release_call
from penstock.gateway.model.rollout import Rollout, RolloutStatus
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.turn import Turn
from penstock.gateway.reading.turns import decode_exchange, read_exchange
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.damage import unless_damaged
from penstock.gateway.traffic.trials.rehearsal.recorded_tools import Cassette
from penstock.gateway.traffic.trials.replay.agreement import next_action
from penstock.gateway.traffic.trials.replay.outbound_requests import unrepeatable
from penstock.gateway.traffic.trials.replay.recorded_calls import DAMAGED, HISTORY, ReplayableCall, ReplaySource
from penstock.gateway.wire.dialects import by_name


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A recorded rollout that is rehearsed."""

    rollout: Rollout
    cassette: Cassette
    last: Turn
    """Its last answered exchange, which the judge compares."""

    @property
    def name(self) -> str:
        """The name of the recorded attempt: ROLLOUT/ATTEMPT."""
        return f"{self.rollout.id}/{self.rollout.attempt}"


@dataclass(slots=True)
class RolloutDraw:
    """The recorded rollouts to rehearse."""

    found: list[RecordedRollout] = field(default_factory=list[RecordedRollout])
    """The originals in the order in which they are rehearsed."""
    passed_over: Counter[str] = field(default_factory=Counter[str])
    """Numbers of rollouts that used the resource and cannot be rehearsed, by reason."""


def draw(tape: Store, release: Release, recordings: ReplaySource, stopped: Callable[[], bool]) -> RolloutDraw:
    """Return as many originals as the policy wants, at most. `stopped`: called between rollouts; True when nobody wants
    them any more."""
    drawn = RolloutDraw()
    for _, rollout in islice(tape.rollouts(), HISTORY):
        if stopped() or len(drawn.found) >= release.policy.replay.closed_loop:
            break
        found = unless_damaged(partial(_original, tape, release, recordings, rollout))
        one = DAMAGED if found is None else found
        if isinstance(one, RecordedRollout):
            drawn.found.append(one)
        elif one:
            drawn.passed_over[one] += 1
    random.Random(f"{release.salt}/rehearsal").shuffle(drawn.found)
    return drawn


def _original(tape: Store, release: Release, recordings: ReplaySource, rollout: Rollout) -> RecordedRollout | str:
    """Return the original; else the reason why it cannot be rehearsed, empty when it is not eligible."""
    ended = rollout.ended_ns is not None and rollout.ended_ns <= release.changed_ns
    if rollout.status != RolloutStatus.SUCCEEDED or not ended or not _told(tape, rollout):
        return ""
    spans = [span for span in tape.spans(rollout.id, rollout.attempt) if span.kind == "llm"]
    tried = release.arm_versions("candidate").items()
    if any(is_release_call(span) or not tried.isdisjoint((span.versions or {}).items()) for span in spans):
        return ""
    used = (span for span in spans if recordings.qualifies(span, rollout))
    if not any(isinstance(recordings.open(span), ReplayableCall) for span in used):
        return ""
    if rollout.input is None:
        return "it has no input"
    return _read(tape, rollout, [span for span in spans if is_comparable(span)])


def _told(tape: Store, rollout: Rollout) -> bool:
    """True if the end of a rollout was reported, not guessed from its silence."""
    return rollout.origin == "queued" or any(one.outcome is not None for one in tape.attempts(rollout.id))


def is_comparable(span: Span) -> bool:
    """True if the span is a call whose answer can be compared."""
    good = span.kind == "llm" and span.status == SpanStatus.OK and bool(span.choices)
    return good and by_name(span.dialect).generates


def _read(tape: Store, rollout: Rollout, spans: list[Span]) -> RecordedRollout | str:
    turns: list[Turn] = []
    for span in spans:
        exchange = tape.exchange(span)
        if exchange is None or span.truncated:
            return "its bytes were not kept"
        problem = unrepeatable(by_name(span.dialect), decode_exchange(exchange).request_body)
        if problem is not None:
            return problem
        turns.append(read_exchange(span.dialect, exchange, span))
    last = turns[spans.index(last_answered(spans))]
    did = next_action(last)
    if did is None:
        return "its last answer cannot be read"
    if did.calls:
        return f"it ended with a call of {did.calls[0][0]}, which nobody answered"
    return RecordedRollout(rollout, Cassette.of(turns), last)


def last_answered(spans: list[Span]) -> Span:
    """Return the answered call whose answer came last."""
    return max(spans, key=lambda span: span.end_ns or 0)
