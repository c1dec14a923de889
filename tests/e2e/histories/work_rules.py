"""The queue: what was answered has happened once, nothing is handed out twice, rewards are there once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from e2e.histories.history import Operation, of
from e2e.histories.tape import Name, Tape

from penstock.gateway.model.rollout import Reward

MAX_ATTEMPTS = 5
"""Of a rollout that nobody queues again."""


def name_of(one: Operation) -> Name:
    """Of an operation: its attempt."""
    return one.asked["rollout"], one.asked["attempt"]


def enqueued(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """What was queued is there, and was made once; what was always refused is not."""
    created, tried = Counter[str](), defaultdict[str, set[str]](set)
    for one in of(history, "enqueue"):
        for rollout in one.asked["rollouts"]:
            tried[rollout].add(one.result)
            created[rollout] += one.result == "ok" and rollout in one.answer["created"]
    for rollout, results in tried.items():
        if "ok" in results and rollout not in tape.rollouts:
            yield f"rollout {rollout} was queued and is not there"
        if results == {"refused"} and rollout in tape.rollouts:
            yield f"rollout {rollout} was refused and is there"
        if created[rollout] > 1:
            yield f"rollout {rollout} was made {created[rollout]} times"
        if results == {"ok"} and not created[rollout]:
            yield f"rollout {rollout} was there before it was queued"


def claims(history: Sequence[Operation]) -> Iterator[tuple[Operation, Name, str]]:
    """Every attempt that a worker was given, with the worker, in the order in which they were answered."""
    for one in sorted(of(history, "claim"), key=lambda claim: claim.end):
        if one.result == "ok":
            for rollout, attempt in one.answer["claims"]:
                yield one, (rollout, attempt), one.asked["worker"]


def claimed(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """No attempt is given to two workers, or twice; each that was given is on the tape, and its worker's."""
    given: dict[Name, Operation] = {}
    for one, name, worker in claims(history):
        if name in given:
            yield f"{name} was given twice: {given[name]} and {one}"
        given[name] = one
        found = tape.attempts.get(name)
        if found is None or found.worker != worker:
            yield f"{name} was given to {worker}; the tape says {found}: {one}"


def leases(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """A rollout is given out again only when its worker has let go of it, or its lease is over.

    A lease that was renewed by an answered request lasts at least so long after that was asked for; the next claim was
    made, at the latest, when it was answered.
    """
    until: defaultdict[Name, list[tuple[float, float]]] = defaultdict(list)
    released = _let_go(history)
    for one, name, _ in claims(history):
        until[name].append((one.end, one.begin + one.asked["lease_s"]))
    for one in of(history, "heartbeat"):
        for name in one.answer.get("held", []):
            until[name[0], name[1]].append((one.end, one.begin + one.asked["lease_s"]))
    for _, before, after in _successors(history):
        claim, (name, second) = after
        # A renewal that was answered after the claim may have come after it, and is the next rule's.
        last = max((end for answered, end in until[name, before] if answered <= claim.begin), default=0.0)
        if claim.end < min(last, released.get((name, before), last)):
            yield f"{name}/{second} was given while {before} had its lease until {last:.3f}: {claim}"


def _let_go(history: Sequence[Operation]) -> dict[Name, float]:
    """When each attempt's worker has let go of it: it told its end, or named only others that it holds. That it was
    refused, or not answered, is no matter."""
    released = dict[Name, float]()
    beats: defaultdict[str, list[Operation]] = defaultdict(list)
    for one in of(history, "heartbeat"):
        beats[one.actor].append(one)
    for claim, name, worker in claims(history):
        for one in beats[worker]:
            if one.begin >= claim.end and list(name) not in one.asked["names"]:
                released[name] = one.begin
                break
    for one in of(history, "finish"):
        released[name_of(one)] = min(one.begin, released.get(name_of(one), one.begin))
    return released


def _successors(history: Sequence[Operation]) -> Iterator[tuple[Operation, str, tuple[Operation, Name]]]:
    """(claim, attempt) and the one that was given next of the same rollout."""
    by_rollout: defaultdict[str, list[tuple[Operation, Name]]] = defaultdict(list)
    for one, name, _ in claims(history):
        by_rollout[name[0]].append((one, name))
    for found in by_rollout.values():
        # The names count attempts, whichever answer came first.
        for first, second in pairwise(sorted(found, key=lambda pair: int(pair[1][1][1:]))):
            yield first[0], first[1][1], second


def superseded(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """Once a rollout is in other hands, whoever had it before neither keeps it nor ends it well."""
    held = [(one, (name[0], name[1])) for one in of(history, "heartbeat") for name in one.answer.get("held", [])]
    said: dict[Name, Operation] = {}
    for one in of(history, "finish"):
        if one.result != "refused" and one.asked["status"] == "succeeded":
            said.setdefault(name_of(one), one)
    # The end that it has may be told again for ever.
    good = [(one, name) for name, one in said.items() if one.result == "ok"]
    late: defaultdict[Name, list[Operation]] = defaultdict(list)
    for one, name in held + good:
        late[name].append(one)
    for _, before, (claim, (rollout, second)) in _successors(history):
        for one in late[rollout, before]:
            if one.begin > claim.end:
                yield f"{rollout}/{before} went on after {second} was given ({claim}): {one}"


def finished(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """The end that was answered is the end."""
    for one in of(history, "finish"):
        found = tape.attempts.get(name_of(one))
        if one.result == "ok" and (found is None or found.status != one.asked["status"]):
            yield f"ended as {one.asked['status']}; the tape says {found}: {one}"


def rewarded(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """A reward that was answered is there once, one that was only refused is not, any other is at most once."""
    there = Counter[tuple[str, str, str]]()
    for span in tape.spans:
        if span.kind == "reward":
            there[span.rollout, span.attempt, str(Reward.of(span).key)] += 1
    tried: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for one in of(history, "finish", "reward"):
        tried[*name_of(one), one.asked["key"]].add(one.result)
    for key, results in tried.items():
        count = there.pop(key, 0)
        if count > 1 or ("ok" in results and not count) or (results == {"refused"} and count):
            yield f"the reward {key} was answered with {sorted(results)}, and is there {count} times"
    yield from (f"the reward {key} was never given" for key in there)
