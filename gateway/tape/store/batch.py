"""The changes of one transaction, gathered until they are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.gateway.tape.store.cache import CachedAttempt
from penstock.gateway.tape.store.environment import Txn
from penstock.gateway.tape.store.view import TapeView


def no_op() -> None:
    """The default for `between`: does nothing."""


class Packable(Protocol):
    """A value that is packed into a record when the transaction is written."""

    def packed(self) -> bytes: ...


@dataclass(slots=True)
class WriteBatch:
    """The changes of a transaction until they are written."""

    view: TapeView
    txn: Txn
    cursor: int
    alone: bool
    """True if each body is compressed by itself."""
    between: Callable[[], object]
    """Called between two pieces of the transaction's work."""
    bodies: list[bytes] = field(default_factory=list[bytes])
    log: list[bytes] = field(default_factory=list[bytes])
    index: dict[bytes, list[int]] = field(default_factory=dict[bytes, list[int]])
    """Changed blocks of the index, by key; the last block of an attempt is not here."""
    dirty: list[CachedAttempt] = field(default_factory=list[CachedAttempt])
    final_records: dict[str, dict[bytes, Packable | None]] = field(
        default_factory=dict[str, dict[bytes, "Packable | None"]]
    )
    """Records that are written last, by database; None deletes the record."""
    wrote: bool = False
    """True if something was written that no other field here shows."""
    touched: bool = False
    """True if an attempt has changed and the log does not tell of it."""
    cut: bool = False
    """True if shared bodies were cut or deleted."""

    @property
    def changed(self) -> bool:
        """False when the transaction leaves the tape as it was: LMDB then gives its number to the next one. So it must
        not be true when nothing was written, for example when there was nothing to delete: a write of another process
        under that number would not be noticed."""
        return self.wrote or bool(self.log or self.dirty)

    def append(self, record: bytes) -> int:
        """Add a record to the log and return its cursor."""
        self.log.append(record)
        return self.cursor + len(self.log)
