"""Reading resources, releases and pins: each read is one short transaction."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Final

from penstock.gateway.model.base import parse_record
from penstock.gateway.model.coverage import Coverage
from penstock.gateway.model.release import Assignment, AssignmentEvidence, AuditTrailEntry, Pin, Release
from penstock.gateway.model.resource import Resource, StableVersion
from penstock.gateway.model.rollout import Rollout
from penstock.gateway.model.unit import Unit, UnitMember
from penstock.gateway.releases.coverage.operations import DATABASE
from penstock.gateway.releases.live_releases import release_of
from penstock.gateway.releases.operations import pins_of
from penstock.gateway.releases.unit_operations import DATABASE as UNITS
from penstock.gateway.releases.unit_operations import unit_key
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.view import TapeView

_log: Final = logging.getLogger("penstock.releases")


class ReleaseReader:
    """Resources, releases and pins of a tape."""

    def __init__(self, tape: StoreReader) -> None:
        self._tape = tape

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
            stored = {name: view.get(DATABASE, name.encode()) for name in names}
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
            found = [release for _, it in view.scan("releases") if (release := parse_record(Release, it)) is not None]
        return sorted(found, key=lambda release: (-release.created_ns, release.id))

    def rollout(self, rollout: str) -> Rollout | None:
        """Return a rollout, which may name versions of its own; None when there is none."""
        return self._tape.rollout(rollout)

    def release(self, name: str) -> Release | None:
        """Return a release, None when there is none; raises `OperationRefusedError` where its record is damaged."""
        with self._tape.view() as view:
            stored = view.get("releases", name.encode("ascii", "replace"))
        return None if stored is None else release_of(name, stored)

    def audit(self, release: str) -> list[AuditTrailEntry]:
        """Return the audit chain of a release, oldest first."""
        with self._tape.view() as view:
            found = view.scan("audit", keys.rollout_key(release))
            return [AuditTrailEntry.model_validate_json(record) for _, record in found]

    def assignments(
        self, release: str, after: int = 0, limit: int = 1000
    ) -> tuple[list[Assignment], list[AssignmentEvidence]]:
        """Return up to `limit` assignments after this number, and the outcomes of those that were counted."""
        numbers = [keys.numbered_key(release, after + 1 + at) for at in range(limit)]
        with self._tape.view() as view:
            assigned = [Assignment.model_validate_json(it) for key in numbers if (it := view.get("assigned", key))]
            seen = [
                AssignmentEvidence.model_validate_json(it)
                for key in numbers[: len(assigned)]
                if (it := view.get("seen", key))
            ]
        return assigned, seen

    def members(self, release: str, assignment: Assignment) -> list[UnitMember]:
        """Return the counted rollouts of an assignment, in their order."""
        if assignment.unit is None:
            return [UnitMember(rollout=assignment.rollout, assigned_ns=assignment.assigned_ns)]
        with self._tape.view() as view:
            stored = view.get(UNITS, unit_key(release, assignment.unit))
        return [] if stored is None else Unit.model_validate_json(stored).members

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
