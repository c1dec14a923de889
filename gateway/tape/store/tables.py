"""Rollouts, attempts and calls as an open transaction changes them, and the numbers that they get.

Sequences, body numbers, styles and change cursors are given out here, inside the transaction, so they need no other
coordination. When a transaction has failed, `recall` reads the memory between transactions back from the tape. When
another process has written, `follow` reads back what may have changed. The log names the rollouts and attempts that
have changed, and those that were forgotten. It does not tell of two kinds of change, so `meta/untold` counts the
transactions that have made them:

* A lease is renewed. Attempts that the log does not name are then compared with their records, when they are used.
* A shared body is cut, because rollouts that used more of it were wiped. Then all shared bodies in memory are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from penstock.gateway.model.rollout import AttemptStatus, Rollout
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.tape.store import codec, keys, records
from penstock.gateway.tape.store.cache import CachedAttempt, CachedRollout, SharedBody, WriterCache
from penstock.gateway.tape.store.codec import DeltaBase, StoredBody
from penstock.gateway.tape.store.directory import DEFERRED, DamagedRecordError
from penstock.gateway.tape.store.environment import ORDER, Txn
from penstock.gateway.tape.store.records import SpanEntry, Style, span_from
from penstock.gateway.tape.store.view import BLOCK, TapeView, last_block

_STYLES = 4096
_FAILED = 64
"""Requests of an attempt that are remembered because their calls failed."""
_PIECE = 16
"""Records of attempts that are written as one piece of work."""
_SPANS, _SEEN, _SUMS, _STATUS, _WORKER = map(
    records.ATTEMPT.index, ("spans", "last_seen_ns", "totals", "status", "worker")
)
_OF_ROLLOUTS = (b"r", b"a", b"o", b"s")
DORMANT = (
    AttemptStatus.PREPARING, AttemptStatus.UNRESPONSIVE, AttemptStatus.ENDED, AttemptStatus.FAILED,
    AttemptStatus.SUCCEEDED,
)  # fmt: skip
"""Statuses of attempts that a sign of life may wake."""
BatchActivityHook: TypeAlias = "Callable[[WriteBatch, CachedAttempt, int], None]"
"""Called with the attempt and the time of the sign of life (ns): for the first call of an attempt that nobody has
claimed, and for a sign of life of a dormant one."""
UNLOGGED_KEY: Final = b"untold"
"""In `meta`: the values of `UnloggedCounts`, 8 bytes each; missing while both are 0."""


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


class UnloggedCounts(NamedTuple):
    """Numbers of transactions that have made changes of which the log does not tell."""

    touched: int = 0
    """Transactions that have changed attempts."""
    cut: int = 0
    """Transactions that have changed shared bodies."""

    def after(self, batch: WriteBatch) -> UnloggedCounts:
        """Return the numbers after this transaction."""
        return UnloggedCounts(self.touched + batch.touched, self.cut + batch.cut)


class TapeTables:
    """The tables and their memory; for the thread that writes."""

    def __init__(
        self, dbs: Mapping[str, Any], memory_bytes: int, heard: BatchActivityHook | None, process: str
    ) -> None:
        """`process`: the name that marks the calls which this process announces."""
        self.dbs = dbs
        self._process = process
        self._heard = heard
        self._memory = WriterCache(memory_bytes)
        self._styles: dict[Style, int] = {}
        self._last_style = 0
        self._styles_seen: set[Style] = set()
        self._body = 0
        self._untold = UnloggedCounts()
        self._turn = 0
        """Number of times that attempts may have changed without being named in the log."""

    def recall(self, view: TapeView) -> None:
        """Drop the memory and read the numbers back from the tape."""
        self._memory.clear()
        self._styles.clear()
        self._styles_seen.clear()
        self._last_style = 0
        self._go_on(view)

    def follow(self, view: TapeView, changes: Sequence[bytes]) -> None:
        """Read back what others have written since. `changes`: the records that they have added to the log."""
        before = self._untold
        self._go_on(view)
        self._turn += self._untold.touched != before.touched
        if self._untold.cut != before.cut:
            self._memory.clear_shared()
        for record in changes:
            if record[:1] in _OF_ROLLOUTS:
                self._drop(record)
        if gone := {_rollout_of(record) for record in changes if record[:1] == b"f"}:
            attempts = self._memory.attempts_of(gone)
            for rollout in gone:
                self._memory.forget(rollout, attempts.get(rollout, ()))

    def _drop(self, change: bytes) -> None:
        """Drop the memory of the rollout or attempt that this change names."""
        kind, rollout = change[:1], _rollout_of(change)
        if kind in (b"r", b"a"):
            self._memory.drop_rollout(rollout)
        if kind in (b"a", b"o", b"s"):
            self._memory.invalidate((rollout, change.split(b"\0", 2)[1].decode("ascii")))

    def _go_on(self, view: TapeView) -> None:
        """Read the last numbers, and the new styles."""
        first = view.last("bodies")
        last = view.get("bodies", keys.number(first))
        self._body = 0 if last is None else first + len(codec.unpack_segment(last)) - 1
        newest = view.last("styles")
        for number in range(self._last_style + 1, newest + 1):
            self._styles[tuple(view.style(number))] = number
        self._last_style = newest
        self._untold = UnloggedCounts(*keys.to_numbers(view.get("meta", UNLOGGED_KEY) or b""))

    def flush(self, batch: WriteBatch) -> None:
        """Write the gathered changes of a transaction, before it is committed."""
        txn, dbs = batch.txn, self.dbs
        for first, _, segment in (codec.pack_small if batch.alone else codec.pack_segments)(batch.bodies):
            if not batch.alone:
                batch.between()
            txn.put(keys.number(self._body + 1 + first), segment, db=dbs["bodies"], append=True)
        for key, block in batch.index.items():
            txn.put(key, keys.numbers(block), db=dbs["index"])
        for at, live in enumerate(batch.dirty):
            if not at % _PIECE:
                batch.between()
            live.dirty = False
            live.stored = records.attempt_record(live.values, live.cursors, live.origins)
            txn.put(live.record_key, live.stored, db=dbs["attempts"])
        for database, found in batch.final_records.items():
            for key, value in found.items():
                if value is not None:
                    txn.put(key, value.packed(), db=dbs[database])
                    batch.wrote = True
                else:
                    batch.wrote |= txn.delete(key, db=dbs[database])
        if batch.touched or batch.cut:
            txn.put(UNLOGGED_KEY, keys.numbers(self._untold.after(batch)), db=dbs["meta"])
        for first, count, segment in codec.pack_log(batch.log):
            txn.put(keys.number(batch.cursor + first + count), segment, db=dbs["log"], append=True)

    def committed(self, batch: WriteBatch) -> None:
        """Called when the flushed changes are on the tape."""
        self._body += len(batch.bodies)
        if batch.touched or batch.cut:
            self._untold = self._untold.after(batch)
        self._memory.evict()

    # -- calls -------------------------------------------------------------------------------------------------------

    def put(self, batch: WriteBatch, entry: SpanEntry, seen_ns: int | None = None) -> None:
        """Write a span in its present state. `seen_ns`: the time of the agent's sign of life, if that is not when the
        span began or ended, because times in spans of others may be wrong; 0 is no sign of life."""
        live = self._memory.find((entry.rollout, entry.attempt))
        if live is None or live.outdated or live.turn != self._turn or not (live.newest or live.sought):
            live = self.ensure_attempt(batch, entry, seen_ns or None)
        announced = bool(entry.sequence)
        if not announced:
            live.values[_SPANS] += 1
            entry.sequence = live.values[_SPANS]
        seen = max(entry.start_ns, entry.end_ns or 0) if seen_ns is None else seen_ns
        if seen > live.values[_SEEN]:
            live.values[_SEEN] = seen
        unclaimed = entry.sequence == 1 and not announced and live.values[_WORKER] is None
        if self._heard is not None and (unclaimed or (live.values[_STATUS] in DORMANT and seen)):
            self._heard(batch, live, seen)
        if entry.status == SpanStatus.OPEN or entry.deferred is not None:
            self._announce(batch, live, entry)
            return
        if entry.retried or (entry.uncounted_tries and live.failed):
            _link_retry(live, entry)
        if entry.status != SpanStatus.OK and entry.body is not None:
            _note_failed(live, entry)
        number = None if entry.body is None else self._put_body(batch, live, entry, entry.body)
        usage = codec.usage_values(entry.usage)
        records.add_to_totals(live.values[_SUMS], entry, usage)
        style = entry.style()
        summary = entry.summary(self._styles.get(style) or self._style(batch, style), number, usage)
        batch.log.append(b"s" + live.key + keys.u32(entry.sequence) + summary)
        self._index(batch, live, entry.sequence, batch.cursor + len(batch.log))
        if announced:
            batch.txn.delete(live.key + keys.u32(entry.sequence), db=self.dbs["open"])

    def _announce(self, batch: WriteBatch, live: CachedAttempt, entry: SpanEntry) -> None:
        key = live.key + keys.u32(entry.sequence)
        body, process = None, self._process if entry.deferred is None else DEFERRED
        if entry.body is not None:
            # A base may be gone before the call has ended, so that none is made for it.
            base = self._memory.base(live, entry.body.request) if entry.deferred is None else None
            known = base.base if isinstance(base, SharedBody) else base if isinstance(base, DeltaBase) else None
            body, _ = codec.pack_body(entry.body, 0, known, alone=True)
        summary = entry.summary(self._style(batch, entry.style()), None, None)
        batch.txn.put(key, codec.pack_open(summary, body, process), db=self.dbs["open"])
        batch.append(b"o" + key)
        self._index(batch, live, entry.sequence, 0)

    def _put_body(self, batch: WriteBatch, live: CachedAttempt, entry: SpanEntry, body: StoredBody) -> int:
        base = self._memory.base(live, body.request)
        if isinstance(base, bytes):
            base = self._share(batch, base)
        shared = isinstance(base, SharedBody)
        known = self._memory.use_shared(base) if isinstance(base, SharedBody) else base
        record, made = codec.pack_body(body, self._body + len(batch.bodies) + 1, known, batch.alone)
        self._memory.set_base(live, made)
        live.newest = entry.retry_of or entry.sequence
        batch.bodies.append(record)
        number = self._body + len(batch.bodies)
        if shared:
            self._put_use(batch, number, record)
        return number

    def _share(self, batch: WriteBatch, text: bytes) -> SharedBody:
        """Make a shared body of this text."""
        record, base = codec.pack_shared(text, self._body + len(batch.bodies) + 1, batch.alone)
        self._add_body(batch, record)
        return self._memory.add_shared(base)

    def _put_use(self, batch: WriteBatch, number: int, record: bytes) -> None:
        """Note that a body is stored against a shared one, and how much of it it uses."""
        base, *used = codec.base_use(record)
        batch.txn.put(keys.numbers((base, number)), keys.numbers(used), db=self.dbs["uses"])

    def _add_body(self, batch: WriteBatch, record: bytes) -> int:
        batch.bodies.append(record)
        return self._body + len(batch.bodies)

    def _index(self, batch: WriteBatch, live: CachedAttempt, sequence: int, cursor: int) -> None:
        block, at = divmod(sequence - 1, BLOCK)
        cursors = live.cursors if block == live.block else self._block(batch, live, block)
        cursors.extend([0] * (at + 1 - len(cursors)))
        cursors[at] = cursor
        if not live.dirty:
            self.touch(batch, live)

    def touch(self, batch: WriteBatch, live: CachedAttempt) -> None:
        """Mark an attempt's record as changed."""
        if not live.dirty:
            live.dirty = True
            batch.dirty.append(live)

    def _block(self, batch: WriteBatch, live: CachedAttempt, block: int) -> list[int]:
        """Return a block of the attempt's index, about to change. The last one is stored with the attempt, which
        changes with every call anyway; those before it have records of their own."""
        if block > live.block:
            batch.index[live.record_key + keys.u32(live.block)] = live.cursors
            live.block, live.cursors = block, []
        if block == live.block:
            return live.cursors
        key = live.record_key + keys.u32(block)
        if key not in batch.index:
            batch.index[key] = keys.to_numbers(batch.view.get("index", key) or b"")
        return batch.index[key]

    def newest_spans(self, batch: WriteBatch, live: CachedAttempt) -> Iterator[Span]:
        """Yield the spans of an attempt that have ended, the newest first."""
        for sequence in range(live.values[_SPANS], 0, -1):
            number, at = divmod(sequence - 1, BLOCK)
            key = live.record_key + keys.u32(number)
            block = live.cursors if number == live.block else batch.index.get(key)
            cursors = keys.to_numbers(batch.view.get("index", key) or b"") if block is None else block
            cursor = cursors[at] if at < len(cursors) else 0
            if cursor > batch.cursor:
                head = b"s" + live.key + keys.u32(sequence)
                yield span_from(head[1:], batch.log[cursor - batch.cursor - 1][len(head) :], batch.view.style)
            elif cursor:
                yield batch.view.summary(*live.name, sequence, cursor)

    def _style(self, batch: WriteBatch, style: Style) -> int | Style:
        """Return the number of a style; the style itself when it appears for the first time, or when the table is
        full."""
        number = self._styles.get(style)
        if number is not None:
            return number
        if style not in self._styles_seen or len(self._styles) >= _STYLES:
            if len(self._styles_seen) >= _STYLES:
                self._styles_seen.clear()
            self._styles_seen.add(style)
            return style
        # Never the number of another style: summaries with that number would be read with this style.
        self._last_style += 1
        number = self._styles[style] = self._last_style
        record = codec.encode(list(style), records.STYLE_DEFAULTS)
        batch.txn.put(keys.number(number), record, db=self.dbs["styles"])
        return number

    def interrupt(self, batch: WriteBatch, living: Collection[str]) -> None:
        """End the open calls of all processes that are not in `living`."""
        living = {DEFERRED, *living}
        left = [(key, value) for key, value in batch.view.scan("open") if codec.process_of(value) not in living]
        for key, value in left:
            self._interrupt(batch, key, *codec.unpack_open(value))
            batch.txn.delete(key, db=self.dbs["open"])

    def _interrupt(self, batch: WriteBatch, key: bytes, summary: bytes, body: bytes | None) -> None:
        rollout, attempt, sequence = keys.split_summary_key(key)
        number = None if body is None else self._add_body(batch, body)
        if number is not None and body is not None and batch.view.has("uses", keys.number(codec.base_use(body)[0])):
            self._put_use(batch, number, body)
        style, own = records.interrupted_summary(summary, batch.view.style, number)
        live = self.ensure_attempt(batch, SpanEntry(rollout, attempt))
        said = {name: style[records.STYLE.index(name)] for name in ("kind", "dialect", "upstream")}
        records.add_to_totals(live.values[_SUMS], SpanEntry(rollout, attempt, status=SpanStatus.INTERRUPTED, **said))
        summary = records.encode_summary(self._style(batch, tuple(style)), own)
        self._index(batch, live, sequence, batch.append(b"s" + live.key + keys.u32(sequence) + summary))

    def forget(self, rollout: str, attempts: Iterable[str]) -> None:
        """Drop a forgotten rollout, with these attempts, from memory."""
        self._memory.forget(rollout, attempts)

    def forget_shared(self, numbers: Container[int]) -> None:
        """Drop changed shared bodies from memory."""
        self._memory.forget_shared(numbers)

    # -- attempts and rollouts ---------------------------------------------------------------------------------------

    def ensure_attempt(self, batch: WriteBatch, entry: SpanEntry, now_ns: int | None = None) -> CachedAttempt:
        """Return the attempt that an entry belongs to; it and its rollout are made if need be. `now_ns`: given where
        the clock that the entry began by may be wrong."""
        live = self._find(batch, (entry.rollout, entry.attempt))
        if live is None:
            began = entry.start_ns if now_ns is None else min(entry.start_ns, now_ns)
            known = self.rollout(batch, entry.rollout) or self._new_rollout(batch, entry, began)
            made = entry.attempt not in known.attempts
            live = self._new_attempt(batch, entry, known, began) if made else self._recall_attempt(batch, entry, known)
            before = self._memory.drop(live.name)
            if before is not None and before.record_key == live.record_key:
                live.base, live.failed = before.base, before.failed
            live.values[_SUMS] = list(live.values[_SUMS])
            self._memory.add(live)
        # Reading the base back costs a fraction of a millisecond: only for a body, and only where there is time for it.
        if not live.newest and not live.sought and entry.body is not None and batch.alone:
            self._recall_base(batch, live)
        return live

    def _find(self, batch: WriteBatch, name: tuple[str, str]) -> CachedAttempt | None:
        """Return a remembered attempt if it still equals the tape; else None."""
        live = self._memory.find(name)
        if live is not None and live.turn != self._turn and not live.outdated:
            live.outdated = batch.view.get("attempts", live.record_key) != live.stored
            live.turn = self._turn
        return None if live is None or live.outdated else live

    def peek(self, batch: WriteBatch, name: tuple[str, str]) -> list[Any] | None:
        """Return the values of an attempt as they are now, None when there is none. It is not remembered: that takes a
        tenth of the time of `live`."""
        live = self._find(batch, name)
        if live is not None:
            return live.values
        stored = batch.view.attempt_values(*name)
        return None if stored is None else stored[1]

    def rollout(self, batch: WriteBatch, name: str) -> CachedRollout | None:
        """Return a rollout as the tape has it; None when there is none. Changes of it must be written in the same
        transaction."""
        known = self._memory.rollout(name)
        if known is None:
            stored = batch.view.numbered_rollout(name)
            if stored is not None:
                number, rollout = stored
                known = CachedRollout(rollout, batch.view.attempt_names(number), number)
                self._memory.add_rollout(known)
        return known

    def add_rollout(self, batch: WriteBatch, known: CachedRollout) -> int:
        """Make a rollout and return its number, the cursor of the change."""
        key = keys.rollout_key(known.rollout.id)
        known.number = batch.append(b"r" + key)
        batch.txn.put(ORDER, keys.number(known.number), db=self.dbs["order"], append=True)
        self._memory.add_rollout(known)
        return known.number

    def put_rollout(self, batch: WriteBatch, rollout: Rollout) -> None:
        """Write the changing values of a rollout."""
        known = self.rollout(batch, rollout.id)
        assert known is not None, rollout.id
        record = records.rollout_record(known.number, rollout)
        batch.txn.put(keys.rollout_key(rollout.id), record, db=self.dbs["rollouts"])

    def _new_rollout(self, batch: WriteBatch, entry: SpanEntry, began: int) -> CachedRollout:
        made = Rollout(id=entry.rollout, origin=entry.origin, mode=entry.mode, created_ns=began)
        known = CachedRollout(made, [])
        self.add_rollout(batch, known)
        self.put_rollout(batch, made)
        return known

    def _new_attempt(self, batch: WriteBatch, entry: SpanEntry, known: CachedRollout, began: int) -> CachedAttempt:
        key = keys.attempt_key(entry.rollout, entry.attempt)
        known.attempts.append(entry.attempt)
        batch.append(b"a" + key)
        values = records.new_attempt(len(known.attempts), began)
        return CachedAttempt((entry.rollout, entry.attempt), values, key, known.origins, sought=True, turn=self._turn)

    def _recall_attempt(self, batch: WriteBatch, entry: SpanEntry, known: CachedRollout) -> CachedAttempt:
        name = entry.rollout, entry.attempt
        live = CachedAttempt(name, [], keys.attempt_key(*name), known.origins, turn=self._turn)
        stored = batch.view.get("attempts", live.record_key)
        if stored is None:
            raise DamagedRecordError(f"the record of attempt {'/'.join(name)} is missing; run `penstock check`")
        live.values, live.cursors = records.attempt_values(stored, known.origins)
        live.stored = stored
        live.block = last_block(live.values[_SPANS])
        return live

    def _recall_base(self, batch: WriteBatch, live: CachedAttempt) -> None:
        live.sought = True
        try:
            found = batch.view.newest_body(*live.name, live.values[_SPANS])
        except (DamagedRecordError, *codec.DECODE_ERRORS):
            # A damaged old body must not stop the recording of new ones; `check` reports it.
            return
        if found is not None:
            live.newest, base = found
            self._memory.set_base(live, base)


def _rollout_of(change: bytes) -> str:
    return change[1 : change.index(b"\0")].decode("ascii")


def _link_retry(live: CachedAttempt, entry: SpanEntry) -> None:
    """Link a repeated call to the first of its kind: a client that repeats itself sends the same body. Of equal calls
    that failed side by side, each is repeated once."""
    if entry.body is None:
        return
    key = hash(entry.body.request)
    if failed := live.failed.get(key):
        entry.retry_of = failed.pop(0)
    elif entry.retried and live.newest and live.base is not None and live.base.request == entry.body.request:
        entry.retry_of = live.newest


def _note_failed(live: CachedAttempt, entry: SpanEntry) -> None:
    assert entry.body is not None
    key = hash(entry.body.request)
    live.failed[key] = [*live.failed.pop(key, ())[-_FAILED:], entry.retry_of or entry.sequence]
    if len(live.failed) > _FAILED:
        del live.failed[next(iter(live.failed))]
