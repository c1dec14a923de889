"""Rollouts in a release: the calls that it applies to, the arm of each rollout, its outcome, an early look before that,
and those of a unit of rollouts. Pure.

*Share.* A number in [0, 1) that follows from the release's salt and the rollout's name alone; that of a unit of
rollouts from the salt and the unit's hash. The rollout is on the candidate's arm when the number is below the split. So
no state is needed, two releases are independent of each other, and a rising split takes no rollout from the candidate.

*Outcome.* It is read from the tape once, when a rollout's turn has come. Its turn comes when its reward is there (and,
if it came from the queue, its end), when it failed, or when its deadline has passed. A rollout that failed without a
reward counts as the worst; one that was cancelled, or that has seen both versions, is left out. The outcome is written
down (`AssignmentEvidence`) and never read again: a reward that comes later changes no decision.

A *violation* is an event of that name, `hard` when its attribute of that name is true, or a tool call that a policy did
not let run, `hard` when its rule is. A rollout's *cost* is the dimension `cost` of its newest reward that has one, else
the tokens it has used.

*Early look.* Whether a rollout began with an error is known long before its reward. A rollout's turn comes when one of
its calls has failed, when it has ended or has a reward, or at the guard's deadline, whichever is first. Later events do
not change it, so the answer is the same whenever it is looked at. Rollouts are counted in the order of their assignment
here as well: the deadline is what bounds the wait for the slowest. It is at most the deadline of outcomes, so no
outcome is counted before its early look.

*Units.* Rollouts of one user or tenant share an arm, and are one observation. They are alike: if a unit has an arm, the
arm of its second rollout is known beforehand, so a bet on it is not fair, because psi
(`gateway.releases.canary.evidence`) does not have the mean zero. Units are observed in the order in which they were
assigned. A unit's first `MOST` rollouts count that begin in its *window*: `outcome_deadline_s` from its first one. Each
then has `outcome_deadline_s` of its own, from its own beginning: if all were looked at when the window ends, failures
of the last ones would be seen, and their successes, which take longer, would not. So a unit counts when its window is
over and each of these is known, at the latest after twice `outcome_deadline_s`. Later rollouts get the same arm and are
not counted. Its early look is that of its first rollout. Its value is the mean of the goodness of those rollouts that
have one, for the reward and for each guard; the guard `missing` is the share that has a reward. Each unit weighs the
same, however many rollouts it has. Its name is personal data: only a hash of the release's salt and the name is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple, Protocol

from penstock.gateway.model.base import Mode
from penstock.gateway.model.facts import POLICY_HARD
from penstock.gateway.model.release import (
    Assignment,
    AssignmentEvidence,
    EarlyEvidence,
    Pin,
    Release,
    RolloutEvidence,
    UnitMember,
)
from penstock.gateway.model.release_policy import EARLY, MISSING, ReleasePolicy
from penstock.gateway.model.resource import Audience, StableVersion
from penstock.gateway.model.rollout import FINAL, Attempt, Reward, Rollout, RolloutStatus
from penstock.gateway.model.span import LONGEST, POLICY_VIOLATION, Span, SpanStatus, entry
from penstock.gateway.releases.canary.evidence import CanaryObservation


class Requester(NamedTuple):
    """The agent, model and rollout on whose behalf a resource is requested."""

    agent: str
    """Name of the agent; empty where the address gives none."""
    model: str
    """Name of the requested model; empty where there is none."""
    mode: Mode
    """Mode of its rollout."""
    metadata: Mapping[str, Any]
    """The rollout's metadata."""
    baggage: str = ""
    """The call's `baggage` header."""


def share(salt: str, name: str) -> float:
    """The share in [0, 1) of `name` (a rollout, or a unit's hash): the first 8 bytes of SHA-256 of salt and name,
    divided by 2**64. Only the 53 highest bits are used, so that it is below 1."""
    return (int.from_bytes(hashlib.sha256(f"{salt}\0{name}".encode()).digest()[:8]) >> 11) / (1 << 53)


def audience_includes(only: Audience, asker: Requester) -> bool:
    """True if a call belongs to the audience."""
    return (
        _among(asker.agent, only.agents)
        and _among(asker.model, only.models)
        and (not only.modes or asker.mode in only.modes)
        and all(key in asker.metadata and as_text(asker.metadata[key]) == value for key, value in only.metadata.items())
    )


def as_text(value: Any) -> str:
    """A value of the metadata in the form in which `--only` gives it: text, or JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _among(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def are_disjoint(one: Audience, other: Audience) -> bool:
    """True when no call belongs to both: they name different agents, models, modes or values. Wildcards may overlap."""
    return (
        _differ(one.agents, other.agents)
        or _differ(one.models, other.models)
        or bool(one.modes and other.modes and not set(one.modes) & set(other.modes))
        or any(other.metadata.get(key, value) != value for key, value in one.metadata.items())
    )


def _differ(one: Sequence[str], other: Sequence[str]) -> bool:
    if not one or not other:
        return False
    return not any(fnmatchcase(a, b) or fnmatchcase(b, a) or (_wild(a) and _wild(b)) for a in one for b in other)


def _wild(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")


def began_before(live: Release, asker: Requester, pins: Sequence[Pin], fixed: Container[str]) -> bool:
    """True if a rollout takes no part in a release, because it got a version of one of the release's resources without
    this release. `pins`: the versions that the rollout was given; `fixed`: resources whose versions it names itself."""
    if any(name in fixed for name in live.resources):
        return True
    return any(
        (pin.release is None or bool(live.companions)) and audience_includes(live.only, asker._replace(agent=pin.agent))
        for pin in pins
        if pin.resource in live.resources and pin.release != live.id
    )


def pins_on(release: Release, assignment: Assignment, agent: str) -> list[Pin]:
    """The pins that its assignment gives to a rollout's agent: the resource of the release, and its companions."""
    return [
        Pin(
            resource=name,
            agent=agent,
            version=version,
            release=release.id,
            arm=assignment.arm,
            probability=assignment.probability,
            number=assignment.number,
            unit=assignment.unit,
        )
        for name, version in release.arm_versions(assignment.arm).items()
    ]


def stable_version(stable: StableVersion, asker: Requester) -> str:
    """The version that a call gets when no release is live for it."""
    return next((rule.version for rule in stable.rules if audience_includes(rule.only, asker)), stable.version)


# -- outcomes ---------------------------------------------------------------------------------------------------------

VIOLATION = "violation"
FAILED = (SpanStatus.ERROR, SpanStatus.INTERRUPTED)
MOST: Final = 100
"""Maximum number of rollouts of a unit that are counted."""
HASH_BYTES: Final = 16


class RolloutReader(Protocol):
    """The slice of the tape that is read. The pins are the versions that the rollout was given."""

    def rollout(self, rollout: str, /) -> Rollout | None: ...
    def attempts(self, rollout: str, /) -> Sequence[Attempt]: ...
    def spans(self, rollout: str, /) -> Iterable[Span]: ...
    def pins(self, rollout: str, /) -> Sequence[Pin]: ...


def rollout_outcome(
    tape: RolloutReader, release: Release, assignment: Assignment, now: int
) -> AssignmentEvidence | None:
    """The outcome of an assignment's rollout now; None while it is awaited."""
    seen = AssignmentEvidence(number=assignment.number, rollout=assignment.rollout, seen_ns=now)
    if _fell_back(tape, release, assignment):
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


def _fell_back(tape: RolloutReader, release: Release, assignment: Assignment) -> bool:
    """True if a rollout has seen both versions."""
    return bool([pin for pin in tape.pins(assignment.rollout) if pin.mixed and pin.release == release.id])


def _reported_failed(rollout: Rollout, attempts: Iterable[Attempt]) -> bool:
    """True if somebody has reported that a rollout failed. One that went quiet after a failed call is `failed` too, but
    may go on and may still be judged: its failed calls count, its status does not."""
    reported = rollout.origin == "queued" or any(one.outcome is not None for one in attempts)
    return rollout.status == RolloutStatus.FAILED and reported


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
    if seen.reward is None and _reported_failed(rollout, attempts):
        seen.reward = 0.0
    seen.violations = sum(is_hard(span.kind, span.name, span.attributes) for span in violations)
    if not attempts:
        return
    last = attempts[-1]
    failed = _reported_failed(rollout, attempts) or last.totals.errors > 0
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


# -- early looks ------------------------------------------------------------------------------------------------------


def has_early_guard(release: Release) -> bool:
    """True if the release's policy has the early guard."""
    return EARLY in release.policy.guard_alphas


def early_deadline(release: Release, assignment: Assignment) -> int:
    """The time at which an assignment is judged by what is known by then; ns since the epoch."""
    own = assignment.assigned_ns + int(release.policy.early_deadline_s * 1e9)
    return min(own, deadline(release, assignment))


def early_outcome(tape: RolloutReader, release: Release, assignment: Assignment, now: int) -> EarlyEvidence | None:
    """The early look at an assignment; None while it is awaited."""
    due = early_deadline(release, assignment)
    seen = EarlyEvidence(seen_ns=now, good=None, counted=release.counted)
    rollout = tape.rollout(assignment.rollout)
    if rollout is None:
        return seen if now >= due else None
    if rollout.status == RolloutStatus.CANCELLED or _fell_back(tape, release, assignment):
        return seen
    spans = list(tape.spans(rollout.id))
    over = _end(rollout, spans, due)
    if [span for span in spans if span.kind == "llm" and span.status in FAILED and _at(span) <= over]:
        return seen.model_copy(update={"good": 0.0})
    if over > now:
        return None
    known = rollout.ended_ns is not None and rollout.ended_ns <= over
    failed = known and _reported_failed(rollout, tape.attempts(rollout.id))
    return seen.model_copy(update={"good": 0.0 if failed else 1.0})


def _end(rollout: Rollout, spans: Iterable[Span], due: int) -> int:
    """The time at which the rollout was over: its end, or, if nobody reports the end of such a rollout, its first
    trusted reward; `due` at the latest."""
    ends = [due] if rollout.ended_ns is None else [due, rollout.ended_ns]
    if rollout.origin != "queued":
        ends += [_at(span) for span in spans if span.kind == "reward" and Reward.of(span).trusted]
    return min(ends)


def _at(span: Span) -> int:
    return span.start_ns if span.end_ns is None else span.end_ns


def as_of(release: Release, assigned: Iterable[Assignment]) -> list[Assignment]:
    """The assignments as they were when the release had this state: without early looks that came later."""
    return [
        one.model_copy(update={"early": None}) if one.early is not None and one.number > release.early else one
        for one in assigned
    ]


# -- units ------------------------------------------------------------------------------------------------------------


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
    tape: RolloutReader, members: Iterable[UnitMember], release: Release, assignment: Assignment, now: int
) -> AssignmentEvidence | None:
    """The outcome of an assignment; None while it is awaited. `members`: the rollouts of its unit, if it is of one."""
    if assignment.unit is None:
        return rollout_outcome(tape, release, assignment, now)
    if now < deadline(release, assignment):
        return None
    parts: list[RolloutEvidence] = []
    for member in members:
        alone = assignment.model_copy(update=member.model_dump())
        one = rollout_outcome(tape, release, alone, now)
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


def unit_problems(
    release: Release, assigned: Sequence[Assignment], seen: Sequence[AssignmentEvidence]
) -> Iterator[str]:
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
