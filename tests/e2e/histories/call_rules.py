"""Every call that was answered is on the tape once; every other one at most once, and nothing that nobody asked for.

A call names itself by the parent in its `traceparent`, which its span keeps whatever becomes of the answer. What a kill
may take away is what docs/reliability.md says: with `record = "strict"` nothing that an upstream has seen; by default
the calls and ends of calls of the last moments. But a finished or rewarded attempt is complete: a call whose answer was
there before its attempt's end or a reward of it was asked for, and answered, is not lost by a kill that comes later.
While the disk is full calls go on without the tape, and their spans are kept in memory until it takes them: a kill then
takes those away, with either setting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from e2e.histories.history import Operation, of
from e2e.histories.tape import Name, Tape

from penstock.gateway.model.span import Span, SpanStatus

MOMENT_S = 5.0
"""A last moment: 0.25 s, the commit, and what a busy machine makes of them."""
FULL_KILL = "full disk, kill"
KILLS = frozenset(
    {"kill", "kill a worker", "reload, kill the old one", "reload, kill the new one", FULL_KILL, "clock, kill"}
)
SEEN_S = 0.5
"""Where another process serves at once, a client may see a moment later that its own has died."""


def calls(history: Sequence[Operation], tape: Tape, strict: bool) -> Iterator[str]:
    """See the module."""
    asked = {one.asked["call"]: one for one in of(history, "call")}
    spans, losses = _spans(tape), Losses(history, strict)
    for name in spans.keys() - asked.keys():
        yield f"{_where(spans[name][0])} was never asked for"
    for name, one in asked.items():
        found = spans.get(name, [])
        if len(found) > 1:
            yield f"on the tape {len(found)} times: {one}"
        elif found:
            yield from _as_it_was(one, found[0], losses)
        elif _needed(one, tape) and not losses.may_have_taken(one, one.begin):
            yield f"lost: {one}"


def _spans(tape: Tape) -> dict[str, list[Span]]:
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for span in tape.spans:
        if span.kind == "llm":
            found[str(span.parent_id)].append(span)
    return found


def _where(span: Span) -> str:
    return f"{span.rollout}/{span.attempt}#{span.sequence} ({span.status})"


def _needed(one: Operation, tape: Tape) -> bool:
    """It was answered, or an upstream has seen it."""
    return one.result == "ok" or one.asked["call"] in tape.seen


def _as_it_was(one: Operation, span: Span, losses: Losses) -> Iterator[str]:
    where = _where(span)
    if (span.rollout, span.attempt) != (one.asked["rollout"], one.asked["attempt"]):
        yield f"{where} has another address: {one}"
    if span.status == SpanStatus.OPEN:
        yield f"{where} has no end: {one}"
    if one.result != "ok":
        return
    lost = span.status == SpanStatus.INTERRUPTED and losses.may_have_taken(one, one.end)
    if span.status != SpanStatus.OK and not lost:
        yield f"{where} was answered: {one}"
    if span.status == SpanStatus.OK and span.body is not None and span.response_id != f"chatcmpl-{one.asked['call']}":
        yield f"{where} has the answer {span.response_id} of another call: {one}"


class Losses:
    """What kills may have taken away."""

    def __init__(self, history: Sequence[Operation], strict: bool) -> None:
        self._kills = [one for one in of(history, "fault") if one.asked["what"] in KILLS]
        self._lossy = [one for one in self._kills if not strict or one.asked["what"] == FULL_KILL]
        self._complete: defaultdict[Name, list[Operation]] = defaultdict(list)
        for one in of(history, "finish", "reward"):
            if one.result == "ok":
                self._complete[one.asked["rollout"], one.asked["attempt"]].append(one)

    def may_have_taken(self, one: Operation, since: float) -> bool:
        """A call whose beginning or end, at `since`, was in a last moment, and that no end of its attempt, answered by
        the same gateway, has made durable."""
        in_time = any(kill.begin - MOMENT_S <= since <= kill.end + SEEN_S for kill in self._lossy)
        return in_time and not any(
            end.begin >= one.end
            and not any(kill.begin <= end.end and one.end <= kill.end + SEEN_S for kill in self._kills)
            for end in self._complete[one.asked["rollout"], one.asked["attempt"]]
        )
