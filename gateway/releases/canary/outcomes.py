"""The outcome of a rollout that takes part in a release: read from the tape once, when its turn has come.

Its turn comes when its reward is there (and, if it came from the queue, its end), when it failed, or when its deadline
has passed. A rollout that failed without a reward counts as the worst; one that was cancelled, or that has seen
both versions, is left out. The outcome is written down (`AssignmentEvidence`) and never read again: a reward that
comes later changes no decision.

A *violation* is an event of that name, `hard` when its attribute of that name is true, or a tool call that a policy did
not let run, `hard` when its rule is. A rollout's *cost* is the dimension `cost` of its newest reward that has one, else
the tokens it has used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from penstock.gateway.model.attributes import POLICY_HARD
from penstock.gateway.model.lifecycle import FINAL
from penstock.gateway.model.release import Assignment, AssignmentEvidence, Pin, Release
from penstock.gateway.model.release_policy import ReleasePolicy
from penstock.gateway.model.rollout import Attempt, Reward, Rollout, RolloutStatus
from penstock.gateway.model.span import POLICY_VIOLATION, Span
from penstock.gateway.releases.canary.evidence import CanaryObservation

VIOLATION = "violation"


class RolloutReader(Protocol):
    """The slice of the tape that is read."""

    def rollout(self, rollout: str, /) -> Rollout | None: ...
    def attempts(self, rollout: str, /) -> list[Attempt]: ...
    def spans(self, rollout: str, attempt: str | None = None, /) -> Iterator[Span]: ...


PinsOf: TypeAlias = Callable[[str], Sequence[Pin]]
"""Returns the pins of a rollout: the versions that it was given."""


def rollout_outcome(
    tape: RolloutReader, pins: Iterable[Pin], release: Release, assignment: Assignment, now: int
) -> AssignmentEvidence | None:
    """The outcome of an assignment now; None while it is awaited. `pins`: the versions that its rollout was given."""
    seen = AssignmentEvidence(number=assignment.number, rollout=assignment.rollout, seen_ns=now)
    if any(pin.mixed and pin.release == release.id for pin in pins):
        return seen.model_copy(update={"left_out": "it fell back to the stable version"})
    rollout, overdue = tape.rollout(assignment.rollout), now >= deadline(release, assignment)
    if rollout is None:
        return seen if overdue else None
    if rollout.status == RolloutStatus.CANCELLED:
        return seen.model_copy(update={"left_out": "it was cancelled"})
    ended = rollout.origin != "queued" or rollout.status in FINAL
    if not (ended or overdue):
        return None
    fill_outcome(tape, release.policy, rollout, seen)
    return seen if seen.reward is not None or overdue else None


def is_hard(kind: str, name: str | None, attributes: Mapping[str, Any] | None) -> bool:
    """True if a span is a hard violation."""
    said = attributes or {}
    return (kind == "event" and name == VIOLATION and said.get("hard") is True) or said.get(POLICY_HARD) is True


def deadline(release: Release, assignment: Assignment) -> int:
    """The time at which an assignment is judged by what is known by then; ns since the epoch."""
    return assignment.assigned_ns + int(release.policy.outcome_deadline_s * 1e9)


def fill_outcome(tape: RolloutReader, policy: ReleasePolicy, rollout: Rollout, seen: AssignmentEvidence) -> None:
    """Fills in reward and guards from the attempts; a failed rollout without a reward gets the worst reward, 0."""
    attempts = tape.attempts(rollout.id)
    seen.group = rollout.group
    rewards, violations = list[tuple[Span, Reward]](), list[Span]()
    for span in tape.spans(rollout.id):
        if span.kind == "reward":
            rewards.append((span, Reward.of(span)))
        elif (span.kind == "event" and span.name == VIOLATION) or span.error == POLICY_VIOLATION:
            violations.append(span)
    _judge(policy, rewards, seen)
    if seen.reward is None and rollout.status == RolloutStatus.FAILED:
        seen.reward = 0.0
    seen.violations = sum(is_hard(span.kind, span.name, span.attributes) for span in violations)
    if not attempts:
        return
    last = attempts[-1]
    failed = rollout.status == RolloutStatus.FAILED or last.totals.errors > 0
    known = {"error": 0.0 if failed else 1.0, "violation": 0.0 if violations else 1.0}
    if policy.guards.latency is not None:
        known["latency"] = policy.guards.latency.goodness(_seconds(last))
    if policy.guards.cost is not None:
        cost = _cost(last, [reward for _, reward in rewards])
        if cost is not None:
            known["cost"] = policy.guards.cost.goodness(cost)
    seen.guards = {name: known[name] for name in policy.guard_alphas if name in known}


def _judge(policy: ReleasePolicy, rewards: Iterable[tuple[Span, Reward]], seen: AssignmentEvidence) -> None:
    """Takes the newest trusted reward of the newest attempt that has one."""
    for span, reward in rewards:
        value = reward.value if policy.reward is None else reward.dimensions.get(policy.reward)
        if reward.trusted and value is not None:
            seen.raw_reward, seen.reward, seen.span = value, policy.goodness(value), f"{span.attempt}#{span.sequence}"


def _seconds(attempt: Attempt) -> float:
    end = attempt.last_seen_ns if attempt.ended_ns is None else attempt.ended_ns
    return max(0, end - attempt.created_ns) / 1e9


def _cost(attempt: Attempt, rewards: list[Reward]) -> float | None:
    """The cost of an attempt; None if tokens were not counted: a lower bound would make it look cheaper than it was."""
    given = [reward.dimensions["cost"] for reward in rewards if reward.trusted and "cost" in reward.dimensions]
    if given or attempt.totals.uncounted:
        return given[-1] if given else None
    return float((attempt.totals.input_tokens or 0) + (attempt.totals.output_tokens or 0))


def observation(assignment: Assignment, seen: AssignmentEvidence) -> CanaryObservation:
    """The outcome of an assignment as the observation that the statistics take."""
    return CanaryObservation(
        number=assignment.number,
        stage=assignment.stage,
        arm=int(assignment.arm == "candidate"),
        probability=assignment.probability,
        reward=seen.reward,
        guards=seen.guards,
        group=seen.group,
        assigned_ns=assignment.assigned_ns,
        violations=seen.violations,
    )
