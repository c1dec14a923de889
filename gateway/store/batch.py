"""One transaction in the making."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.gateway.store.cache import CachedAttempt
from penstock.gateway.store.environment import Txn
from penstock.gateway.store.view import View


def nothing() -> None:
    """Where nothing is to be done between two pieces of work."""


class Packs(Protocol):
    """What becomes a record."""

    def packed(self) -> bytes:
        """As it is stored."""
        ...


@dataclass(slots=True)
class Batch:
    """The changes of a transaction until they are written."""

    view: View
    txn: Txn
    cursor: int
    alone: bool
    """True when each body is to be compressed by itself."""
    between: Callable[[], object]
    """Called between two pieces of its work."""
    bodies: list[bytes] = field(default_factory=list[bytes])
    log: list[bytes] = field(default_factory=list[bytes])
    index: dict[bytes, list[int]] = field(default_factory=dict[bytes, list[int]])
    """Blocks of the index that have changed, by key; the last one of an attempt is not here."""
    dirty: list[CachedAttempt] = field(default_factory=list[CachedAttempt])
    late: dict[str, dict[bytes, Packs | None]] = field(default_factory=dict[str, dict[bytes, "Packs | None"]])
    """Records that are written last, by database; None for one that is deleted."""
    wrote: bool = False
    """Whether something was written that shows nowhere else here."""
    touched: bool = False
    """Whether an attempt has changed of which the log does not tell."""
    cut: bool = False
    """Whether shared bodies are not as they were."""

    @property
    def changed(self) -> bool:
        """False when the transaction leaves the tape as it was: LMDB then gives its number to the next one. So it must
        not be true where nothing was written, such as where nothing was there to delete: what another process writes
        under that number would not be noticed."""
        return self.wrote or bool(self.log or self.dirty)

    def append(self, record: bytes) -> int:
        """Adds to the log and returns the cursor."""
        self.log.append(record)
        return self.cursor + len(self.log)
