"""What an operator asked of rollouts was done once, and what it superseded changes nothing any more.

The audit log has an entry for everything that was done, by the name that its operation gave as its reason, in the order
in which it was done. One that found a rollout as it was to be has no entry.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from e2e.histories.history import Operation, of
from e2e.histories.tape import Name, Tape
from e2e.histories.work_rules import MAX_ATTEMPTS, claims, name_of

from penstock.gateway.model.rollout import LIVE, WAITING, Attempt, AttemptStatus, RolloutStatus

ACTIONS = {"cancel_rollout": "cancel", "requeue_rollout": "requeue"}
LOST = frozenset({AttemptStatus.FAILED, AttemptStatus.UNRESPONSIVE})
"""Ends after which a rollout waits again by itself, or has failed."""
Done: TypeAlias = Mapping[str, list[Operation]]
"""By rollout: what was done to it, in order."""


def audited(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """Entries count on from 1; each is of an operation that was not refused, and none has two."""
    if [one.number for one in tape.audit] != list(range(1, len(tape.audit) + 1)):
        yield f"the audit log counts {[one.number for one in tape.audit]}"
    asked = {one.asked["why"]: one for one in of(history, *ACTIONS.values())}
    there = Counter(one.why for one in tape.audit if one.action in ACTIONS)
    for entry in tape.audit:
        one = asked.get(entry.why)
        if entry.action in ACTIONS and (
            one is None or (one.kind, one.asked["rollout"]) != (ACTIONS[entry.action], entry.target)
        ):
            yield f"{entry.action} of {entry.target} ({entry.why}) was never asked for"
    for why, one in asked.items():
        if there[why] > (one.result != "refused"):
            yield f"done {there[why]} times: {one}"


def answered(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """What was answered was done, unless the rollout stood so already."""
    done, there = _done(history, tape), {one.why for one in tape.audit}
    attempts = _by_rollout(tape)
    leases = _leases(history)
    first = {name[0]: claim for claim, name, _ in reversed(list(claims(history)))}
    for one in of(history, *ACTIONS.values()):
        rollout = one.asked["rollout"]
        if one.result != "ok" or one.asked["why"] in there:
            continue
        stood = any(
            before.kind == one.kind and before.begin <= one.end and (after is None or after.end >= one.begin)
            for before, after in pairwise([*done[rollout], None])
            if before is not None
        )
        if one.kind == "requeue":
            stood = stood or rollout not in first or first[rollout].end >= one.begin
            stood = stood or any(attempt.status in (*LOST, AttemptStatus.ENVIRONMENT) for attempt in attempts[rollout])
            # Its worker has come back since.
            stood = stood or max(end for begin, end in leases[rollout] if begin < one.begin) < one.end
        if not stood:
            yield f"answered and not done: {one}"


def requeued(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """A rollout that was queued again waits, or was given to somebody, revived by its last worker, or cancelled."""
    answered = {name for _, name, _ in claims(history)}
    unanswered = {name[0] for name, one in tape.attempts.items() if one.worker and name not in answered}
    later: defaultdict[str, float] = defaultdict(float)
    for claim, name, _ in claims(history):
        later[name[0]] = max(later[name[0]], claim.end)
    for one in of(history, "call", "tool", "finish", "cancel"):
        if one.result != "refused" or one.kind in ("call", "tool"):
            later[one.asked["rollout"]] = max(later[one.asked["rollout"]], one.end)
    for one in of(history, "heartbeat"):
        for rollout, _ in one.answer.get("held", []):
            later[rollout] = max(later[rollout], one.end)
    for one in of(history, "requeue"):
        rollout = one.asked["rollout"]
        waits = tape.rollouts.get(rollout) in WAITING
        if one.result == "ok" and not waits and rollout not in unanswered and later[rollout] < one.begin:
            yield f"the rollout is {tape.rollouts.get(rollout)}, and nobody was given it: {one}"


def once(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """Another attempt after one that had succeeded or was cancelled, or after the last try, takes somebody who asked
    for it, each time."""
    requeues = Counter(one.target for one in tape.audit if one.action == "requeue_rollout")
    for rollout, attempts in _by_rollout(tape).items():
        ends = [one.status for one in attempts]
        again = sum(end in (AttemptStatus.SUCCEEDED, AttemptStatus.CANCELLED) for end in ends[:-1])
        tries = sum(end != AttemptStatus.ENVIRONMENT for end in ends) - MAX_ATTEMPTS
        if max(again, tries) > requeues[rollout]:
            yield f"{rollout} was queued again {requeues[rollout]} times, its attempts are {[str(end) for end in ends]}"


def standing(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """A rollout stands as its last attempt, or its operator, has left it: no attempt before that changes anything."""
    done = _done(history, tape)
    for rollout, attempts in _by_rollout(tape).items():
        stands, last = tape.rollouts[rollout], attempts[-1].status
        by = done[rollout][-1].kind if done[rollout] else None
        good = {
            RolloutStatus.SUCCEEDED: last == AttemptStatus.SUCCEEDED,
            RolloutStatus.FAILED: last in LOST,
            RolloutStatus.CANCELLED: by == "cancel",
        }.get(RolloutStatus(stands), last in LIVE)
        if stands in WAITING:
            good = last in (*LOST, AttemptStatus.ENVIRONMENT) or by == "requeue"
        if not good or (by == "cancel" and stands != RolloutStatus.CANCELLED):
            yield f"{rollout} is {stands}, its last attempt is {last}, and it was told to {by}"
        for one in attempts[:-1]:
            if one.status in LIVE:
                yield f"{rollout}/{one.id} is {one.status}, and {attempts[-1].id} was given"


def cancelled(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """A rollout that was cancelled is not given to anybody, and nobody goes on with it, until it is queued again."""
    late: defaultdict[str, list[Operation]] = defaultdict(list)
    for claim, name, _ in claims(history):
        late[name[0]].append(claim)
    for one, name in _held(history):
        late[name[0]].append(one)
    for name, one in _first_ends(history).items():
        late[name[0]].append(one)
    for rollout, done in _done(history, tape).items():
        for one, after in pairwise([*done, None]):
            until = float("inf") if after is None or after.kind == "cancel" else after.begin
            if one is None or one.kind != "cancel":
                continue
            for more in late[rollout]:
                if one.end < more.begin and more.end < until:
                    yield f"{rollout} was cancelled ({one}), and after that: {more}"
        over = max((one.end for one in done if one.kind == "cancel"), default=float("inf"))
        for one, name in _held(history):
            ended = name[0] == rollout and tape.attempts[name].status == AttemptStatus.CANCELLED
            if ended and one.begin > over:
                yield f"{name[0]}/{name[1]} was cancelled, and went on: {one}"


def _done(history: Sequence[Operation], tape: Tape) -> defaultdict[str, list[Operation]]:
    asked = {one.asked["why"]: one for one in of(history, *ACTIONS.values())}
    found: defaultdict[str, list[Operation]] = defaultdict(list)
    for entry in tape.audit:
        if entry.action in ACTIONS and entry.why in asked:
            found[entry.target].append(asked[entry.why])
    return found


def _by_rollout(tape: Tape) -> defaultdict[str, list[Attempt]]:
    """The attempts that workers had, in the order in which they were given."""
    found: defaultdict[str, list[Attempt]] = defaultdict(list)
    for (rollout, _), one in sorted(tape.attempts.items(), key=lambda item: item[1].sequence):
        if one.worker:
            found[rollout].append(one)
    return found


def _held(history: Sequence[Operation]) -> list[tuple[Operation, Name]]:
    return [(one, (name[0], name[1])) for one in of(history, "heartbeat") for name in one.answer.get("held", [])]


def _leases(history: Sequence[Operation]) -> defaultdict[str, list[tuple[float, float]]]:
    """By rollout: when each lease was asked for, and until when it lasts at least."""
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for one, (rollout, _) in [*((claim, name) for claim, name, _ in claims(history)), *_held(history)]:
        found[rollout].append((one.begin, one.begin + one.asked["lease_s"]))
    return found


def _first_ends(history: Sequence[Operation]) -> dict[Name, Operation]:
    """The first time that each end was asked for, where that was answered: the same end may be told again for ever."""
    first: dict[Name, Operation] = {}
    for one in of(history, "finish"):
        if one.result != "refused":
            first.setdefault(name_of(one), one)
    return {name: one for name, one in first.items() if one.result == "ok"}
