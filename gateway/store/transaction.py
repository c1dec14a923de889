"""A write transaction as the operations in it see it: records, rollouts and attempts, calls, and the log of changes.

An operation is a function of a `Transaction`. It belongs to the package that knows what it means (`gateway.queue`,
`gateway.releases`, `gateway.runs`); this module only reads and changes the tape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar, cast

from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.rollout import Rollout
from penstock.gateway.model.span import Span
from penstock.gateway.store import keys
from penstock.gateway.store.batch import Batch, Packs
from penstock.gateway.store.cache import CachedAttempt, CachedRollout
from penstock.gateway.store.codec import Body, process_of, unpack_open
from penstock.gateway.store.environment import ORDER
from penstock.gateway.store.follower import Follower
from penstock.gateway.store.forgetting import Forgetting
from penstock.gateway.store.processes import DEFERRED
from penstock.gateway.store.records import Entry, span_from
from penstock.gateway.store.tables import Tables

F = TypeVar("F")


class Transaction:
    """For the thread that writes, and for as long as the transaction is open."""

    def __init__(self, batch: Batch, tables: Tables, followers: Mapping[type[Any], Follower], secrets: Secrets) -> None:
        """`secrets`: what is taken out of all that others say."""
        self.secrets = secrets
        self._batch = batch
        self._tables = tables
        self._followers = followers

    def follower(self, kind: type[F]) -> F:
        """What is remembered of the tape; raises `KeyError` when the tape was opened without it."""
        return cast(F, self._followers[kind])

    # -- records -----------------------------------------------------------------------------------------------------

    def get(self, database: str, key: bytes) -> bytes | None:
        """One record."""
        return self._batch.view.get(database, key)

    def scan(self, database: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Records whose keys begin so, by key. Nothing may be written to the database meanwhile."""
        return self._batch.view.scan(database, prefix)

    def last(self, database: str) -> int:
        """The highest number of a database that is keyed by number; 0 when it is empty."""
        return self._batch.view.last(database)

    def put(self, database: str, key: bytes, value: bytes, append: bool = False) -> None:
        """Writes a record. `append`: its key is the highest of the database."""
        self._batch.txn.put(key, value, db=self._tables.dbs[database], append=append)
        self._batch.wrote = True

    def delete(self, database: str, key: bytes) -> None:
        """Deletes a record, if there is one."""
        self._batch.wrote |= self._batch.txn.delete(key, db=self._tables.dbs[database])

    def late(self, database: str) -> dict[bytes, Packs | None]:
        """Records that are written once, when all else is done, however often they change before; None for one that is
        deleted. What `get` and `scan` say of them is what was before."""
        return self._batch.late.setdefault(database, {})

    def append(self, change: bytes) -> int:
        """Adds to the log of changes and returns the cursor."""
        return self._batch.append(change)

    def oldest_rollout(self) -> int | None:
        """The lowest number of a rollout; None when there is none."""
        found = self._batch.view.get("order", ORDER)
        return None if found is None else keys.to_number(found)

    @property
    def forgetting(self) -> Forgetting:
        """What takes rollouts off the tape."""
        return Forgetting(self._batch, self._tables)

    # -- rollouts, attempts and calls --------------------------------------------------------------------------------

    def rollout(self, name: str) -> CachedRollout | None:
        """A rollout as it is now. What is changed of it must be written in the same transaction."""
        return self._tables.rollout(self._batch, name)

    def add_rollout(self, known: CachedRollout) -> int:
        """Makes a rollout; its number, which is the cursor of the change."""
        return self._tables.add_rollout(self._batch, known)

    def put_rollout(self, rollout: Rollout) -> None:
        """Writes what changes of a rollout."""
        self._tables.put_rollout(self._batch, rollout)

    def attempt(self, entry: Entry) -> CachedAttempt:
        """The attempt that an entry belongs to; it and its rollout are made if need be."""
        return self._tables.live(self._batch, entry)

    def peek(self, name: tuple[str, str]) -> list[Any] | None:
        """The values of an attempt as they are now, None when there is none. It is not remembered: a tenth of the time
        that it takes to have it at hand."""
        return self._tables.peek(self._batch, name)

    def touch(self, live: CachedAttempt) -> None:
        """The attempt's record has changed; the log need not tell of it."""
        self._tables.touch(self._batch, live)
        # Of one that begins the log does tell.
        self._batch.touched |= live.stored is not None

    def tell(self, live: CachedAttempt) -> None:
        """The attempt's record has changed, and the log tells of it."""
        self._tables.touch(self._batch, live)
        self._batch.append(b"a" + live.key)

    def span(self, name: tuple[str, str, int]) -> Span | None:
        """The summary of a call."""
        return self._batch.view.span(*name)

    def runs(self, prefix: bytes) -> bool:
        """Whether a call runs whose key begins so. One whose answer is still to be fetched does not."""
        return any(process_of(value) != DEFERRED for _, value in self.scan("open", prefix))

    def body(self, span: Span) -> Body | None:
        """The bytes of a call that has ended."""
        return None if span.body is None else self._batch.view.body(span.body)[0]

    def deferred(self, name: tuple[str, str, int]) -> tuple[Span, Body | None] | None:
        """A call that waits for another to fetch its answer, and its bytes so far."""
        key, view = keys.summary_key(*name), self._batch.view
        stored = self.get("open", key)
        if stored is None or process_of(stored) != DEFERRED:
            return None
        summary, body = unpack_open(stored)
        return span_from(key, summary, view.style), None if body is None else view.built(body)

    def interrupt(self, living: Collection[str]) -> None:
        """Ends the calls that processes have left open which are not among these."""
        self._tables.interrupt(self._batch, living)

    def record(self, entry: Entry, seen_ns: int) -> None:
        """Writes a span. `seen_ns`: when the agent was heard of by it, 0 when it was not."""
        self._tables.put(self._batch, entry, seen_ns)
