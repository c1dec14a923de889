"""Units of rollouts that a release assigns together, as operations inside a write transaction.

A unit is assigned once, with its first rollout; every later one gets that assignment, whatever the split is by then.
The record holds the rollouts that are counted, so it is bounded.
"""

from __future__ import annotations

from penstock.gateway.model.release import Assignment, Release
from penstock.gateway.model.unit import Unit, UnitMember
from penstock.gateway.releases.canary.unit import counts_member
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.transaction import Transaction

DATABASE = "units"


class UnitOperations:
    """The units of releases in one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._tape = transaction

    def join(self, release: Release, unit: str, rollout: str, now: int) -> Assignment | None:
        """Return the assignment of an existing unit, and add a rollout to it; None if the unit is new."""
        stored = self._tape.get(DATABASE, unit_key(release.id, unit))
        if stored is None:
            return None
        found = Unit.model_validate_json(stored)
        assigned = self._tape.get("assigned", keys.numbered_key(release.id, found.number))
        assert assigned is not None
        assignment = Assignment.model_validate_json(assigned)
        if counts_member(release, assignment, len(found.members), now):
            found.members.append(UnitMember(rollout=rollout, assigned_ns=now))
            self._put(release.id, unit, found)
        return assignment

    def begin(self, release: Release, assignment: Assignment) -> None:
        """Keep the unit of an assignment, with its first rollout."""
        if assignment.unit is not None:
            first = UnitMember(rollout=assignment.rollout, assigned_ns=assignment.assigned_ns)
            self._put(release.id, assignment.unit, Unit(number=assignment.number, members=[first]))

    def _put(self, release: str, unit: str, found: Unit) -> None:
        self._tape.put(DATABASE, unit_key(release, unit), found.model_dump_json().encode())


def unit_key(release: str, unit: str) -> bytes:
    """Return the key of a unit of a release."""
    return keys.attempt_key(release, unit)
