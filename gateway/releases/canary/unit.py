"""Releases by user or tenant: rollouts of one unit share an arm, and are one observation. Pure.

*Why.* Rollouts of one user are alike. If a unit has an arm, the arm of its second rollout is known beforehand, so a bet
on it is not fair: psi (`gateway.releases.canary.evidence`) does not have the mean zero. So a unit is one observation,
in the order in which units were assigned.

*Which rollouts.* Its first `MOST` rollouts that begin in its *window*: `outcome_deadline_s` from its first one. Each
then has `outcome_deadline_s` of its own, from its own beginning: if all were looked at when the window ends, failures
of the last ones would be seen, and their successes, which take longer, would not. So a unit counts when its window is
over and each of these is known, at the latest after twice `outcome_deadline_s`. Later rollouts get the same arm and are
not counted. Its early look is that of its first rollout.

*Which value.* The mean of the goodness of those rollouts that have one, for the reward and for each guard; the guard
`missing` is the share that has a reward. Each unit weighs the same, however many rollouts it has.

*Its name* is personal data: only a hash of the release's salt and the name is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from penstock.gateway.model.baggage import LONGEST, entry
from penstock.gateway.model.release import Assignment, AssignmentEvidence, Pin, Release, RolloutEvidence
from penstock.gateway.model.release_policy import MISSING, ReleasePolicy
from penstock.gateway.model.unit import UnitMember
from penstock.gateway.releases.canary.assignment import Requester, as_text
from penstock.gateway.releases.canary.outcomes import RolloutReader, deadline, rollout_outcome

MOST: Final = 100
"""Maximum number of rollouts of a unit that are counted."""
HASH_BYTES: Final = 16


class PinnedMember(NamedTuple):
    """A rollout of a unit, and the pins it was given."""

    member: UnitMember
    pins: Sequence[Pin]


def unit_of(release: Release, asker: Requester) -> str | None:
    """Hash of the unit that a call belongs to; None where it names none. The rollout's metadata, which is the same for
    all of its calls, comes before the baggage of the call."""
    name = release.policy.unit
    if not release.policy.by_unit:
        return None
    own = asker.metadata.get(name)
    value = entry(asker.baggage, name) if own is None else as_text(own)
    return None if value is None or not 0 < len(value) <= LONGEST else unit_hash(release.salt, value)


def unit_hash(salt: str, value: str) -> str:
    """The first half of SHA-256 of salt and name; hex. Another release has another salt, so another hash of the same
    name."""
    return hashlib.sha256(f"unit\0{salt}\0{value}".encode("utf-8", "surrogatepass")).digest()[:HASH_BYTES].hex()


def counts_member(release: Release, assignment: Assignment, members: int, now_ns: int) -> bool:
    """True if one more rollout of a unit, which begins now, is counted."""
    return members < MOST and now_ns < deadline(release, assignment)


def outcome_due(release: Release, assignment: Assignment, now_ns: int) -> int:
    """The latest time at which an assignment is next to be looked at; ns since the epoch."""
    ends = deadline(release, assignment)
    return ends if assignment.unit is None or now_ns < ends else 2 * ends - assignment.assigned_ns


def assignment_outcome(
    tape: RolloutReader, members: Iterable[PinnedMember], release: Release, assignment: Assignment, now: int
) -> AssignmentEvidence | None:
    """The outcome of an assignment with these rollouts; None while it is awaited."""
    if assignment.unit is None:
        return next((rollout_outcome(tape, pins, release, assignment, now) for _, pins in members), None)
    if now < deadline(release, assignment):
        return None
    parts: list[RolloutEvidence] = []
    for member, pins in members:
        alone = assignment.model_copy(update=member.model_dump())
        one = rollout_outcome(tape, pins, release, alone, now)
        if one is None:
            return None
        parts.append(RolloutEvidence.model_validate(one.model_dump(include=set(RolloutEvidence.model_fields))))
    return unit_outcome(release.policy, assignment, parts, now)


def unit_outcome(
    policy: ReleasePolicy, assignment: Assignment, parts: Sequence[RolloutEvidence], now: int
) -> AssignmentEvidence:
    """The outcome of a unit, from the outcomes of its rollouts."""
    seen = AssignmentEvidence(number=assignment.number, rollout=assignment.rollout, seen_ns=now, parts=list(parts))
    judged = [one for one in parts if one.left_out is None]
    if not judged:
        seen.left_out = parts[0].left_out if parts else "it has no rollout"
        return seen
    rewards = [one.reward for one in judged if one.reward is not None]
    came = len(rewards) / len(judged)
    if rewards and policy.missing == "worst":
        rewards += [0.0] * (len(judged) - len(rewards))
    seen.reward = _mean(rewards) if rewards else None
    for name in policy.guard_alphas:
        values = [value for one in judged if (value := one.guards.get(name)) is not None]
        if name == MISSING or values:
            seen.guards[name] = came if name == MISSING else _mean(values)
    seen.violations = sum(one.violations for one in judged)
    return seen


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def problems(release: Release, assigned: Sequence[Assignment], seen: Sequence[AssignmentEvidence]) -> Iterator[str]:
    """A sentence for each unit that was assigned twice, and for each whose figures do not follow from its rollouts."""
    places: dict[str, int] = {}
    for one in assigned:
        if one.unit is None:
            continue
        if not release.policy.by_unit:
            yield f"assignment {one.number} is of a unit, the release assigns each rollout by itself"
        elif (other := places.setdefault(one.unit, one.number)) != one.number:
            yield f"assignments {other} and {one.number} are of the same unit"
    for one, found in zip(assigned, seen, strict=False):
        yield from _disagreeing(release.policy, one, found)


def _disagreeing(policy: ReleasePolicy, assignment: Assignment, seen: AssignmentEvidence) -> Iterator[str]:
    if assignment.unit is None:
        if seen.parts:
            yield f"observation {seen.number} has rollouts of a unit, its assignment is of one rollout"
        return
    names = [part.rollout for part in seen.parts]
    if not names or names[0] != assignment.rollout or len(set(names)) != len(names) or len(names) > MOST:
        yield f"observation {seen.number}: its rollouts do not begin with {assignment.rollout}, or are over {MOST}"
    elif unit_outcome(policy, assignment, seen.parts, seen.seen_ns) != seen:
        yield f"observation {seen.number} is not the mean of the {len(names)} rollouts of its unit"


def member_outcomes(seen: AssignmentEvidence) -> list[RolloutEvidence]:
    """The outcome of each rollout by itself."""
    return list(seen.parts) or [seen]
