"""Coverage on the tape, as operations inside a write transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.gateway.model.resource import Coverage, LastMiss
from penstock.gateway.releases.canary.decision import CoverageChange, detect_change, observe
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.transaction import Transaction

DATABASE = "coverage"


@dataclass(slots=True)
class CoverageDelta:
    """Additions to the coverage of a resource."""

    matched: int = 0
    """Calls in which its text was recognised."""
    missed: Counter[str] = field(default_factory=Counter[str])
    """Calls with a text that is nearly its own, by reason."""
    rollouts: list[bool] = field(default_factory=list[bool])
    """For each rollout that has not called before, in order: True if its text was recognised."""
    last: LastMiss | None = None
    """The last of these misses."""


CoverageUpdates = Mapping[str, tuple[Coverage, CoverageChange | None]]
"""The coverage by the resource's name, and its turn if it has just fallen or come back."""


class CoverageOperations:
    """The operations on coverage in one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._tape = transaction

    def add(self, added: Mapping[str, CoverageDelta], now: int) -> CoverageUpdates:
        """Add calls to the coverage, rollout by rollout."""
        return {name: self._add(name, one, now) for name, one in added.items() if self._is_there(name)}

    def _is_there(self, name: str) -> bool:
        return self._tape.get("stable", name.encode()) is not None

    def _add(self, name: str, added: CoverageDelta, now: int) -> tuple[Coverage, CoverageChange | None]:
        stored = self._tape.get(DATABASE, name.encode())
        coverage = Coverage(since_ns=now) if stored is None else Coverage.model_validate_json(stored)
        coverage.matched += added.matched
        coverage.missed = dict(Counter(coverage.missed) + added.missed)
        if added.last is not None and not self._forgotten(added.last.rollout):
            coverage.last = added.last
        turned: CoverageChange | None = None
        for matched in added.rollouts:
            observe(coverage, matched)
            turned = detect_change(coverage, now) or turned
        self._tape.put(DATABASE, name.encode(), coverage.model_dump_json(exclude_defaults=True).encode())
        if turned is not None:
            self._tape.append(b"v" + keys.rollout_key(name))
        return coverage, turned

    def _forgotten(self, rollout: str) -> bool:
        """True if a rollout was forgotten since it called: its text must not come back."""
        key = keys.rollout_key(rollout)
        return self._tape.get("forgotten", key) is not None and self._tape.rollout(rollout) is None


def forget(tape: Transaction, name: str) -> None:
    """Drop the coverage of a resource: agents are known to send another text of it."""
    tape.delete(DATABASE, name.encode())
