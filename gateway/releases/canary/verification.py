"""Replays a canary from the tape: when a gateway starts, and to verify a canary that ran.

Both feed the same observations in the same order to the same `Canary`, together with the decisions of people. So each
decision is made again with the same figures, bit for bit. `verify` reports everything that does not agree: the chain of
hashes, the assignment by hash, the observations, the decisions, and the evidence on which people decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from penstock.gateway.model.coverage import Coverage
from penstock.gateway.model.release import Assignment, AssignmentEvidence, AuditTrailEntry, Release
from penstock.gateway.model.resource import GATEWAY
from penstock.gateway.releases.canary import unit
from penstock.gateway.releases.canary.assignment import share
from penstock.gateway.releases.canary.coverage import MOST, UNLIKELY, WINDOW, baseline_rate, likelihood
from penstock.gateway.releases.canary.decision import Canary, Verdict, figures
from penstock.gateway.releases.canary.early_errors import as_of
from penstock.gateway.releases.canary.evidence import CanaryEvidence
from penstock.gateway.releases.canary.outcomes import observation
from penstock.gateway.releases.canary.stages import MoveError, check_move

BY_RULE = ("advance", "promote", "roll_back", "hold")
"""Verdicts that move a release; the chain's actions have the same names."""
OUT_OF_TURN = "violations"
"""Key of the evidence of a rollback that did not wait for its turn."""
UNCOVERED = "uncovered"
"""Key of the resource in the evidence of a hold because fewer rollouts matched it than before."""
SPLIT = "split"
"""Key of the share of new rollouts that got the candidate when a person decided."""


class CanaryDecision(NamedTuple):
    """A verdict that moves a release, or makes it wait for a person."""

    counted: int
    """Number of the assignment that was counted last."""
    action: str
    verdict: Verdict
    early: int = 0
    """Number of the assignment with the latest early look."""


def decision_of(verdict: Verdict, counted: int, early: int = 0) -> CanaryDecision | None:
    """The decision in a verdict; None while the release continues as it is."""
    if verdict.action in BY_RULE:
        return CanaryDecision(counted, verdict.action, verdict, early)
    return CanaryDecision(counted, "wait", verdict, early) if verdict.cause == "approval" else None


class ReplayStep(NamedTuple):
    """A step of the replay."""

    counted: int
    """Number of the assignment that was counted last."""
    early: int
    """Number of the assignment with the latest early look."""
    verdict: Verdict | None
    """The verdict after the step; None for a rollout that is left out, or that the canary did not see because it had
    ended."""
    person: bool = False
    """Whether a person's action caused the step."""


def replay_decisions(
    canary: Canary, assigned: Sequence[Assignment], seen: Sequence[AssignmentEvidence], audit: Sequence[AuditTrailEntry]
) -> Iterator[CanaryDecision]:
    """Steps a canary through everything that was counted and every action of a person; yields its decisions as they
    come."""
    waits = False
    for counted, early, verdict, person in replay_steps(canary, assigned, seen, audit):
        if verdict is None:
            continue
        found = decision_of(verdict, counted, early)
        waiting = found is not None and found.action == "wait"
        if found is not None and not (waiting and (waits or person)):
            yield found
        waits = waiting and not person


def replay_steps(
    canary: Canary, assigned: Sequence[Assignment], seen: Sequence[AssignmentEvidence], audit: Sequence[AuditTrailEntry]
) -> Iterator[ReplayStep]:
    """Yields every step of a canary in the order in which it was made. Each early look records how many outcomes had
    been counted before it."""
    people = [entry for entry in audit if entry.who != GATEWAY and entry.action in ("approve", "resume")]
    looks = [one.early for one in assigned if one.early is not None]
    counted = early = 0
    yield from _persons(canary, people, counted, early)
    while counted < len(seen) or early < len(looks):
        if early < len(looks) and looks[early].counted <= counted:
            early += 1
            yield ReplayStep(counted, early, apply_early_look(canary, assigned[early - 1]))
        elif counted < len(seen):
            counted += 1
            one = seen[counted - 1]
            looked_at = one.left_out is None and not canary.ended
            verdict = canary.step(observation(assigned[counted - 1], one)) if looked_at else None
            yield ReplayStep(counted, early, verdict)
        else:
            return
        yield from _persons(canary, people, counted, early)


def apply_early_look(canary: Canary, assignment: Assignment) -> Verdict | None:
    """Gives a canary the early look at an assignment; None when it has no effect on it."""
    seen = assignment.early
    if canary.ended or seen is None or seen.good is None:
        return None
    return canary.step_early(assignment.number, int(assignment.arm == "candidate"), assignment.probability, seen.good)


def _persons(canary: Canary, people: Iterable[AuditTrailEntry], counted: int, early: int) -> Iterator[ReplayStep]:
    for entry in people:
        if (entry.assignment, entry.early) == (counted, early):
            verdict = apply_action(canary, entry.action)
            if verdict is not None:
                yield ReplayStep(counted, early, verdict, person=True)


def apply_action(canary: Canary, action: str) -> Verdict | None:
    """Applies a person's action to a canary; None when it has no effect on it."""
    if action == "approve" and not canary.ended:
        return canary.approve()
    if action == "resume" and canary.verdict.action == "hold":
        return canary.resume()
    return None


def add_outcomes(evidence: CanaryEvidence, counted: Iterable[tuple[Assignment, AssignmentEvidence]]) -> CanaryEvidence:
    """The same evidence, with the rollouts added that were counted since."""
    for assignment, one in counted:
        if one.left_out is None and one.number > evidence.number:
            evidence.add(observation(assignment, one))
    return evidence


def add_early_looks(evidence: CanaryEvidence, assigned: Iterable[Assignment]) -> CanaryEvidence:
    """The same evidence, with the early looks added that were made since."""
    for one in assigned:
        if one.early is not None and one.early.good is not None and one.number > evidence.early:
            evidence.add_early(one.number, int(one.arm == "candidate"), one.probability, one.early.good)
    return evidence


def empty_evidence(release: Release) -> CanaryEvidence:
    """The evidence on a release before anything was counted."""
    return Canary.of(release).evidence


def coverage_figures(coverage: Coverage) -> dict[str, Any]:
    """The figures that show the fall of the coverage, for the audit entry."""
    recent = coverage.recent
    return {"matched": recent.count("+"), "rollouts": len(recent), "before": baseline_rate(coverage)}


def _has_fallen(evidence: Mapping[str, Any]) -> bool:
    """True if a hold for the coverage follows from its evidence."""
    try:
        matched, rollouts, before = int(evidence["matched"]), int(evidence["rollouts"]), float(evidence["before"])
    except (KeyError, TypeError, ValueError):
        return False
    return 0 <= matched <= rollouts <= WINDOW and likelihood(matched, rollouts, min(before, MOST)) < UNLIKELY


def circumstances(evidence: CanaryEvidence, split: float) -> dict[str, Any]:
    """The figures of the moment in which a person decided, for the audit entry."""
    return figures(evidence) | {SPLIT: split}


def verify(
    release: Release,
    assigned: Sequence[Assignment],
    seen: Sequence[AssignmentEvidence],
    audit: Sequence[AuditTrailEntry],
) -> Iterator[str]:
    """A sentence for everything on the tape that does not agree."""
    assigned = as_of(release, assigned)
    yield from _chain(release, audit)
    yield from _assignments(release, assigned)
    if [one.number for one in seen] != list(range(1, release.counted + 1)):
        yield f"{len(seen)} of {release.counted} observations are there, or they are not in order"
        return
    for assignment, one in zip(assigned, seen, strict=False):
        if assignment.rollout != one.rollout:
            yield f"assignment {one.number} is {assignment.rollout}, what was seen is of {one.rollout}"
    yield from unit.problems(release, assigned, seen)
    yield from _decisions(release, assigned, seen, audit)
    yield from _people(release, assigned, seen, audit)


def _chain(release: Release, audit: Sequence[AuditTrailEntry]) -> Iterator[str]:
    previous, stage = "", None
    for number, entry in enumerate(audit, 1):
        if entry.number != number:
            yield f"entry {number} is missing: found {entry.number}"
            return
        if entry.previous != previous or entry.hash != entry.digest():
            yield f"entry {number} was changed, or the one before it: its hash does not agree"
        if entry.before != stage:
            yield f"entry {number} starts from {entry.before}, the one before it ended in {stage}"
        if entry.before is not None and entry.before != entry.after:
            try:
                check_move(entry.before, entry.after)
            except MoveError as error:
                yield f"entry {number}: {error}"
        if entry.config != release.config():
            yield f"entry {number} was made with another policy, candidate or audience than the release has now"
        previous, stage = entry.hash, entry.after
    if (previous, stage, len(audit)) != (release.head, release.stage, release.revision):
        found = f"{stage} after {len(audit)} entries"
        yield f"the chain ends in {found}, the release says {release.stage} after {release.revision}"


def _assignments(release: Release, assigned: Sequence[Assignment]) -> Iterator[str]:
    splits = {stage.name: stage.split for stage in release.policy.ramp}
    looked = [one.early is not None for one in assigned]
    if looked != [number <= release.early for number in range(1, len(assigned) + 1)]:
        yield f"{sum(looked)} of {release.early} early looks are there, or they are not in order"
    for number, one in enumerate(assigned, 1):
        if one.number != number:
            yield f"assignment {number} is missing: found {one.number}"
            return
        if one.probability != (split := splits.get(one.stage)):
            yield f"assignment {number} had the probability {one.probability:g}, stage {one.stage!r} has {split}"
        if (share(release.salt, one.unit or one.rollout) < one.probability) != (one.arm == "candidate"):
            what = f"rollout {one.rollout}" if one.unit is None else f"unit {one.unit}"
            yield f"assignment {number}: {what} is on the arm {one.arm}, its share says otherwise"


def _decisions(
    release: Release,
    assigned: Sequence[Assignment],
    seen: Sequence[AssignmentEvidence],
    audit: Sequence[AuditTrailEntry],
) -> Iterator[str]:
    made = [entry for entry in audit if entry.who == GATEWAY and entry.action in (*BY_RULE, "wait")]
    made = [entry for entry in made if entry.assignment is not None]
    for entry in audit:
        found = entry.evidence.get(OUT_OF_TURN) if entry.assignment is None else None
        ruled = entry.who == GATEWAY and entry.action in BY_RULE and entry.action != "roll_back"
        if entry.who == GATEWAY and entry.action == "hold" and UNCOVERED in entry.evidence:
            if not _has_fallen(entry.evidence):
                yield f"entry {entry.number} held for a coverage that, by its own figures, had not fallen"
        elif ruled and entry.assignment is None:
            yield f"entry {entry.number} says {entry.action} by the rules and names no assignment after which"
        if found == 0:
            yield f"entry {entry.number} rolled back for {found} hard violations, which are allowed"
    canary = Canary.of(release)
    for found, entry in zip_longest(replay_decisions(canary, assigned, seen, audit), made):
        if entry is None:
            why = found.verdict.reason
            yield f"after assignment {found.counted} the rules say {found.action}, no entry does: {why}"
        elif found is None:
            yield f"entry {entry.number} says {entry.action}, the rules do not: {entry.why}"
        elif (found.counted, found.early, found.action) != (entry.assignment, entry.early, entry.action):
            yield (
                f"entry {entry.number} says {entry.action} after assignment {_place(entry.assignment, entry.early)}; "
                f"recomputed it is {found.action} after {_place(found.counted, found.early)}"
            )
        elif dict(found.verdict.figures) != entry.evidence:
            yield f"entry {entry.number}: its figures are not those that follow from the tape"


def _place(counted: int | None, early: int) -> str:
    return f"{counted} ({early} looked at early)" if early else f"{counted}"


def _people(
    release: Release,
    assigned: Sequence[Assignment],
    seen: Sequence[AssignmentEvidence],
    audit: Sequence[AuditTrailEntry],
) -> Iterator[str]:
    evidence, split = empty_evidence(release), 0.0
    for entry in audit:
        if entry.who != GATEWAY and entry.evidence:
            add_outcomes(evidence, zip(assigned[: entry.assignment], seen, strict=False))
            add_early_looks(evidence, assigned[: entry.early])
            if circumstances(evidence, split) != entry.evidence:
                yield f"entry {entry.number}: the evidence that {entry.who} had is not what follows from the tape"
        split = entry.split
