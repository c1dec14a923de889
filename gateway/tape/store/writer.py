"""The one writer: a batch of entries and tasks becomes one transaction with one fsync.

When a transaction fails, the writer drops its memory (`tables`, and that of followers) and reads it anew. When another
process has written, it reads back what may have changed, by the records that the other has added to the log, and passes
them on as news. A small batch is compressed call by call and strongly, a large one together and fast, because CPU is
scarce under load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from penstock.gateway.model.known_secrets import NO_SECRETS, Secrets
from penstock.gateway.tape.store.cache import CachedAttempt
from penstock.gateway.tape.store.environment import Environment, Txn
from penstock.gateway.tape.store.feed import Follower
from penstock.gateway.tape.store.operation import QueuedOperation
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.tables import TapeTables, WriteBatch, no_op
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.tape.store.view import FORGOTTEN, TapeView

BULK_ITEMS = 16
"""A batch of at least this many items is compressed together: for sixteen that takes a fifth to a third less of the
CPU, and up to a fifth more of the disk."""
WriteItem: TypeAlias = "SpanEntry | QueuedOperation[Any]"
ActivityHook: TypeAlias = Callable[[Transaction, CachedAttempt, int], None]
"""Called with the attempt and the time of the sign of life (ns): for the first call of an attempt that nobody has
claimed, and for a sign of life of a dormant one."""
F = TypeVar("F")


class Writer:
    """Commits transactions; for one thread."""

    def __init__(
        self,
        env: Environment,
        process: str,
        memory_bytes: int,
        followers: Iterable[Follower] = (),
        woken: ActivityHook | None = None,
        secrets: Secrets = NO_SECRETS,
    ) -> None:
        """`process`: the name of this process (`store.directory`). `secrets`: known secrets, removed from all text that
        others supply; calls have theirs removed already."""
        self._env = env
        self._secrets = secrets
        self._known = -1
        self._cursor = -1
        """The newest known change; -1 before the first transaction."""
        self._missed: list[bytes] = []
        """Records that others have added to the log since the last transaction."""
        self.newest: Sequence[bytes] = ()
        """The records that the last transaction has added to the log, after those that others had added."""
        self._followers: dict[type[Any], Follower] = {type(follower): follower for follower in followers}
        self._tables = TapeTables(env.dbs, memory_bytes, None if woken is None else self._heard, process)
        self._woken = woken

    def follower(self, kind: type[F]) -> F:
        """Return the follower of this type; raises `KeyError` when there is none."""
        return cast(F, self._followers[kind])

    def write(self, items: Sequence[WriteItem], between: Callable[[], object] = no_op) -> int:
        """Commit entries and tasks in order and return the newest cursor. An entry that is there twice is written once,
        in its present state. `between`: as in `WriteBatch`."""
        items = list(dict.fromkeys(items))
        fresh: list[SpanEntry] = []
        for item in items:
            if isinstance(item, SpanEntry) and not item.sequence:
                fresh.append(item)

        def apply(batch: WriteBatch) -> None:
            for entry in fresh:
                entry.sequence = 0
            transaction, put = None, self._tables.put
            for item in items:
                between()
                if isinstance(item, SpanEntry):
                    put(batch, item)
                    for do in (item.pin, item.settle, item.follow):
                        if do is not None:
                            transaction = transaction or self._transaction(batch)
                            do(transaction, item)
                else:
                    transaction = transaction or self._transaction(batch)
                    item.run(transaction)

        try:
            return self._transact(apply, len(items) < BULK_ITEMS, between)
        except BaseException:
            for entry in fresh:
                entry.sequence = 0
            raise

    def interrupt_open(self, living: Collection[str]) -> None:
        """End the open calls of all processes that are not in `living`."""
        self._transact(lambda batch: self._tables.interrupt(batch, living))

    @property
    def behind(self) -> bool:
        """True if another process has written since this one's last transaction; any thread may ask."""
        known = self._known
        return 0 <= known < self._env.last_transaction()

    def _transact(
        self, apply: Callable[[WriteBatch], None], alone: bool = True, between: Callable[[], object] = no_op
    ) -> int:
        def attempt(txn: Txn) -> tuple[int, WriteBatch]:
            # The memory is only valid once this is committed.
            known, self._known = self._known, -1
            if txn.id() != known + 1:
                self._catch_up(TapeView(txn, self._env.dbs, {}), whole=known < 0)
            batch = WriteBatch(TapeView(txn, self._env.dbs, {}), txn, self._cursor, alone, between)
            apply(batch)
            self._tables.flush(batch)
            return txn.id() if batch.log or batch.changed else txn.id() - 1, batch

        try:
            self._known, batch = self._env.write(attempt)
        except BaseException:
            # The loop reads this memory without asking the tape.
            with self._env.read() as txn:
                for follower in self._followers.values():
                    follower.recall(TapeView(txn, self._env.dbs, {}))
            raise
        self._cursor += len(batch.log)
        self.newest, self._missed = [*self._missed, *batch.log], []
        self._tables.committed(batch)
        return self._cursor

    def _catch_up(self, view: TapeView, whole: bool) -> None:
        """Read back what another or an earlier process has written. `whole`: nothing in memory is certain."""
        newest = view.last("log")
        missed = list(view.log_records(self._cursor, newest)) if self._cursor >= 0 else []
        self._cursor, self._missed = newest, self._missed + missed
        # A wiped record does not say what has changed.
        if whole or FORGOTTEN in missed:
            for one in (self._tables, *self._followers.values()):
                one.recall(view)
        else:
            for one in (self._tables, *self._followers.values()):
                one.follow(view, missed)

    def _transaction(self, batch: WriteBatch) -> Transaction:
        return Transaction(batch, self._tables, self._followers, self._secrets)

    def _heard(self, batch: WriteBatch, live: CachedAttempt, seen_ns: int) -> None:
        assert self._woken is not None
        self._woken(self._transaction(batch), live, seen_ns)
