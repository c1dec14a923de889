"""The change feed: gapless, ordered, the same for everybody, across every reconnection and process."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from e2e.histories.history import Operation, of
from e2e.histories.tape import Tape

from penstock.gateway.model.rollout import ATTEMPT_MOVES, FINAL, ROLLOUT_MOVES, AttemptStatus, RolloutStatus

S = TypeVar("S", RolloutStatus, AttemptStatus)


def followed(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """A follower is told every change after the cursor that it came with, in order, as the tape has it in the end. That
    a call began is told only until it has ended."""
    cursors = sorted(tape.feed)
    ends = {what: cursor for cursor, what in sorted(tape.feed.items()) if what.startswith("span ")}
    at, begun = dict[str, int](), dict[int, str]()
    for one in of(history, "follow", "change"):
        if one.kind == "follow":
            at[one.actor] = one.asked["since"]
            if one.asked.get("refused"):
                yield f"the cursor that a follower had is not known any more: {one}"
            continue
        cursor, what, before = one.asked["cursor"], one.asked["what"], at[one.actor]
        at[one.actor] = cursor
        if cursor <= before:
            yield f"{one.actor} was told of {cursor} after {before}"
        elif missed := cursors[bisect_right(cursors, before) : bisect_left(cursors, cursor)]:
            yield f"{one.actor} was told of {cursor} after {before}, and not of {missed}"
        is_begin = cursor not in tape.feed and one.asked["status"] == "open" and ends.get(what, 0) > cursor
        there = begun.setdefault(cursor, what) if is_begin else tape.feed.get(cursor)
        if there != what:
            yield f"{one.actor} was told of {what} at {cursor}, where others see {there}"


def numbered(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """Cursors count changes: what the tape does not tell any more are beginnings of calls, one for each at most, and
    one more where the answer came in another exchange than the question."""
    calls = sum(span.kind in ("llm", "tool", "mcp") for span in tape.spans)
    calls += sum(one.asked["tool"] == "later" for one in of(history, "tool"))
    missing = max(tape.feed, default=0) - len(tape.feed)
    if missing > calls:
        yield f"{missing} cursors of the feed are not there, and there are {calls} calls"


def _reachable(moves: Mapping[S, Mapping[S, str]], final: Collection[S]) -> dict[str, set[str]]:
    """Where each state may be later."""
    found: dict[str, set[str]] = {
        before: {before} if before in final else {before, *after} for before, after in moves.items()
    }
    for _ in moves:
        for before, after in found.items():
            found[before] = after.union(*(found[one] for one in after))
    return found


ROLLOUTS, ROLLOUTS_AGAIN = _reachable(ROLLOUT_MOVES, FINAL), _reachable(ROLLOUT_MOVES, ())
"""What has ended stays, unless it is queued again."""
ATTEMPTS = _reachable(ATTEMPT_MOVES, (AttemptStatus.SUCCEEDED, AttemptStatus.FAILED))


def moves(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """Rollouts and attempts of the queue go from state to state as the tables say, as every follower sees it and to the
    end. A change says how its subject stands when it is read, so some states are not seen."""
    queued = {rollout for one in of(history, "enqueue") for rollout in one.asked["rollouts"]}
    again = {one.asked["rollout"] for one in of(history, "requeue") if one.result != "refused"}
    seen: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for one in of(history, "change"):
        if one.asked["what"].startswith(("rollout ", "attempt ")) and _rollout(one.asked["what"]) in queued:
            seen[one.actor, one.asked["what"]].append(one.asked["status"])
    for (actor, what), states in seen.items():
        of_rollout = ROLLOUTS_AGAIN if _rollout(what) in again else ROLLOUTS
        table = of_rollout if what.startswith("rollout ") else ATTEMPTS
        for before, after in pairwise([*states, *_now(what, tape)]):
            if after not in table[before]:
                yield f"{what} went from {before} to {after}, as {actor} saw it"


def _rollout(what: str) -> str:
    return what.split(" ")[1].partition("/")[0]


def _now(what: str, tape: Tape) -> list[str]:
    kind, _, name = what.partition(" ")
    if kind == "rollout":
        return [tape.rollouts[name]]
    rollout, _, attempt = name.partition("/")
    return [tape.attempts[rollout, attempt].status]
