"""Every call that was answered is on the tape once; every other one at most once, and nothing that nobody asked for.
Calls are of models and of tools.

A call names itself by the parent in its `traceparent`, which its span keeps whatever becomes of the answer. What a kill
may take away is what docs/reliability.md says: with `record = "strict"` nothing that an upstream has seen; by default
the calls and ends of calls of the last moments. But a finished or rewarded attempt is complete: a call whose answer was
there before its attempt's end or a reward of it was asked for, and answered, is not lost by a kill that comes later.
While the disk is full calls go on without the tape, and their spans are kept in memory until it takes them: a kill then
takes those away, with either setting.

A tool whose answer came in another exchange than it was asked in is answered for the tape only if one process has seen
both (docs/operations.md, "Upgrade and reload").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from e2e.histories.history import Operation, of
from e2e.histories.tape import Name, Tape
from e2e.histories.tool_server import text_of

from penstock.gateway.model.span import Span, SpanStatus

End: TypeAlias = tuple[str, str | None]
"""Status and error."""
MOMENT_S = 5.0
"""A last moment: 0.25 s, the commit, and what a busy machine makes of them."""
FULL_KILLS = frozenset({"full disk, kill", "full disk, kill a worker", "no space, kill"})
KILLS = FULL_KILLS | {"kill", "kill a worker", "reload, kill the old one", "reload, kill the new one", "clock, kill"}
NEW_PROCESSES = KILLS | {"reload", "clock, reload", "stop"}
"""After which another process serves."""
KINDS = {"call": "llm", "tool": "tool"}
"""Of operations and their spans."""
OK: End = ("ok", None)
ENDS: dict[str | None, End] = {"fails": ("error", "tool_error")}
"""How a tool ends on the tape that was answered, where that is another end."""
SEEN_S = 0.5
"""Where another process serves at once, a client may see a moment later that its own has died."""


def calls(history: Sequence[Operation], tape: Tape, strict: bool) -> Iterator[str]:
    """See the module."""
    losses = Losses(history, strict)
    for kind, of_span in KINDS.items():
        asked = {one.asked["call"]: one for one in of(history, kind)}
        spans = _spans(tape, of_span)
        for name in spans.keys() - asked.keys():
            yield f"{_where(spans[name][0])} was never asked for"
        for name, one in asked.items():
            found = spans.get(name, [])
            if len(found) > 1:
                yield f"on the tape {len(found)} times: {one}"
            elif found:
                yield from _as_it_was(one, found[0], losses)
                yield from _own_answer(one, found[0], tape)
            elif _needed(one, tape) and not losses.may_have_taken(one, one.begin):
                yield f"lost: {one}"


def _spans(tape: Tape, kind: str) -> dict[str, list[Span]]:
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for span in tape.spans:
        if span.kind == kind:
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
    if _end(span) != ENDS.get(one.asked.get("tool"), OK) and not lost and not losses.were_two(one):
        yield f"{where} was answered: {one}"


def _end(span: Span) -> End:
    return str(span.status), span.error


def _own_answer(one: Operation, span: Span, tape: Tape) -> Iterator[str]:
    name = one.asked["call"]
    if one.kind == "tool" and one.result == "ok" and one.answer["text"] != text_of(name):
        yield f"it was answered {one.answer['text']!r}: {one}"
    if span.body is None or _end(span) != ENDS.get(one.asked.get("tool"), OK):
        return
    if one.kind == "call" and span.response_id != f"chatcmpl-{name}":
        yield f"{_where(span)} has the answer {span.response_id} of another call: {one}"
    if one.kind == "tool" and tape.answers.get(name) != text_of(name):
        yield f"{_where(span)} has the answer {tape.answers.get(name)!r} of another call: {one}"


class Losses:
    """What kills may have taken away."""

    def __init__(self, history: Sequence[Operation], strict: bool) -> None:
        self._kills = [one for one in of(history, "fault") if one.asked["what"] in KILLS]
        self._lossy = [one for one in self._kills if not strict or one.asked["what"] in FULL_KILLS]
        self._processes = [one for one in of(history, "fault") if one.asked["what"] in NEW_PROCESSES]
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

    def were_two(self, one: Operation) -> bool:
        """Whether the answer may have passed another process than the question."""
        moved = any(fault.begin <= one.end and one.begin <= fault.end + SEEN_S for fault in self._processes)
        return one.asked.get("tool") == "later" and moved
