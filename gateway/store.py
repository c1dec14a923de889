"""The tape: the only module that opens LMDB (`gateway.keys` has the layout, `gateway.codec` the record formats).

*Writing.* `Store.write` takes a batch of entries and commits them in one transaction with one fsync. It is called from
one thread, the recorder's; a write transaction never leaves it. Sequences, body numbers and change cursors are given out
inside the transaction, so they need no other coordination. What the writer remembers between transactions (sums of
attempts, bases for the next body) is forgotten when a transaction fails or when another process has written.

*Reading.* Every read is one short transaction or a series of slices: no reader keeps pages alive, and no transaction is
open when the map grows. Readers and growth meet at a gate.

*Dying.* LMDB is copy-on-write: after a kill the tape is as of the last commit. Calls that were announced as running and
never finished are found in `open` when the tape is next opened for writing, and end as `interrupted`.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import lmdb

from gateway import codec, keys
from gateway.codec import Base, Body
from gateway.model import Attempt, Change, Exchange, Mode, Origin, Rollout, Span, SpanStatus, Totals, Usage
from gateway.trace import span_id, trace_id

FORMAT = b"1"
_DATABASES = ("meta", "rollouts", "order", "attempts", "index", "open", "log", "bodies")
_SLICE = 256
_BLOCK = 256
_KEYFRAMES = 64
_SIGNATURE = 160
_WORTH = 256
_TOGETHER = 12

_HEAD = codec.fields(Span, skip=("rollout", "attempt", "sequence", "span_id"))
_HEAD_DEFAULTS = codec.defaults(Span, _HEAD)
_ATTEMPT = codec.fields(Attempt, skip=("rollout", "id"))
_ATTEMPT_DEFAULTS = codec.defaults(Attempt, _ATTEMPT)
_SPANS, _SEEN, _SUMS = (_ATTEMPT.index(name) for name in ("spans", "last_seen_ns", "totals"))
_ROLLOUT = codec.fields(Rollout, skip=("id",))
_ROLLOUT_DEFAULTS = codec.defaults(Rollout, _ROLLOUT)
_RESOLVED_IN = {b"o": "open", b"a": "attempts", b"r": "rollouts"}
_TOTALS = codec.fields(Totals)
_USAGE = codec.fields(Usage)

T = TypeVar("T")


class TapeError(Exception):
    """The tape cannot be opened or written; the message names the directory and the way out."""


@dataclass(slots=True, eq=False)
class Entry:
    """A call on its way to the tape: written when it has run for a moment (`status` open) and again when it is over.

    The fields are those of `Span`; `sequence` is 0 until the store has given it one.
    """

    rollout: str
    attempt: str
    origin: Origin = "header"
    mode: Mode = "online"
    sequence: int = 0
    status: str = "open"
    start_ns: int = 0
    end_ns: int | None = None
    first_byte_ns: int | None = None
    dialect: str = "opaque"
    method: str = "POST"
    path: str = ""
    upstream: str | None = None
    http_status: int | None = None
    error: str | None = None
    model: str | None = None
    model_served: str | None = None
    stream: bool = False
    finish: str | None = None
    response_id: str | None = None
    usage: Usage | None = None
    tool_calls: int = 0
    choices: int = 0
    agent: str | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    truncated: bool = False
    retry_of: int | None = None
    trace_id: str | None = None
    parent_id: str | None = None
    body: Body | None = None
    retried: bool = False
    """The client says that it repeats an earlier call."""
    gap: bool = False
    """The call was answered but its bytes are lost: counted, not kept."""

    def head(self, number: int | None) -> list[Any]:
        """The values of `_HEAD`, in its order."""
        return [
            "llm",
            self.status,
            self.start_ns,
            self.end_ns,
            self.first_byte_ns,
            self.dialect,
            self.method,
            self.path,
            self.upstream,
            self.http_status,
            self.error,
            self.model,
            self.model_served,
            self.stream,
            self.finish,
            self.response_id,
            codec.usage_values(self.usage),
            self.tool_calls,
            self.choices,
            self.agent,
            self.request_bytes,
            self.response_bytes,
            number,
            self.truncated,
            self.retry_of,
            None,
            None,
            self.trace_id,
            self.parent_id,
            None,
        ]


@dataclass(slots=True)
class _Live:
    """What the writer remembers of an attempt: the stored record, changed in place."""

    name: tuple[str, str]
    values: list[Any]
    """The values of `_ATTEMPT`, in its order."""
    base: Base | None = None
    newest: int = 0
    """Sequence of the call whose body is the base, or of the call that it repeated."""
    dirty: bool = False


@dataclass(slots=True)
class _Batch:
    """One transaction in the making."""

    txn: lmdb.Transaction
    cursor: int
    alone: bool
    """True when there are few bodies, each to be compressed by itself."""
    bodies: list[bytes] = field(default_factory=list[bytes])
    log: list[bytes] = field(default_factory=list[bytes])
    index: dict[bytes, bytearray] = field(default_factory=dict[bytes, bytearray])
    dirty: list[_Live] = field(default_factory=list[_Live])

    def append(self, record: bytes) -> int:
        """Adds to the log and returns the cursor."""
        self.log.append(record)
        return self.cursor + len(self.log)


class _Gate:
    """Many readers, or one who resizes the map."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0

    def __enter__(self) -> None:
        with self._condition:
            self._readers += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._condition:
            self._readers -= 1
            if not self._readers:
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until nobody reads and keeps everybody out."""
        with self._condition:
            self._condition.wait_for(lambda: not self._readers)
            yield


class Store:
    """One tape. Thread-safe for reading; writing is for one thread."""

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool = False,
        map_bytes: int = 1 << 30,
        memory_bytes: int = 64 << 20,
    ) -> None:
        """Opens the tape in `path`/tape, making it if need be.

        `map_bytes`: initial size of the map; it doubles when needed. `memory_bytes`: bound of what the writer keeps in
        memory as bases for the next bodies. Raises `TapeError` when it is not a tape of this format or is in use.
        """
        self.path = path
        self._gate = _Gate()
        self._memory_bytes = memory_bytes
        self._lock = None if readonly else _lock(path)
        self._env = _open(path / "tape", readonly, map_bytes)
        self._dbs = self._open_databases(readonly)
        self._live: OrderedDict[tuple[str, str], _Live] = OrderedDict()
        self._live_bytes = 0
        self._keyframes: OrderedDict[bytes, Base] = OrderedDict()
        self._last_txn = -1
        self._cursor = 0
        self._body = 0
        if not readonly:
            self._interrupt_open()

    def close(self) -> None:
        """Closes the environment; no call may follow."""
        self._env.close()
        if self._lock is not None:
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- opening ---------------------------------------------------------------------------------------------------

    def _open_databases(self, readonly: bool) -> dict[str, Any]:
        try:
            databases = {name: self._env.open_db(name.encode(), create=not readonly) for name in _DATABASES}
        except lmdb.Error as error:
            raise TapeError(
                f"{self.path} holds no tape ({error}); start `penstock serve --data {self.path}` once"
            ) from None
        with self._env.begin(write=not readonly) as txn:
            found = txn.get(b"format", db=databases["meta"])
            if found is None and not readonly:
                txn.put(b"format", FORMAT, db=databases["meta"])
            elif found != FORMAT:
                name = bytes(found or b"?").decode("ascii", "replace")
                raise TapeError(f"the tape in {self.path} has format {name}, this penstock reads {FORMAT.decode()}")
        return databases

    def secret(self) -> bytes:
        """The key that signs agent tokens; made once per tape."""
        with self._read() as txn:
            found = txn.get(b"secret", db=self._dbs["meta"])
        if found is not None:
            return bytes(found)
        made = secrets.token_bytes(32)
        with self._env.begin(write=True) as txn:
            txn.put(b"secret", made, db=self._dbs["meta"], overwrite=False)
        return self.secret()

    def _interrupt_open(self) -> None:
        def apply(batch: _Batch) -> None:
            for key, value in batch.txn.cursor(db=self._dbs["open"]):
                head, body = codec.decode(value)
                self._interrupt(batch, key, codec.decode(head), body)
            batch.txn.drop(self._dbs["open"], delete=False)

        self._transact(apply)

    def _interrupt(self, batch: _Batch, key: bytes, head: list[Any], body: bytes | None) -> None:
        rollout, attempt, sequence = keys.split_head_key(key)
        head += _HEAD_DEFAULTS[len(head) :]
        head[_HEAD.index("status")] = SpanStatus.INTERRUPTED.value
        head[_HEAD.index("error")] = "gateway_died"
        if body is not None:
            batch.bodies.append(body)
            head[_HEAD.index("body")] = self._body + len(batch.bodies)
        live = self._attempt(batch, Entry(rollout, attempt))
        _count(live.values[_SUMS], Entry(rollout, attempt, status=SpanStatus.INTERRUPTED))
        self._finish(batch, live, sequence, head)

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, entries: Sequence[Entry]) -> int:
        """Commits the entries durably in one transaction and returns the newest cursor.

        Raises `TapeError` when the disk is full or read-only; then nothing of the batch is on the tape.
        """
        fresh = [entry for entry in entries if not entry.sequence]

        def apply(batch: _Batch) -> None:
            for entry in entries:
                self._put(batch, entry)

        try:
            return self._transact(apply, alone=len(entries) < _TOGETHER)
        except TapeError:
            for entry in fresh:
                entry.sequence = 0
            raise

    def _transact(self, apply: Callable[[_Batch], None], alone: bool = True) -> int:
        try:
            while True:
                try:
                    self._grow_ahead()
                    return self._attempt_transaction(apply, alone)
                except lmdb.MapFullError:
                    self._forget()
                    self._grow()
                except lmdb.MapResizedError:
                    self._forget()
                    self._adopt_size()
        except (lmdb.Error, OSError) as error:
            self._forget()
            raise TapeError(f"cannot write the tape in {self.path}: {error}; free or remount the disk") from error

    def _attempt_transaction(self, apply: Callable[[_Batch], None], alone: bool) -> int:
        with self._env.begin(write=True) as txn:
            if txn.id() != self._last_txn + 1:
                self._recall(txn)
            batch = _Batch(txn, self._cursor, alone)
            apply(batch)
            self._flush(batch)
        self._last_txn += 1
        self._cursor += len(batch.log)
        self._body += len(batch.bodies)
        return self._cursor

    def _recall(self, txn: lmdb.Transaction) -> None:
        """Reads back what another process, or an earlier life, has written."""
        self._forget()
        self._last_txn = txn.id() - 1
        self._cursor = _last(txn, self._dbs["log"])
        with txn.cursor(db=self._dbs["bodies"]) as cursor:
            self._body = (
                keys.to_number(cursor.key()) + len(codec.unpack_segment(cursor.value())) - 1 if cursor.last() else 0
            )

    def _forget(self) -> None:
        self._live.clear()
        self._keyframes.clear()
        self._live_bytes = 0
        self._last_txn = -1

    def _flush(self, batch: _Batch) -> None:
        txn, dbs = batch.txn, self._dbs
        if batch.bodies:
            segment = codec.pack_segment(batch.bodies, compress=not batch.alone)
            txn.put(keys.number(self._body + 1), segment, db=dbs["bodies"], append=True)
        for key, block in batch.index.items():
            txn.put(key, bytes(block), db=dbs["index"])
        for live in batch.dirty:
            live.dirty = False
            txn.put(keys.attempt_key(*live.name), codec.encode(live.values, _ATTEMPT_DEFAULTS), db=dbs["attempts"])
        if batch.log:
            segment = codec.pack_segment(batch.log)
            txn.put(keys.number(batch.cursor + len(batch.log)), segment, db=dbs["log"], append=True)

    def _put(self, batch: _Batch, entry: Entry) -> None:
        live = self._attempt(batch, entry)
        announced = bool(entry.sequence)
        if not announced:
            live.values[_SPANS] += 1
            entry.sequence = live.values[_SPANS]
        live.values[_SEEN] = max(live.values[_SEEN], entry.start_ns)
        if entry.status == SpanStatus.OPEN:
            self._announce(batch, live, entry)
            return
        if (
            entry.retried
            and live.base is not None
            and entry.body is not None
            and live.base.request == entry.body.request
        ):
            entry.retry_of = live.newest
        number = None if entry.body is None else self._put_body(batch, live, entry.body)
        live.newest = entry.retry_of or entry.sequence
        _count(live.values[_SUMS], entry)
        self._finish(batch, live, entry.sequence, entry.head(number))
        if announced:
            batch.txn.delete(keys.head_key(entry.rollout, entry.attempt, entry.sequence), db=self._dbs["open"])

    def _announce(self, batch: _Batch, live: _Live, entry: Entry) -> None:
        key = keys.head_key(entry.rollout, entry.attempt, entry.sequence)
        body = (
            None
            if entry.body is None
            else codec.pack_body(entry.body, self._base(live, entry.body.request), alone=True)[0]
        )
        head = codec.encode(entry.head(None), _HEAD_DEFAULTS)
        batch.txn.put(key, codec.pack_open(head, body), db=self._dbs["open"])
        batch.append(b"o" + key)
        self._index(batch, live, entry.sequence, 0)

    def _finish(self, batch: _Batch, live: _Live, sequence: int, head: list[Any]) -> None:
        key = keys.head_key(*live.name, sequence)
        self._index(batch, live, sequence, batch.append(b"s" + key + codec.encode(head, _HEAD_DEFAULTS)))

    def _index(self, batch: _Batch, live: _Live, sequence: int, cursor: int) -> None:
        block, at = divmod(sequence - 1, _BLOCK)
        key = keys.index_key(*live.name, block)
        cursors = batch.index.get(key)
        if cursors is None:
            cursors = batch.index[key] = bytearray(batch.txn.get(key, db=self._dbs["index"]) or b"")
        cursors.extend(bytes(max(0, 8 * (at + 1) - len(cursors))))
        cursors[8 * at : 8 * at + 8] = keys.number(cursor)
        self._touch(batch, live)

    def _touch(self, batch: _Batch, live: _Live) -> None:
        if not live.dirty:
            live.dirty = True
            batch.dirty.append(live)

    def _attempt(self, batch: _Batch, entry: Entry) -> _Live:
        name = entry.rollout, entry.attempt
        live = self._live.get(name)
        if live is not None:
            self._live.move_to_end(name)
            return live
        stored = batch.txn.get(keys.attempt_key(*name), db=self._dbs["attempts"])
        live = _Live(name, self._new_attempt(batch, entry) if stored is None else _padded(stored, _ATTEMPT_DEFAULTS))
        live.values[_SUMS] = list(live.values[_SUMS])
        self._live[name] = live
        self._live_bytes += 1024
        self._shed(name)
        return live

    def _new_attempt(self, batch: _Batch, entry: Entry) -> list[Any]:
        txn, dbs = batch.txn, self._dbs
        rollout_key = keys.rollout_key(entry.rollout)
        if txn.get(rollout_key, db=dbs["rollouts"]) is None:
            rollout = Rollout(id=entry.rollout, origin=entry.origin, mode=entry.mode, created_ns=entry.start_ns)
            txn.put(rollout_key, codec.encode(codec.values(rollout, _ROLLOUT), _ROLLOUT_DEFAULTS), db=dbs["rollouts"])
            cursor = batch.append(b"r" + rollout_key)
            txn.put(keys.number(cursor), rollout_key, db=dbs["order"], append=True)
        earlier = sum(1 for _ in _scan(txn, dbs["attempts"], rollout_key))
        batch.append(b"a" + keys.attempt_key(entry.rollout, entry.attempt))
        made = Attempt(rollout=entry.rollout, id=entry.attempt, sequence=earlier + 1, created_ns=entry.start_ns)
        return codec.values(made, _ATTEMPT)

    # -- bodies and their bases --------------------------------------------------------------------------------------

    def _put_body(self, batch: _Batch, live: _Live, body: Body) -> int:
        number = self._body + len(batch.bodies) + 1
        base = self._base(live, body.request)
        record, rest = codec.pack_body(body, base, batch.alone)
        batch.bodies.append(record)
        made = Base(number, 0 if base is None else base.depth + 1, body.request, rest)
        if base is None:
            self._remember_keyframe(made)
        self._live_bytes += made.size - (0 if live.base is None else live.base.size)
        live.base = made
        self._shed(live.name)
        return number

    def _base(self, live: _Live, request: bytes) -> Base | None:
        if live.base is not None and live.base.depth < codec.DEPTH:
            return live.base
        return self._keyframe(request)

    def _keyframe(self, request: bytes) -> Base | None:
        """A keyframe of any attempt that shares enough with the request to lean on it."""
        for signature in _signatures(request):
            base = self._keyframes.get(signature)
            if base is not None and codec.common_prefix(base.request, request) >= _WORTH:
                self._keyframes.move_to_end(signature)
                return base
            if base is not None and codec.common_suffix(base.request, request, _WORTH) >= _WORTH:
                self._keyframes.move_to_end(signature)
                return base
        return None

    def _remember_keyframe(self, base: Base) -> None:
        if base.size > self._memory_bytes // _KEYFRAMES:
            return
        for signature in _signatures(base.request):
            self._keyframes[signature] = base
            self._keyframes.move_to_end(signature)
        while len(self._keyframes) > _KEYFRAMES:
            self._keyframes.popitem(last=False)

    def _shed(self, keep: tuple[str, str]) -> None:
        """Drops the longest unused attempts from memory; they are read back when they come again."""
        while self._live_bytes > self._memory_bytes and len(self._live) > 1:
            name, live = next(iter(self._live.items()))
            if name == keep or live.dirty:
                self._live.move_to_end(name)
                if all(other.dirty for other in self._live.values()):
                    return
                continue
            del self._live[name]
            self._live_bytes -= 1024 + (0 if live.base is None else live.base.size)

    # -- growing -----------------------------------------------------------------------------------------------------

    def _grow_ahead(self) -> None:
        info = self._env.info()
        if (info["last_pgno"] + 1) * 4096 > info["map_size"] * 0.8:
            self._grow()

    def _grow(self) -> None:
        with self._gate.alone():
            self._env.set_mapsize(self._env.info()["map_size"] * 2)

    def _adopt_size(self) -> None:
        with self._gate.alone():
            self._env.set_mapsize(0)

    # -- reading -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _read(self) -> Iterator[lmdb.Transaction]:
        with self._gate, self._begin() as txn:
            yield txn

    def _begin(self) -> AbstractContextManager[lmdb.Transaction]:
        return self._env.begin()

    def cursor(self) -> int:
        """The newest committed change."""
        with self._read() as txn:
            return _last(txn, self._dbs["log"])

    def rollout(self, rollout: str) -> Rollout | None:
        """One rollout, None when the tape has none of that name."""
        with self._read() as txn:
            stored = txn.get(keys.rollout_key(rollout), db=self._dbs["rollouts"])
            return None if stored is None else _rollout_from(rollout, stored)

    def rollouts(self, before: int | None = None) -> Iterator[tuple[int, Rollout]]:
        """All rollouts, newest first, with a position that `before` takes."""
        for key, value in self._slices("order", None if before is None else keys.number(before), reverse=True):
            found = self.rollout(value[:-1].decode("ascii"))
            if found is not None:
                yield keys.to_number(key), found

    def attempts(self, rollout: str) -> list[Attempt]:
        """The attempts of a rollout, oldest first."""
        with self._read() as txn:
            found = [
                _attempt_from(*keys.split_attempt_key(key), value)
                for key, value in _scan(txn, self._dbs["attempts"], keys.rollout_key(rollout))
            ]
        return sorted(found, key=lambda attempt: attempt.sequence)

    def span(self, rollout: str, attempt: str, sequence: int) -> Span | None:
        """One head, None when there is none."""
        if not 0 < sequence <= keys.HIGHEST_SEQUENCE:
            return None
        block, at = divmod(sequence - 1, _BLOCK)
        with self._read() as txn:
            cursors = txn.get(keys.index_key(rollout, attempt, block), db=self._dbs["index"]) or b""
            if len(cursors) < 8 * (at + 1):
                return None
            return self._head(txn, rollout, attempt, sequence, keys.to_number(cursors[8 * at :]))

    def _head(self, txn: lmdb.Transaction, rollout: str, attempt: str, sequence: int, cursor: int) -> Span:
        if not cursor:
            key = keys.head_key(rollout, attempt, sequence)
            stored = txn.get(key, db=self._dbs["open"])
            if stored is None:
                raise TapeError(
                    f"span {rollout}/{attempt}#{sequence} is neither open nor in the log; run `penstock check`"
                )
            return _span_from(key, codec.decode(stored)[0])
        record = self._log_record(txn, cursor)
        return _span_from(record[1:], record[1 + keys.head_key_length(record[1:]) :])

    def _log_record(self, txn: lmdb.Transaction, at: int) -> bytes:
        with txn.cursor(db=self._dbs["log"]) as cursor:
            if not cursor.set_range(keys.number(at)):
                raise TapeError(f"change {at} is missing from the tape in {self.path}; run `penstock check`")
            records = codec.unpack_segment(cursor.value())
            return records[at - keys.to_number(cursor.key()) - 1]

    def spans(self, rollout: str, attempt: str | None = None, after: tuple[str, int] | None = None) -> Iterator[Span]:
        """Heads by attempt (oldest first) and sequence; `after` is (attempt, sequence) of the last one seen."""
        names = [found.id for found in self.attempts(rollout)] if attempt is None else [attempt]
        if after is not None and after[0] in names:
            names = names[names.index(after[0]) :]
        for name in names:
            yield from self._attempt_spans(rollout, name, after[1] if after is not None and after[0] == name else 0)

    def _attempt_spans(self, rollout: str, attempt: str, after: int) -> Iterator[Span]:
        while True:
            block, skip = divmod(after, _BLOCK)
            with self._read() as txn:
                cursors = txn.get(keys.index_key(rollout, attempt, block), db=self._dbs["index"]) or b""
                end = min(len(cursors) // 8, skip + _SLICE)
                found = [
                    self._head(txn, rollout, attempt, block * _BLOCK + at + 1, keys.to_number(cursors[8 * at :]))
                    for at in range(skip, end)
                ]
            yield from found
            after = block * _BLOCK + end
            if not found:
                return

    def recent(self, before: int | None = None) -> Iterator[tuple[int, Span]]:
        """All spans, newest change first, each once, with a position that `before` takes."""
        newest = self.cursor() if before is None else before - 1
        while newest > 0:
            with self._read() as txn, txn.cursor(db=self._dbs["log"]) as cursor:
                if not cursor.set_range(keys.number(newest)):
                    return
                last, records = keys.to_number(cursor.key()), codec.unpack_segment(cursor.value())
                first = last - len(records) + 1
                told = [(at, self._change(txn, at, records[at - first])) for at in range(newest, first - 1, -1)]
            yield from ((at, change.span) for at, change in told if change is not None and change.span is not None)
            newest = first - 1

    def changes(self, since: int, limit: int) -> tuple[list[Change], int]:
        """At most `limit` changes after `since`, oldest first, and the cursor to go on from.

        Of a call that has ended in the meantime only the end is told.
        """
        found: list[Change] = []
        with self._read() as txn, txn.cursor(db=self._dbs["log"]) as cursor:
            more = cursor.set_range(keys.number(since + 1))
            while more and len(found) < limit:
                records = codec.unpack_segment(cursor.value())
                first = keys.to_number(cursor.key()) - len(records) + 1
                for at in range(max(first, since + 1), first + len(records)):
                    if len(found) == limit:
                        break
                    since = at
                    change = self._change(txn, at, records[at - first])
                    if change is not None:
                        found.append(change)
                more = cursor.next()
        return found, since

    def _change(self, txn: lmdb.Transaction, at: int, record: bytes) -> Change | None:
        kind, key = record[:1], record[1:]
        if kind == b"s":
            return Change.model_construct(
                cursor=at, kind="span", span=_span_from(key, key[keys.head_key_length(key) :])
            )
        stored = txn.get(key, db=self._dbs[_RESOLVED_IN[kind]])
        if stored is None:
            return None
        if kind == b"o":
            return Change.model_construct(cursor=at, kind="span", span=_span_from(key, codec.decode(stored)[0]))
        if kind == b"a":
            return Change(cursor=at, kind="attempt", attempt=_attempt_from(*keys.split_attempt_key(key), stored))
        return Change(cursor=at, kind="rollout", rollout=_rollout_from(key[:-1].decode("ascii"), stored))

    def exchange(self, span: Span) -> Exchange | None:
        """The bytes of a call; None when none were kept. Of an open call the request is there."""
        with self._read() as txn:
            if span.body is not None:
                return codec.exchange(self._body_at(txn, self._record(txn, span.body), span.body))
            stored = txn.get(keys.head_key(span.rollout, span.attempt, span.sequence), db=self._dbs["open"])
            record = None if stored is None else codec.decode(stored)[1]
            return None if record is None else codec.exchange(self._body_at(txn, record, 0))

    def _body_at(self, txn: lmdb.Transaction, record: bytes, number: int) -> Body:
        """Follows the chain of bases down to its keyframe and builds the body up again."""
        chain = [(number, record)]
        while lower := codec.base_of(chain[-1][1]):
            chain.append((lower, self._record(txn, lower)))
        at, record = chain.pop()
        body, base = codec.unpack_body(record, None, at)
        for at, record in reversed(chain):
            body, base = codec.unpack_body(record, base, at)
        return body

    def _record(self, txn: lmdb.Transaction, number: int) -> bytes:
        with txn.cursor(db=self._dbs["bodies"]) as cursor:
            wanted = keys.number(number)
            found = cursor.set_range(wanted)
            if not found or cursor.key() != wanted:
                found = cursor.prev() if found else cursor.last()
            if found:
                at = number - keys.to_number(cursor.key())
                records = codec.unpack_segment(cursor.value())
                if at < len(records):
                    return records[at]
        raise TapeError(f"body {number} is missing from the tape in {self.path}; run `penstock check`")

    def figures(self) -> dict[str, int]:
        """Sizes and counts of the tape."""
        with self._read() as txn:
            counts = {name: txn.stat(self._dbs[name])["entries"] for name in ("rollouts", "attempts", "open")}
            cursor = _last(txn, self._dbs["log"])
            info = self._env.info()
        return {
            "rollouts": counts["rollouts"],
            "attempts": counts["attempts"],
            "changes": cursor,
            "open": counts["open"],
            "map_bytes": info["map_size"],
            "used_bytes": (info["last_pgno"] + 1) * 4096,
        }

    def _slices(
        self, database: str, start: bytes | None, *, reverse: bool = False, prefix: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        """Records from `start` on (upwards inclusive, downwards exclusive), read in slices of one transaction each."""
        exclusive = reverse
        while True:
            with self._read() as txn, txn.cursor(db=self._dbs[database]) as cursor:
                items = _slice(cursor, start, reverse, exclusive, prefix)
            yield from items
            if len(items) < _SLICE:
                return
            start, exclusive = items[-1][0], True

    # -- checking ----------------------------------------------------------------------------------------------------

    def check(self) -> Iterator[str]:
        """Reads every record and yields a sentence for each that is not as it should be."""
        for key, _ in self._slices("attempts", None):
            rollout, attempt = keys.split_attempt_key(key)
            if self.rollout(rollout) is None:
                yield f"attempt {rollout}/{attempt}: its rollout is missing"
            yield from self._check_attempt(rollout, attempt)
        for key, _ in self._slices("open", None):
            found = self.span(*keys.split_head_key(key))
            if found is None or found.status != SpanStatus.OPEN:
                yield f"open call {keys.split_head_key(key)}: not in the index of its attempt"
        yield from self._check_log()

    def _check_attempt(self, rollout: str, attempt: str) -> Iterator[str]:
        record = next(found for found in self.attempts(rollout) if found.id == attempt)
        finished = 0
        for sequence in range(1, record.spans + 1):
            try:
                span = self.span(rollout, attempt, sequence)
                if span is None:
                    raise TapeError("it was given out but is not in the index")
                finished += span.status != SpanStatus.OPEN
                self._check_body(span)
            except Exception as error:
                yield f"span {rollout}/{attempt}#{sequence}: {type(error).__name__}: {error}"
        if finished != record.totals.calls:
            yield f"attempt {rollout}/{attempt}: it counts {record.totals.calls} finished calls, {finished} are there"

    def _check_body(self, span: Span) -> None:
        found = self.exchange(span)
        if found is None or span.truncated:
            return
        if span.status != SpanStatus.OPEN and len(found.response_body) != span.response_bytes:
            raise ValueError(f"its response has {len(found.response_body)} bytes, the head says {span.response_bytes}")
        if len(found.request_body) != span.request_bytes:
            raise ValueError(f"its request has {len(found.request_body)} bytes, the head says {span.request_bytes}")

    def _check_log(self) -> Iterator[str]:
        expected = 1
        for key, value in self._slices("log", None):
            records = codec.unpack_segment(value)
            last = keys.to_number(key)
            if last - len(records) + 1 != expected:
                yield f"log: change {expected} should follow, the segment that ends at {last} holds {len(records)}"
            expected = last + 1
            for at, record in enumerate(records, last - len(records) + 1):
                if record[:1] == b"s" and not self._indexed(record[1:], at):
                    yield f"log: change {at} is a span that the index of its attempt does not name"

    def _indexed(self, key: bytes, at: int) -> bool:
        rollout, attempt, sequence = keys.split_head_key(key)
        block, place = divmod(sequence - 1, _BLOCK)
        with self._read() as txn:
            cursors = txn.get(keys.index_key(rollout, attempt, block), db=self._dbs["index"]) or b""
        return cursors[8 * place : 8 * place + 8] == keys.number(at)


def check(path: Path) -> tuple[dict[str, int], list[str]]:
    """Figures and problems of the tape in `path`, read without disturbing a gateway that runs on it."""
    with Store(path, readonly=True) as store:
        return store.figures(), list(store.check())


def _lock(path: Path) -> int:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise TapeError(f"another gateway writes the tape in {path}; stop it or choose another --data") from None
    return handle


def _open(path: Path, readonly: bool, map_bytes: int) -> lmdb.Environment:
    if readonly and not (path / "data.mdb").exists():
        raise TapeError(f"{path.parent} holds no tape; name the directory that `penstock serve --data` was given")
    try:
        size = max(map_bytes, (path / "data.mdb").stat().st_size) if (path / "data.mdb").exists() else map_bytes
        return lmdb.open(
            str(path),
            map_size=size,
            max_dbs=len(_DATABASES),
            readonly=readonly,
            readahead=False,
            meminit=False,
            mode=0o600,
        )
    except (lmdb.Error, OSError) as error:
        raise TapeError(f"cannot open the tape in {path}: {error}") from error


def _signatures(request: bytes) -> tuple[bytes, bytes]:
    return b"^" + request[:_SIGNATURE], b"$" + request[-_SIGNATURE:]


def _count(sums: list[int], entry: Entry) -> None:
    """Adds a finished call to the values of `_TOTALS`, in its order."""
    sums[0] += 1
    sums[1] += entry.status in (SpanStatus.ERROR, SpanStatus.INTERRUPTED)
    sums[2] += entry.status == SpanStatus.CANCELLED
    if entry.usage is not None:
        sums[3] += entry.usage.input_tokens or 0
        sums[4] += entry.usage.output_tokens or 0
    sums[5] += entry.tool_calls
    sums[6] += entry.gap


def _last(txn: lmdb.Transaction, database: Any) -> int:
    with txn.cursor(db=database) as cursor:
        return keys.to_number(cursor.key()) if cursor.last() else 0


def _scan(txn: lmdb.Transaction, database: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    with txn.cursor(db=database) as cursor:
        found = cursor.set_range(prefix)
        while found and cursor.key().startswith(prefix):
            yield cursor.item()
            found = cursor.next()


def _slice(
    cursor: lmdb.Cursor, start: bytes | None, reverse: bool, exclusive: bool, prefix: bytes
) -> list[tuple[bytes, bytes]]:
    step = cursor.prev if reverse else cursor.next
    found = _place(cursor, start, reverse)
    if found and exclusive and start is not None and cursor.key() == start:
        found = step()
    items: list[tuple[bytes, bytes]] = []
    while found and len(items) < _SLICE and cursor.key().startswith(prefix):
        items.append(cursor.item())
        found = step()
    return items


def _place(cursor: lmdb.Cursor, start: bytes | None, reverse: bool) -> bool:
    if start is None:
        return cursor.last() if reverse else cursor.first()
    found = cursor.set_range(start)
    if not reverse:
        return found
    return found if found and cursor.key() == start else (cursor.prev() if found else cursor.last())


def _padded(record: bytes, defaults: list[Any]) -> list[Any]:
    values = codec.decode(record)
    return values + defaults[len(values) :]


def _span_from(key: bytes, record: bytes) -> Span:
    rollout, attempt, sequence = keys.split_head_key(key)
    found = dict(zip(_HEAD, _padded(record, _HEAD_DEFAULTS), strict=False))
    if found["usage"] is not None:
        found["usage"] = Usage.model_construct(**dict(zip(_USAGE, found["usage"], strict=False)))
    found["status"] = SpanStatus(found["status"])
    trace = found["trace_id"] = found["trace_id"] or trace_id(rollout, attempt)
    return Span.model_construct(
        rollout=rollout, attempt=attempt, sequence=sequence, span_id=span_id(trace, rollout, attempt, sequence), **found
    )


def _attempt_from(rollout: str, attempt: str, record: bytes) -> Attempt:
    found = dict(zip(_ATTEMPT, _padded(record, _ATTEMPT_DEFAULTS), strict=False))
    found["totals"] = dict(zip(_TOTALS, found["totals"], strict=False))
    return Attempt(rollout=rollout, id=attempt, **found)


def _rollout_from(rollout: str, record: bytes) -> Rollout:
    return Rollout(id=rollout, **dict(zip(_ROLLOUT, _padded(record, _ROLLOUT_DEFAULTS), strict=False)))
