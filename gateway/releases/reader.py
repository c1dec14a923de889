"""Reading resources, releases and pins: each read is one short transaction. And the needs for versions.

Nobody may remove a version from a server or a disk while a call may still ask for it. New rollouts need the stable
versions and those of live releases; a rollout that is under way needs its own versions. Whoever keeps weights asks
before removing any: the gateway itself for adapters (`adapter_keeper`), a trainer for its own servers and directories.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Final

from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import (
    ARMS,
    Assignment,
    AssignmentEvidence,
    AuditTrailEntry,
    Pin,
    Release,
    Unit,
    UnitMember,
)
from penstock.gateway.model.release_policy import HOLDBACK
from penstock.gateway.model.resource import Audience, Coverage, Need, Resource, StableVersion
from penstock.gateway.model.rollout import FINAL, Attempt, Rollout, last_seen_ns
from penstock.gateway.model.span import Span
from penstock.gateway.releases.canary.decision import Canary, figures
from penstock.gateway.releases.operations import (
    UNITS,
    assignments,
    parse_release,
    pins_of,
    release_of,
    unit_key,
)
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.view import TapeView

QUIET_NS: Final = 3600 * 10**9
"""A rollout that did not come from the queue may be silent for this long and still work: its end is only a guess."""
NAMED: Final = 10
"""Rollouts that are named per version."""
_log: Final = logging.getLogger("penstock.releases")


class CanaryReader:
    """A canary in one transaction. What is read twice is the same object: an early look and an outcome are often of the
    same rollout."""

    def __init__(self, view: TapeView) -> None:
        self._view = view
        # Nothing here refers to this object: a cycle would keep the transaction's slot until a garbage collection.
        self.rollout, self.pins = cache(view.rollout), cache(partial(_pins, view))
        self._attempts_and_spans = cache(view.attempts_and_spans)

    def attempts(self, rollout: str, /) -> list[Attempt]:
        return self._attempts_and_spans(rollout)[0]

    def spans(self, rollout: str, /) -> list[Span]:
        return self._attempts_and_spans(rollout)[1]

    def release(self, name: str) -> Release | None:
        """Return a release, None when there is none; raises `OperationRefusedError` where its record is damaged."""
        stored = self._view.get("releases", name.encode("ascii", "replace"))
        return None if stored is None else release_of(name, stored)

    def assignments(
        self, release: str, after: int, until: int
    ) -> Iterator[tuple[Assignment, AssignmentEvidence | None]]:
        """Yield the assignments after one number and up to another, each with its outcome, None while that is not
        counted."""
        return assignments(self._view, release, after, until)

    def members(self, release: str, assignment: Assignment) -> list[UnitMember]:
        """Return the counted rollouts of an assignment, in their order."""
        if assignment.unit is None:
            return [UnitMember(rollout=assignment.rollout, assigned_ns=assignment.assigned_ns)]
        stored = self._view.get(UNITS, unit_key(release, assignment.unit))
        return [] if stored is None else Unit.model_validate_json(stored).members


def _pins(view: TapeView, rollout: str) -> list[Pin]:
    stored = view.get("pins", keys.rollout_key(rollout))
    return [] if stored is None else [pin for pin in pins_of(stored) if not pin.forgotten]


class ReleaseReader:
    """Resources, releases and pins of a tape."""

    def __init__(self, tape: StoreReader) -> None:
        self._tape = tape

    @contextmanager
    def canary(self) -> Generator[CanaryReader]:
        """Open a short transaction that reads a canary."""
        with self._tape.view() as view:
            yield CanaryReader(view)

    def resources(self) -> dict[str, tuple[StableVersion, list[Resource]]]:
        """Return every resource by name: its stable version, and all versions, oldest first. One with a damaged record
        is left out: calls with its text pass unchanged."""
        found: dict[str, tuple[StableVersion, list[Resource]]] = {}
        with self._tape.view() as view:
            for name in [name.decode() for name, _ in view.scan("stable")]:
                try:
                    one = self._resource(view, name)
                except ValueError:
                    _log.error("resource %s is left alone, a record of it cannot be read; run `penstock check`", name)
                    continue
                found |= {} if one is None else {name: one}
        return found

    def resource(self, name: str) -> tuple[StableVersion, list[Resource]] | None:
        """Return a resource; None when there is none."""
        with self._tape.view() as view:
            return self._resource(view, name)

    def coverage(self, names: Iterable[str]) -> dict[str, Coverage]:
        """Return the coverage of resources, by name; those without a call that had their text, or nearly, are left
        out."""
        with self._tape.view() as view:
            stored = {name: view.get("coverage", name.encode()) for name in names}
        return {name: Coverage.model_validate_json(it) for name, it in stored.items() if it is not None}

    def _resource(self, view: TapeView, name: str) -> tuple[StableVersion, list[Resource]] | None:
        stable = view.get("stable", name.encode())
        if stable is None:
            return None
        stored = view.scan("resources", keys.rollout_key(name))
        versions = [Resource.model_validate_json(record) for _, record in stored]
        return StableVersion.model_validate_json(stable), sorted(versions, key=lambda version: version.created_ns)

    def releases(self) -> list[Release]:
        """Return all readable releases, newest first."""
        with self._tape.view() as view:
            found = [release for _, it in view.scan("releases") if (release := parse_release(it)) is not None]
        return sorted(found, key=lambda release: (-release.created_ns, release.id))

    def rollout(self, rollout: str) -> Rollout | None:
        """Return a rollout, which may name versions of its own; None when there is none."""
        return self._tape.rollout(rollout)

    def attempts(self, rollout: str) -> list[Attempt]:
        """Return the attempts of a rollout, oldest first."""
        return self._tape.attempts(rollout)

    def spans(self, rollout: str) -> Iterator[Span]:
        """Yield the spans of a rollout by attempt and sequence."""
        return self._tape.spans(rollout)

    def release(self, name: str) -> Release | None:
        """Return a release, None when there is none; raises `OperationRefusedError` where its record is damaged."""
        with self.canary() as tape:
            return tape.release(name)

    def audit(self, release: str) -> list[AuditTrailEntry]:
        """Return the audit chain of a release, oldest first."""
        with self._tape.view() as view:
            found = view.scan("audit", keys.rollout_key(release))
            return [AuditTrailEntry.model_validate_json(record) for _, record in found]

    def assignments(
        self, release: str, after: int = 0, limit: int = 1000
    ) -> tuple[list[Assignment], list[AssignmentEvidence]]:
        """Return up to `limit` assignments after this number, and the outcomes of those that were counted."""
        with self.canary() as tape:
            found = list(tape.assignments(release, after, after + limit))
        return [one for one, _ in found], [seen for _, seen in found if seen is not None]

    def members(self, release: str, assignment: Assignment) -> list[UnitMember]:
        """Return the counted rollouts of an assignment, in their order."""
        with self.canary() as tape:
            return tape.members(release, assignment)

    def unit(self, release: str, unit: str) -> Assignment | None:
        """Return the assignment of a unit in a release; None where it has met none of its rollouts."""
        with self._tape.view() as view:
            stored = view.get(UNITS, unit_key(release, unit))
            number = None if stored is None else Unit.model_validate_json(stored).number
            assigned = None if number is None else view.get("assigned", keys.numbered_key(release, number))
        return None if assigned is None else Assignment.model_validate_json(assigned)

    def all_pins(self) -> Iterator[tuple[str, list[Pin]]]:
        """Yield every rollout that has pins, with its pins."""
        for key, record in self._tape.records("pins"):
            yield key[:-1].decode("ascii"), [pin for pin in pins_of(record) if not pin.forgotten]

    def pins(self, rollout: str) -> list[Pin]:
        """Return the pins of a rollout."""
        return [pin for pin in self.pins_under(rollout) if not pin.forgotten]

    def pins_under(self, name: str) -> list[Pin]:
        """Return the pins of all rollouts of a name, including forgotten ones."""
        with self._tape.view() as view:
            stored = view.get("pins", keys.rollout_key(name))
        return [] if stored is None else pins_of(stored)


def needs(tape: StoreReader, resource: str, now_ns: int) -> list[Need]:
    """Return the needs for each version of a resource; versions that nobody needs are left out."""
    reader, found = ReleaseReader(tape), dict[str, Need]()
    if (one := reader.resource(resource)) is not None:
        _of(found, one[0].version).audiences.append(Audience())
        for rule in one[0].rules:
            _of(found, rule.version).audiences.append(rule.only)
    for release in reader.releases():
        if resource in release.resources and release.live:
            for arm in ARMS:
                _of(found, release.arm_versions(arm)[resource]).releases.append(release.id)
    for place, rollouts in pinned_versions(tape, now_ns, NAMED).items():
        name, _, version = place.partition("@")
        if name == resource:
            _of(found, version).rollouts.extend(rollouts)
    return list(found.values())


def _of(found: dict[str, Need], version: str) -> Need:
    return found.setdefault(version, Need(version=version))


def pinned_versions(tape: StoreReader, now_ns: int, most: int = 1) -> Mapping[str, list[str]]:
    """Return NAME@VERSION of every version that an unfinished rollout is pinned to, with up to `most` of these
    rollouts."""
    found: dict[str, list[str]] = {}
    for rollout, pins in ReleaseReader(tape).all_pins():
        places = {f"{pin.resource}@{pin.version}" for pin in pins}
        new = [place for place in places if len(found.get(place, ())) < most]
        if new and _unfinished(tape, rollout, now_ns):
            for place in new:
                found.setdefault(place, []).append(rollout)
    return found


def _unfinished(tape: StoreReader, rollout: str, now_ns: int) -> bool:
    found = tape.rollout(rollout)
    if found is None:
        # The first call of the rollout is under way.
        return True
    if found.origin == "queued":
        return found.status not in FINAL
    return now_ns - last_seen_ns(found, tape.attempts(rollout)) < QUIET_NS


# The figures of releases for Prometheus, from memory: a scrape walks no canary.
#
# Names of releases never end, so only `SHOWN` releases have series: those that are live, newest first, then those
# that have ended within `RECENT_NS`. A series of a release that is not shown any more is gone from the page.
#
# The figures are those of the canary that the driver steps. A release that has none (it has ended, or was held before
# the gateway started) has the figures of the last link of its audit chain, on which its decision was based.

SHOWN: Final = 20
RECENT_NS: Final = 24 * 3600 * 10**9
_TESTS: Final = ("harm", "non_inferiority")
_MANY: Final = ("guard.", "srm.")
"""Prefixes of tests of which a policy has several."""
_NUMBERS: Final = ("assigned", "missing")
_LATER: Final = f"{HOLDBACK}."


class ReleaseMetrics:
    """The figures that Prometheus gets of releases."""

    def __init__(self, audit: Callable[[str], list[AuditTrailEntry]], canary: Callable[[str], Canary | None]) -> None:
        """`audit` returns the chain of a release; `canary` the canary that is stepped for it."""
        self._audit, self._canary = audit, canary
        self._decided: dict[tuple[str, int], Mapping[str, float]] = {}

    def update(self, newest_first: Iterable[Release], metrics: Metrics, now_ns: int) -> None:
        """Set the figures of the shown releases, and no others."""
        shown = _shown(newest_first, now_ns)
        found = {release.id: self._figures(release) for release in shown}
        self._decided = {(it.id, it.revision): found[it.id] for it in shown if (it.id, it.revision) in self._decided}
        metrics.release_stage = {(it.id, it.stage): 1 for it in shown}
        metrics.release_split = {(it.id,): it.split for it in shown}
        metrics.release_assigned = {(it.id,): it.assigned for it in shown}
        metrics.release_counted = {(it.id,): it.counted for it in shown}
        metrics.release_rollouts = dict(_by_arm(found, "assigned"))
        metrics.release_missing = dict(_by_arm(found, "missing"))
        metrics.release_reward_mean = dict(_by_arm(found, "reward"))
        metrics.release_e_value = {
            (name, test): value
            for name, one in found.items()
            for test, value in one.items()
            if test.removeprefix(_LATER) in _TESTS or test.removeprefix(_LATER).startswith(_MANY)
        }

    def _figures(self, release: Release) -> Mapping[str, float]:
        canary = self._canary(release.id)
        if canary is not None:
            try:
                return figures(canary.evidence)
            except RuntimeError:
                # The counter's thread has just met the first rollout of a stage: the next scrape has it.
                return {}
        key = release.id, release.revision
        if key not in self._decided:
            self._decided[key] = _of_last(self._audit(release.id))
        return self._decided[key]


def _shown(newest_first: Iterable[Release], now_ns: int) -> list[Release]:
    recent = [it for it in newest_first if it.live or it.changed_ns > now_ns - RECENT_NS]
    return sorted(recent, key=lambda release: not release.live)[:SHOWN]


def _of_last(links: Iterable[AuditTrailEntry]) -> Mapping[str, float]:
    found: Mapping[str, float] = {}
    for link in links:
        numbers = {name: it for name, it in link.evidence.items() if isinstance(it, int | float)}
        found = numbers if "harm" in numbers else found
    return found


def _by_arm(found: Mapping[str, Mapping[str, float]], what: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield a figure by arm: a number of rollouts is the sum of ramp and holdback; any other is the latest."""
    for name, one in found.items():
        for arm in ARMS:
            both = [one[key] for key in (f"{arm}.{what}", f"{_LATER}{arm}.{what}") if key in one]
            if both:
                yield (name, arm), sum(both) if what in _NUMBERS else both[-1]
