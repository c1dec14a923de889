"""Verifies a canary that ran. Pure.

`verify` feeds the same observations in the same order to the same `Canary`, together with the decisions of people, as
the gateway did. So each decision is made again with the same figures, bit for bit. It reports everything that does not
agree: the chain of hashes, the assignment by hash, the observations, the decisions, and the evidence on which people
decided. Other checks compare what the versions of a release say with what they said when it began, and each call with
its arm's version.

Whoever can write the tape can make a whole chain anew, hashes included. But its entries then lack signatures, unless
the forger has the key too, which is not on the tape; and a head that was printed before and kept elsewhere (an
*anchor*) is not in the forged chain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hmac import compare_digest
from itertools import zip_longest
from typing import Any, NamedTuple

from penstock.gateway.model.base import GATEWAY
from penstock.gateway.model.release import (
    Assignment,
    AssignmentEvidence,
    AuditTrailEntry,
    Pin,
    Release,
    content_hash,
    signature,
)
from penstock.gateway.model.resource import Coverage, Resource
from penstock.gateway.model.span import Span
from penstock.gateway.releases.canary.decision import (
    BY_RULE,
    MOST,
    UNLIKELY,
    WINDOW,
    Canary,
    MoveError,
    add_early_looks,
    add_outcomes,
    baseline_rate,
    check_move,
    empty_evidence,
    figures,
    likelihood,
    replay_decisions,
)
from penstock.gateway.releases.canary.evidence import CanaryEvidence
from penstock.gateway.releases.canary.outcomes import as_of, share, unit_problems

OUT_OF_TURN = "violations"
"""Key of the evidence of a rollback that did not wait for its turn."""
UNCOVERED = "uncovered"
"""Key of the resource in the evidence of a hold because fewer rollouts matched it than before."""
SPLIT = "split"
"""Key of the share of new rollouts that got the candidate when a person decided."""
_LINE = re.compile(r"(\S+) ([1-9][0-9]{0,8}) ([0-9a-f]{64})")


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
    yield from unit_problems(release, assigned, seen)
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


def content_problems(release: Release, versions: Iterable[Resource]) -> Iterator[str]:
    """A sentence for each version whose content has changed since the release began. `versions`: the present versions
    of the resources that it changes."""
    now = {one.qualified_name: content_hash(one) for one in versions}
    for place in sorted(release.qualified_versions):
        if place not in now:
            yield f"{place}, which it gave to rollouts, is missing"
        elif now[place] != release.contents.get(place):
            yield f"{place} says something else than when the release began: its content was edited"


def serving_problems(
    release: Release,
    assignment: Assignment,
    pins: Sequence[Pin],
    spans: Iterable[Span],
    audit: Sequence[AuditTrailEntry],
) -> Iterator[str]:
    """A sentence for each call of a rollout in the release that was served by another version than its arm's, or that
    names another arm. After a rollback the stable version serves the candidate's arm."""
    mine = {(pin.resource, pin.agent): pin for pin in pins if pin.release == release.id}
    if any(pin.arm != assignment.arm for pin in mine.values()):
        yield f"assignment {assignment.number}: rollout {assignment.rollout} is pinned to another arm"
    if any(pin.unit != assignment.unit for pin in mine.values()) or (assignment.unit is not None and not mine):
        yield f"assignment {assignment.number}: rollout {assignment.rollout} was not pinned as one of its unit"
    back = next((entry.at_ns for entry in audit if entry.after == "rolled_back"), None)
    for span in spans:
        arms = dict(one.split(":", 1) for one in (span.arm or "").split(",") if ":" in one)
        versions = {name: it for name, it in (span.versions or {}).items() if (name, span.agent or "") in mine}
        who = f"call {span.attempt}#{span.sequence} of rollout {assignment.rollout}"
        if versions and arms.get(release.id) != assignment.arm:
            said = arms.get(release.id, "none")
            yield f"{who} names the arm {said} of {release.id}, its rollout is on the arm {assignment.arm}"
        yield from _others(release, assignment, versions, who, back is not None and (span.end_ns or back) >= back)


def _others(
    release: Release, assignment: Assignment, versions: Mapping[str, str], who: str, after: bool
) -> Iterator[str]:
    """A sentence for each version that does not belong to the arm. `after`: whether the call ended after a rollback."""
    for name, version in versions.items():
        mine = release.arm_versions(assignment.arm)[name]
        if version != mine and not (after and version == release.arm_versions("stable")[name]):
            yield f"{who} was served by {name}@{version}, its arm {assignment.arm} has {mine}"


# -- anchors and signatures -------------------------------------------------------------------------------------------


class Anchor(NamedTuple):
    """The end of a chain at a moment, to keep elsewhere."""

    release: str
    """Name of the release."""
    number: int
    """Number of the last entry at that moment."""
    head: str
    """The hash of that entry; hex."""

    @property
    def line(self) -> str:
        """The anchor as it is printed and read: RELEASE NUMBER HASH."""
        return " ".join(map(str, self))


def anchor_of(release: Release) -> Anchor:
    """The end of a release's chain now."""
    return Anchor(release.id, release.revision, release.head)


def parse_anchors(text: str) -> list[Anchor]:
    """The anchors in a text, one a line. Raises `ValueError` naming a line that is none."""
    found: list[Anchor] = []
    for number, line in enumerate(text.splitlines(), 1):
        read = _LINE.fullmatch(line.strip())
        if read is None and line.strip():
            raise ValueError(f"line {number} is no anchor: {line.strip()[:80]!r}; one is RELEASE NUMBER HASH")
        if read is not None:
            found.append(Anchor(read[1], int(read[2]), read[3]))
    return found


def anchor_problems(name: str, audit: Sequence[AuditTrailEntry], kept: Iterable[Anchor]) -> Iterator[str]:
    """A sentence for each anchor of a release that is not in its chain."""
    hashes = {entry.number: entry.hash for entry in audit}
    mine = [one for one in kept if one.release == name]
    if not mine:
        yield f"the anchors have none of {name}"
    for one in mine:
        if hashes.get(one.number) != one.head:
            ended = "there is none" if one.number not in hashes else "it has another hash"
            yield f"entry {one.number} is not the one that was anchored: {ended}"


def signature_problems(audit: Iterable[AuditTrailEntry], key: str) -> Iterator[str]:
    """A sentence for each entry that this key has not signed."""
    for entry in audit:
        if not entry.signature:
            yield f"entry {entry.number} is not signed"
        elif not compare_digest(entry.signature, signature(entry.hash, key)):
            yield f"entry {entry.number} is signed by another key, or its signature was changed"
