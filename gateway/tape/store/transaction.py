"""A write transaction as its operations see it: records, rollouts and attempts, calls, and the log of changes.

An operation is a function of a `Transaction`. It belongs to the package that knows what it means (`work.queue`,
`gateway.releases`, `work.runs`); this module only reads and changes the tape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar, cast

from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.rollout import Rollout
from penstock.gateway.model.span import Span
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.cache import CachedAttempt, CachedRollout
from penstock.gateway.tape.store.codec import StoredBody, process_of, unpack_open
from penstock.gateway.tape.store.directory import DEFERRED
from penstock.gateway.tape.store.environment import ORDER
from penstock.gateway.tape.store.erasure import RolloutErasure
from penstock.gateway.tape.store.feed import Follower
from penstock.gateway.tape.store.records import SpanEntry, span_from
from penstock.gateway.tape.store.tables import Packable, TapeTables, WriteBatch

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
