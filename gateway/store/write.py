"""The one writer: a batch of entries becomes one transaction with one fsync.

Sequences, body numbers, styles and change cursors are given out inside the transaction, so they need no other
coordination. What the writer remembers between transactions is forgotten when one fails or when somebody else has
written. A batch of few calls is compressed call by call and strongly, a large one together and fast: under load the
machine is worth more than the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway import codec, keys
from gateway.codec import Body
from gateway.model import Rollout, SpanStatus
from gateway.store import records
from gateway.store.environment import Environment, TapeError, Txn, scan
from gateway.store.memory import Live, Memory
from gateway.store.records import Entry, Style
from gateway.store.view import BLOCK, View

TOGETHER = 32
"""Entries from which a batch is compressed together."""

_STYLES = 4096
_SPANS, _SEEN, _SUMS = (records.ATTEMPT.index(name) for name in ("spans", "last_seen_ns", "totals"))


@dataclass(slots=True)
class _Batch:
    """One transaction in the making."""

    view: View
    txn: Txn
    cursor: int
    alone: bool
    """True when each body is to be compressed by itself."""
    bodies: list[bytes] = field(default_factory=list[bytes])
    log: list[bytes] = field(default_factory=list[bytes])
    index: dict[bytes, bytearray] = field(default_factory=dict[bytes, bytearray])
    """Blocks of the index that have changed, by key."""
    dirty: list[Live] = field(default_factory=list[Live])

    def append(self, record: bytes) -> int:
        """Adds to the log and returns the cursor."""
        self.log.append(record)
        return self.cursor + len(self.log)


class Writer:
    """Owns the numbers that are given out; for one thread."""

    def __init__(self, env: Environment, memory_bytes: int) -> None:
        self._env = env
        self._dbs = env.dbs
        self._memory = Memory(memory_bytes)
        self._styles: dict[Style, int] = {}
        self._styles_seen: set[Style] = set()
        self._known = -1
        self._cursor = 0
        self._body = 0

    def write(self, entries: Sequence[Entry]) -> int:
        """Commits the entries and returns the newest cursor. An entry that is there twice is written as it is now."""
        entries = list(dict.fromkeys(entries))
        fresh = [entry for entry in entries if not entry.sequence]

        def apply(batch: _Batch) -> None:
            _reset(fresh)
            for entry in entries:
                self._put(batch, entry)

        try:
            return self._transact(apply, alone=len(entries) < TOGETHER)
        except BaseException:
            _reset(fresh)
            raise

    def interrupt_open(self) -> None:
        """Ends the calls that an earlier life of the gateway has left open."""

        def apply(batch: _Batch) -> None:
            for key, value in batch.txn.cursor(db=self._dbs["open"]):
                self._interrupt(batch, key, *codec.unpack_open(value))
            batch.txn.drop(self._dbs["open"], delete=False)

        self._transact(apply)

    def _interrupt(self, batch: _Batch, key: bytes, head: bytes, body: bytes | None) -> None:
        rollout, attempt, sequence = keys.split_head_key(key)
        number = None if body is None else self._add_body(batch, body)
        style, own = records.interrupted(head, batch.view.style, number)
        live = self._attempt(batch, Entry(rollout, attempt))
        records.count(live.values[_SUMS], Entry(rollout, attempt, status=SpanStatus.INTERRUPTED))
        self._finish(batch, live, sequence, records.head_of(self._style(batch, tuple(style)), own))

    # -- the transaction ---------------------------------------------------------------------------------------------

    def _transact(self, apply: Callable[[_Batch], None], alone: bool = True) -> int:
        def attempt(txn: Txn) -> tuple[int, _Batch]:
            if txn.id() != self._known + 1:
                self._recall(txn)
            # Until it is committed, nothing that is remembered can be relied on.
            self._known = -1
            batch = _Batch(View(txn, self._dbs, {}), txn, self._cursor, alone)
            apply(batch)
            self._flush(batch)
            return txn.id(), batch

        self._known, batch = self._env.write(attempt)
        self._cursor += len(batch.log)
        self._body += len(batch.bodies)
        self._memory.shed()
        return self._cursor

    def _recall(self, txn: Txn) -> None:
        """Reads back what another process, or an earlier life, has written."""
        self._memory.clear()
        view = View(txn, self._dbs, {})
        self._cursor = view.last("log")
        first = view.last("bodies")
        last = view.get("bodies", keys.number(first))
        self._body = 0 if last is None else first + len(codec.unpack_segment(last)) - 1
        stored = scan(txn, self._dbs["styles"], b"")
        self._styles = {tuple(codec.decode(value)): keys.to_number(key) for key, value in stored}
        self._styles_seen.clear()

    def _flush(self, batch: _Batch) -> None:
        txn, dbs = batch.txn, self._dbs
        for first, _, segment in (codec.pack_small if batch.alone else codec.pack_segments)(batch.bodies):
            txn.put(keys.number(self._body + 1 + first), segment, db=dbs["bodies"], append=True)
        for key, block in batch.index.items():
            txn.put(key, block, db=dbs["index"])
        for live in batch.dirty:
            live.dirty = False
            record = codec.encode(live.values, records.ATTEMPT_DEFAULTS)
            txn.put(live.key, record, db=dbs["attempts"])
        for first, count, segment in codec.pack_log(batch.log):
            txn.put(keys.number(batch.cursor + first + count), segment, db=dbs["log"], append=True)

    # -- calls -------------------------------------------------------------------------------------------------------

    def _put(self, batch: _Batch, entry: Entry) -> None:
        live = self._attempt(batch, entry)
        announced = bool(entry.sequence)
        if not announced:
            live.values[_SPANS] += 1
            entry.sequence = live.values[_SPANS]
        if entry.start_ns > live.values[_SEEN]:
            live.values[_SEEN] = entry.start_ns
        if entry.status == SpanStatus.OPEN:
            self._announce(batch, live, entry)
            return
        if entry.retried:
            _link_retry(live, entry)
        number = None if entry.body is None else self._put_body(batch, live, entry, entry.body)
        usage = codec.usage_values(entry.usage)
        records.count(live.values[_SUMS], entry, usage)
        head = entry.head(self._style(batch, entry.style()), number, usage)
        self._finish(batch, live, entry.sequence, head)
        if announced:
            batch.txn.delete(live.key + keys.u32(entry.sequence), db=self._dbs["open"])

    def _announce(self, batch: _Batch, live: Live, entry: Entry) -> None:
        key = live.key + keys.u32(entry.sequence)
        body = None
        if entry.body is not None:
            body, _ = codec.pack_body(entry.body, 0, self._memory.base(live, entry.body.request), alone=True)
        head = entry.head(self._style(batch, entry.style()), None, None)
        batch.txn.put(key, codec.pack_open(head, body), db=self._dbs["open"])
        batch.append(b"o" + key)
        self._index(batch, live, entry.sequence, 0)

    def _put_body(self, batch: _Batch, live: Live, entry: Entry, body: Body) -> int:
        number = self._body + len(batch.bodies) + 1
        record, base = codec.pack_body(body, number, self._memory.base(live, body.request), batch.alone)
        self._memory.keep(live, base)
        live.newest = entry.retry_of or entry.sequence
        return self._add_body(batch, record)

    def _add_body(self, batch: _Batch, record: bytes) -> int:
        batch.bodies.append(record)
        return self._body + len(batch.bodies)

    def _finish(self, batch: _Batch, live: Live, sequence: int, head: bytes) -> None:
        self._index(batch, live, sequence, batch.append(b"s" + live.key + keys.u32(sequence) + head))

    def _index(self, batch: _Batch, live: Live, sequence: int, cursor: int) -> None:
        block, at = divmod(sequence - 1, BLOCK)
        cursors = self._block(batch, live, block)
        cursors.extend(bytes(max(0, 8 * (at + 1) - len(cursors))))
        cursors[8 * at : 8 * at + 8] = keys.number(cursor)
        if not live.dirty:
            live.dirty = True
            batch.dirty.append(live)

    def _block(self, batch: _Batch, live: Live, block: int) -> bytearray:
        """A block of the attempt's index, about to change. The last one is remembered: a read costs more than all else
        that is done to it, because LMDB lets go of the interpreter for every read."""
        key = live.key + keys.u32(block)
        if live.block != block:
            live.block = block
            live.cursors = batch.index.get(key) or bytearray(batch.view.get("index", key) or b"")
        batch.index[key] = live.cursors
        return live.cursors

    def _style(self, batch: _Batch, style: Style) -> int | Style:
        """Its number; itself on its first appearance, and when the table is full: some calls are like no other."""
        number = self._styles.get(style)
        if number is not None:
            return number
        if style not in self._styles_seen or len(self._styles) >= _STYLES:
            if len(self._styles_seen) >= _STYLES:
                self._styles_seen.clear()
            self._styles_seen.add(style)
            return style
        number = self._styles[style] = len(self._styles) + 1
        batch.txn.put(keys.number(number), codec.encode(list(style), [None] * len(style)), db=self._dbs["styles"])
        return number

    # -- attempts ----------------------------------------------------------------------------------------------------

    def _attempt(self, batch: _Batch, entry: Entry) -> Live:
        live = self._memory.find((entry.rollout, entry.attempt))
        if live is None:
            live = self._recall_attempt(batch, entry)
            live.values[_SUMS] = list(live.values[_SUMS])
            self._memory.add(live)
        return live

    def _recall_attempt(self, batch: _Batch, entry: Entry) -> Live:
        name = entry.rollout, entry.attempt
        key = keys.attempt_key(*name)
        stored = batch.view.get("attempts", key)
        if stored is None:
            return Live(name, self._new_attempt(batch, entry, key), key)
        live = Live(name, records.padded(stored, records.ATTEMPT_DEFAULTS), key)
        # Reading the base back costs a fraction of a millisecond: only where there is time for it.
        if batch.alone:
            self._recall_base(batch, live)
        return live

    def _recall_base(self, batch: _Batch, live: Live) -> None:
        try:
            found = batch.view.newest_body(*live.name, live.values[_SPANS])
        except (TapeError, *codec.UNREADABLE):
            # A damaged old body must not stop the recording of new ones; `check` reports it.
            return
        if found is not None:
            live.newest, live.base = found

    def _new_attempt(self, batch: _Batch, entry: Entry, key: bytes) -> list[Any]:
        rollout_key = keys.rollout_key(entry.rollout)
        if batch.view.get("rollouts", rollout_key) is None:
            self._new_rollout(batch, entry, rollout_key)
        earlier = sum(1 for _ in scan(batch.txn, self._dbs["attempts"], rollout_key))
        batch.append(b"a" + key)
        values = records.new_attempt(earlier + 1, entry.start_ns)
        # At once, so that the next new attempt of this transaction counts it.
        batch.txn.put(key, codec.encode(values, records.ATTEMPT_DEFAULTS), db=self._dbs["attempts"])
        return values

    def _new_rollout(self, batch: _Batch, entry: Entry, key: bytes) -> None:
        made = Rollout(id=entry.rollout, origin=entry.origin, mode=entry.mode, created_ns=entry.start_ns)
        record = codec.encode(codec.values(made, records.ROLLOUT), records.ROLLOUT_DEFAULTS)
        batch.txn.put(key, record, db=self._dbs["rollouts"])
        cursor = batch.append(b"r" + key)
        batch.txn.put(keys.number(cursor), key, db=self._dbs["order"], append=True)


def _reset(fresh: list[Entry]) -> None:
    for entry in fresh:
        entry.sequence = 0


def _link_retry(live: Live, entry: Entry) -> None:
    """A client that repeats itself sends the same body; the link goes to the first of them."""
    if live.base is not None and entry.body is not None and live.base.request == entry.body.request:
        entry.retry_of = live.newest
