"""A write transaction as its operations see it (records, rollouts and attempts, calls, the log of changes), and the one
writer that commits it.

An operation is a function of a `Transaction`. It belongs to the package that knows what it means (`work.queue`,
`gateway.releases`, `work.runs`); this module only reads and changes the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast

from penstock.gateway.model.known_secrets import NO_SECRETS, Secrets
from penstock.gateway.model.rollout import Rollout
from penstock.gateway.model.span import Span
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.cache import CachedAttempt, CachedRollout
from penstock.gateway.tape.store.codec import StoredBody, process_of, unpack_open
from penstock.gateway.tape.store.directory import DEFERRED
from penstock.gateway.tape.store.environment import ORDER, Environment, Txn
from penstock.gateway.tape.store.erasure import RolloutErasure
from penstock.gateway.tape.store.feed import Follower
from penstock.gateway.tape.store.records import SpanEntry, span_from
from penstock.gateway.tape.store.tables import Packable, TapeTables, WriteBatch, no_op
from penstock.gateway.tape.store.view import FORGOTTEN, TapeView

F = TypeVar("F")


class Transaction:
    """An open write transaction; for the thread that writes."""

    def __init__(
        self, batch: WriteBatch, tables: TapeTables, followers: Mapping[type[Any], Follower], secrets: Secrets
    ) -> None:
        """`secrets`: known secrets, removed from all text that others supply."""
        self.secrets = secrets
        self._batch = batch
        self._tables = tables
        self._followers = followers

    def follower(self, kind: type[F]) -> F:
        """Return the follower of this type; raises `KeyError` when the tape was opened without it."""
        return cast(F, self._followers[kind])

    # -- records -----------------------------------------------------------------------------------------------------

    def get(self, database: str, key: bytes) -> bytes | None:
        """Return a record; None when there is none."""
        return self._batch.view.get(database, key)

    def scan(self, database: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield records whose keys begin with `prefix`, by key. Nothing may be written to the database meanwhile."""
        return self._batch.view.scan(database, prefix)

    def last(self, database: str) -> int:
        """Return the highest number of a database that is keyed by number; 0 when it is empty."""
        return self._batch.view.last(database)

    def put(self, database: str, key: bytes, value: bytes, append: bool = False) -> None:
        """Write a record. `append`: its key is the highest of the database."""
        self._batch.txn.put(key, value, db=self._tables.dbs[database], append=append)
        self._batch.wrote = True

    def delete(self, database: str, key: bytes) -> None:
        """Delete a record, if there is one."""
        self._batch.wrote |= self._batch.txn.delete(key, db=self._tables.dbs[database])

    def final_records(self, database: str) -> dict[bytes, Packable | None]:
        """Return the records that are written once, at the end of the transaction, however often they change before;
        None deletes a record. `get` and `scan` still return their old values."""
        return self._batch.final_records.setdefault(database, {})

    def append(self, change: bytes) -> int:
        """Add a record to the log of changes and return its cursor."""
        return self._batch.append(change)

    def oldest_rollout(self) -> int | None:
        """Return the lowest number of a rollout; None when there is none."""
        found = self._batch.view.get("order", ORDER)
        return None if found is None else keys.to_number(found)

    @property
    def erasure(self) -> RolloutErasure:
        """Removal of rollouts in this transaction."""
        return RolloutErasure(self._batch, self._tables)

    # -- rollouts, attempts and calls --------------------------------------------------------------------------------

    def rollout(self, name: str) -> CachedRollout | None:
        """Return a rollout as it is now; None when there is none. Changes of it must be written in the same
        transaction."""
        return self._tables.rollout(self._batch, name)

    def add_rollout(self, known: CachedRollout) -> int:
        """Make a rollout and return its number, the cursor of the change."""
        return self._tables.add_rollout(self._batch, known)

    def put_rollout(self, rollout: Rollout) -> None:
        """Write the changing values of a rollout."""
        self._tables.put_rollout(self._batch, rollout)

    def attempt(self, entry: SpanEntry) -> CachedAttempt:
        """Return the attempt that an entry belongs to; it and its rollout are made if need be."""
        return self._tables.ensure_attempt(self._batch, entry)

    def peek(self, name: tuple[str, str]) -> list[Any] | None:
        """Return the values of an attempt as they are now, None when there is none. It is not remembered: that takes a
        tenth of the time of `attempt`."""
        return self._tables.peek(self._batch, name)

    def touch(self, live: CachedAttempt) -> None:
        """Mark an attempt's record as changed; the log need not tell of it."""
        self._tables.touch(self._batch, live)
        # The log tells of a new attempt anyway.
        self._batch.touched |= live.stored is not None

    def touch_and_log(self, live: CachedAttempt) -> None:
        """Mark an attempt's record as changed, and tell of it in the log."""
        self._tables.touch(self._batch, live)
        self._batch.append(b"a" + live.key)

    def span(self, name: tuple[str, str, int]) -> Span | None:
        """Return the summary of a call; None when there is none."""
        return self._batch.view.span(*name)

    def newest_spans(self, live: CachedAttempt) -> Iterator[Span]:
        """Yield the spans of an attempt that have ended, the newest first. Nothing may be written meanwhile."""
        return self._tables.newest_spans(self._batch, live)

    def has_running_call(self, prefix: bytes) -> bool:
        """True if a call runs whose key begins with `prefix`. A call whose answer is still to be fetched does not
        run."""
        return any(process_of(value) != DEFERRED for _, value in self.scan("open", prefix))

    def body(self, span: Span) -> StoredBody | None:
        """Return the bytes of a call that has ended; None when none were kept."""
        return None if span.body is None else self._batch.view.body(span.body)[0]

    def deferred(self, name: tuple[str, str, int]) -> tuple[Span, StoredBody | None] | None:
        """Return a call that waits for another to fetch its answer, and its bytes so far; None when it does not
        wait."""
        key, view = keys.summary_key(*name), self._batch.view
        stored = self.get("open", key)
        if stored is None or process_of(stored) != DEFERRED:
            return None
        summary, body = unpack_open(stored)
        return span_from(key, summary, view.style), None if body is None else view.build_open_body(body)

    def interrupt(self, living: Collection[str]) -> None:
        """End the open calls of all processes that are not in `living`."""
        self._tables.interrupt(self._batch, living)

    def record(self, entry: SpanEntry, seen_ns: int) -> None:
        """Write a span. `seen_ns`: the time of the agent's sign of life, 0 for none."""
        self._tables.put(self._batch, entry, seen_ns)


# A queued operation, its result, and the reason if it is refused.

T = TypeVar("T")


class OperationRefusedError(Exception):
    """An operation is refused; nothing of it was written."""

    def __init__(
        self,
        kind: Literal["not_found", "conflict", "invalid"],
        message: str,
        field: str | None = None,
        value: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind, self.field, self.value = kind, field, value


class QueuedOperation(Generic[T]):
    """A queued operation; `run` is called again when its transaction is repeated."""

    def __init__(self, do: Callable[[Transaction], T]) -> None:
        self._do = do
        self.result: T | None = None
        self.refusal: OperationRefusedError | None = None
        self.failure = ""
        """Why it was given up: a record that it read makes no sense, or it has a bug."""

    def run(self, transaction: Transaction) -> None:
        """Run the operation; keep its result, or its refusal."""
        self.result = self.refusal = None
        try:
            self.result = self._do(transaction)
        except OperationRefusedError as refusal:
            self.refusal = refusal


# The one writer: a batch of entries and tasks becomes one transaction with one fsync.
#
# When a transaction fails, the writer drops its memory (`tables`, and that of followers) and reads it anew. When
# another process has written, it reads back what may have changed, by the records that the other has added to the
# log, and passes them on as news. A small batch is compressed call by call and strongly, a large one together and
# fast, because CPU is scarce under load.

BULK_ITEMS = 16
"""A batch of at least this many items is compressed together: for sixteen that takes a fifth to a third less of the
CPU, and up to a fifth more of the disk."""
WriteItem: TypeAlias = "SpanEntry | QueuedOperation[Any]"
ActivityHook: TypeAlias = Callable[[Transaction, CachedAttempt, int], None]
"""Called with the attempt and the time of the sign of life (ns): for the first call of an attempt that nobody has
claimed, and for a sign of life of a dormant one."""


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
        self.secrets = secrets
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
        return Transaction(batch, self._tables, self._followers, self.secrets)

    def _heard(self, batch: WriteBatch, live: CachedAttempt, seen_ns: int) -> None:
        assert self._woken is not None
        self._woken(self._transaction(batch), live, seen_ns)
