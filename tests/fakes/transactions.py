"""Transactions on a tape that no gateway serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from penstock.gateway.model.release import AuditTrailEntry, Release
from penstock.gateway.releases.operations import ReleaseOperations
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction

T = TypeVar("T")


def done(store: Store, do: Callable[[Transaction], T]) -> T:
    """What an operation answers, in a transaction of its own; a refusal is raised."""
    task = QueuedOperation(do)
    store.write([task])
    if task.refusal is not None:
        raise task.refusal
    return cast(T, task.result)


def link(action: str) -> AuditTrailEntry:
    """A link of a release's chain."""
    return AuditTrailEntry(number=0, at_ns=0, who="test", action=action, before=None, after="draft")


def begun(transaction: Transaction, new: Release, split: float) -> Release:
    """A release in its canary."""
    operations = ReleaseOperations(transaction)
    release = operations.start(new, link("start"), 2)
    for stage in ("checked", "replayed", "shadowed"):
        operations.change(release.id, None, {"stage": stage}, link("x"), 3)
    return operations.change(release.id, None, {"stage": "canary", "split": split}, link("canary"), 4)
