"""Checks that the versions of a release still have their content, and that each call was served by its arm's version.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.gateway.model.release import Assignment, AuditTrailEntry, Pin, Release, content_hash
from penstock.gateway.model.resource import Resource
from penstock.gateway.model.span import Span


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
