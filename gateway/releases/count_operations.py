"""Counts of a release's rollouts, as operations inside a write transaction.

Both counts go over the assignments in their order and leave none out: the early look is kept with the assignment, the
outcome in a record of its own. Neither is ever written twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.gateway.model.release import Assignment, AssignmentEvidence, Release
from penstock.gateway.releases.operations import ReleaseOperations, outdated
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.operation import OperationRefusedError
from penstock.gateway.tape.store.transaction import Transaction


class CountOperations:
    """The counts of releases in one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._tape = transaction
        self._releases = ReleaseOperations(transaction)

    def outcomes(self, release: Release, after: int) -> Iterator[tuple[Assignment, AssignmentEvidence]]:
        """Yield the assignments after this number that were counted, with their outcomes."""
        for number in range(max(0, after) + 1, release.counted + 1):
            key = keys.numbered_key(release.id, number)
            assigned, seen = self._tape.get("assigned", key), self._tape.get("seen", key)
            if assigned is not None and seen is not None:
                yield Assignment.model_validate_json(assigned), AssignmentEvidence.model_validate_json(seen)

    def early_looks(self, release: Release, after: int) -> Iterator[Assignment]:
        """Yield the assignments after this number that were examined early."""
        for number in range(max(0, after) + 1, release.early + 1):
            assigned = self._tape.get("assigned", keys.numbered_key(release.id, number))
            if assigned is not None:
                yield Assignment.model_validate_json(assigned)

    def record_early_looks(self, name: str, revision: int, looked: Sequence[Assignment]) -> Release:
        """Keep the early looks at the next assignments, in order; no decision is made."""
        release = self._next(name, revision, "early", [one.number for one in looked])
        for one in looked:
            self._tape.put("assigned", keys.numbered_key(name, one.number), one.model_dump_json().encode())
        release.early += len(looked)
        self._releases.put_release(release)
        return release.model_copy()

    def count(self, name: str, revision: int, seen: Sequence[AssignmentEvidence]) -> Release:
        """Keep the outcomes of the next assignments, in order; no decision is made."""
        release = self._next(name, revision, "counted", [one.number for one in seen])
        for one in seen:
            self._tape.put("seen", keys.numbered_key(name, one.number), one.model_dump_json().encode())
        release.counted += len(seen)
        self._releases.put_release(release)
        return release.model_copy()

    def _next(self, name: str, revision: int, counter: str, numbers: Sequence[int]) -> Release:
        """Return the release, if these assignments are the next ones of one of its counters."""
        release = self._releases.stored(name)
        last = getattr(release, counter)
        if release.revision != revision:
            raise outdated(release, revision)
        if list(numbers) != list(range(last + 1, last + 1 + len(numbers))):
            message = f"release {name}: assignments {numbers} cannot be counted after {last}"
            raise OperationRefusedError("conflict", message, "number")
        return release
