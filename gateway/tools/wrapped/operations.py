"""Writes the frames of a wrapper within a write transaction."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.work.queue.operations import QueueOperations


def keep(transaction: Transaction, entries: Sequence[SpanEntry], name: str, saved: bytes, now: int) -> None:
    """Writes spans and, under a name, the progress of their session: both or nothing."""
    for entry in entries:
        entry.sequence = 0
        # The wrapper's clock may be that of another machine.
        transaction.record(entry, seen_ns=min(now, max(entry.start_ns, entry.end_ns or 0)))
    QueueOperations(transaction).note(name, saved)
