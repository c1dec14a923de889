"""Writes finished calls and operations to the tape, in batches and in order, on one thread, never delaying a byte.

The loop appends calls to a queue; the thread takes them, reads facts out of the bodies, masks secrets and commits. A
call that has run for a quarter of a second is put on the tape as open, so that people see it, and so that a crash
leaves an `interrupted` span and not a hole. With `record = "strict"` every call is put on the tape before it is sent
upstream.

The queue is bounded in bytes and in time: when it is full, or when an answer that is put there would come to the tape
late, the end of the *call* waits (`full`). So training data is never dropped to save latency, and a kill loses no
answer that is older than a second, however little of the machine this process is given. When the tape itself fails, the
mode's `on_record_failure` decides; the summaries of unrecorded calls are kept, without bodies, until the tape takes
them, and count as gaps. If an item cannot be written because of a bug, or because of damage on the tape, only that item
is lost: the error is logged, a call counts as a gap, and others go on.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence, Sized
from contextlib import suppress
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

from penstock.gateway.config import TapeSettings
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import DamagedRecordError, TapeError
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.tables import no_op
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction, WriteItem

# The moments at which the recorder's thread yields the core: between two pieces of its work, the less often the more
# is queued.
#
# The kernel lets a thread that computes run on for milliseconds while the event loop waits for the same core, so the
# thread yields the core. A loop that is never idle then has it for some milliseconds each time. So the thread does
# more between two yields when more is queued: otherwise the queue would grow until it is full, and commits would be
# late. Each call then waits for a few pieces, and few calls wait for a whole batch.
#
# Nor does it yield for long: the kernel may run any process, not only this gateway's loop, and on a busy machine each
# call would come to the tape late by a slice of each process. When somebody waits for the commit, the time of the
# loop counts as well: under load the loop's slices are what makes an operation late.

_QUEUED: Final = 2
_QUEUED_BYTES: Final = 64 << 10
"""Calls and bytes that may be queued for each piece of work between two yields."""
_SPARE_S: Final = 0.010
"""Seconds that others may run for each batch: some slices of the kernel."""
_YIELD: Final[Callable[[], object]] = getattr(os, "sched_yield", no_op)


class LoopYield:
    """The yields of one thread. Made in the thread of the event loop."""

    def __init__(self, metrics: Metrics, queue: Sized, hurry: threading.Event) -> None:
        """`queue`: calls that wait for the next batch; `hurry`: set if somebody waits for it."""
        self._metrics, self._queue, self._hurry = metrics, queue, hurry
        self._hurried = False
        self._until = math.inf
        self._spare = 0.0
        self._pieces = 0
        """Pieces of work since the last yield."""
        self._loop_seconds = _clock_of(threading.get_ident())

    def begin(self, hurried: bool = False, until: float = math.inf) -> None:
        """Called when a batch begins. `hurried`: somebody waits for it; `until`: monotonic time after which it is late,
        and yields no more."""
        self._hurried, self._until, self._spare = hurried, until, _SPARE_S

    def __call__(self) -> None:
        """Called after each piece of work: yield the core if it is time to."""
        pieces = self._pieces = self._pieces + 1
        if pieces * _QUEUED <= len(self._queue) or pieces * _QUEUED_BYTES <= self._metrics.recorder_queue_bytes:
            return
        if self._spare <= 0 or time.monotonic() > self._until:
            return
        self._pieces = 0
        began, loop = time.perf_counter(), self._loop_seconds()
        _YIELD()
        used = 0.0 if self._hurried or self._hurry.is_set() else self._loop_seconds() - loop
        self._spare -= time.perf_counter() - began - used


def _clock_of(thread: int) -> Callable[[], float]:
    """Return a function that reads the CPU time of a thread in seconds; always 0 where the system does not tell."""
    try:
        clock = time.pthread_getcpuclockid(thread)
    except (AttributeError, OSError):
        return float
    return partial(time.clock_gettime, clock)


_log = logging.getLogger("penstock.recorder")
_BATCH = 256
_BATCH_BYTES = 16 << 20
_KEPT_GAPS = 10_000
_RETRY_SECONDS = 0.5
_SWITCH_SECONDS = 0.0002
_BUG = "it could not be written; the gateway's log says why"
_LATE_SECONDS = 0.4
"""An answer waits for its span if the span would be later than this. The rest of a second is for a batch that takes
longer than those before it."""
_BATCH_SECONDS = 0.2
"""Time for reading the calls of a batch before it is committed."""
_REST_SECONDS = 10.0
"""Time without a call after which memory that batches have used goes back to the system."""
_GATHER_SECONDS = 0.005
"""Time for which calls are gathered for one commit: about that of an fsync, so that the disk is never idle for long."""


class Recordable(Protocol):
    """A call, or what one brings while it runs, as the recorder sees it."""

    @property
    def weight(self) -> int:
        """Bytes that the call holds in memory now."""
        ...

    def entry(self, final: bool) -> WriteItem | None:
        """Return the entry for the tape; called on the recorder's thread. Of a call it is the same object every time,
        or None for an announcement after its end."""
        ...


Done = Callable[[bool], None]
T = TypeVar("T")


class _QueueItem(NamedTuple):
    call: Recordable | QueuedOperation[Any] | None
    """The call or operation; None for a mark in the queue, which writes nothing."""
    final: bool
    weight: int
    done: Done | None
    since: float
    """Time at which it was queued; s of the monotonic clock."""


def give_back_memory() -> None:
    """Return free memory to the system. The C library keeps it for what comes next, which may be never."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc's
        trim(0)


class Recorder:
    """The queue and the thread that write a store."""

    def __init__(
        self,
        store: Store,
        config: TapeSettings,
        metrics: Metrics,
        committed: Callable[[int, Sequence[bytes]], None],
        tell: Callable[[SpanEntry, bool], None] | None = None,
        others: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """`committed` is called on the loop after every commit, never before, with the newest cursor and the new
        records of the log. `tell` is called on the thread with every entry, and with whether the tape has taken it.
        `others` makes the other workers of this gateway write their queues; it returns True if their tape takes them.
        """
        self.store = store
        self.failing: str | None = None
        """The reason why the tape cannot be written now; None while it can."""
        self._config = config
        self._metrics = metrics
        self._committed = committed
        self._tell, self._others = tell, others
        self._strict = config.record == "strict"
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_QueueItem] = deque()
        self._taken: list[_QueueItem] = []
        self._oldest: float | None = None
        """Time at which the oldest item of the batch in progress was queued; None when there is none."""
        self._pace = self._commit_seconds = 0.0
        """Seconds that the last batch took per call to be read, and as a whole to be committed."""
        self._held: list[SpanEntry] = []
        self._records: list[bytes] = []
        """Records of the log that the loop was not told of yet."""
        self._wake = threading.Event()
        self._hurry, self._hurried = threading.Event(), False  # somebody waits for the queue, for the batch in progress
        self._loop_yield = LoopYield(metrics, self._queue, self._hurry)
        self._sleeping = self._closed = self._ended = self._used = False
        self._thread = threading.Thread(target=self._run, name="penstock-recorder", daemon=True)

    def start(self) -> None:
        """Start the thread. The switch interval is short: the loop must not wait long for the interpreter while the
        thread computes."""
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False when nothing is written any more: it is closed, or a bug, which was logged, has ended its thread."""
        return not self._ended

    def put(self, call: Recordable, done: Done | None = None) -> None:
        """Queue a finished call; `done` is called on the loop with True once it is on disk, False when it is lost."""
        self._push(call, True, done)

    def announce(self, call: Recordable, done: Done | None = None) -> None:
        """Queue a running call, to be seen as open; `done` as in `put`."""
        self._push(call, False, done)

    @property
    def idle(self) -> bool:
        """True when everything in the queue is durable, or lost."""
        return self._metrics.recorder_queue_calls == 0

    @property
    def full(self) -> bool:
        """True when the end of the next call has to wait for the writer."""
        metrics = self._metrics
        if metrics.recorder_queue_bytes > self._config.queue_bytes:
            return True
        waiting = metrics.recorder_queue_calls
        return waiting > 0 and self.behind + self._commit_seconds + waiting * self._pace > _LATE_SECONDS

    @property
    def behind(self) -> float:
        """Time for which the oldest call that is not durable has been queued; s."""
        oldest = self._oldest
        if oldest is None:
            with suppress(IndexError):  # the thread has just taken the last one
                oldest = self._queue[0].since
        return 0.0 if oldest is None else time.monotonic() - oldest

    def submit(self, do: Callable[[Transaction], T]) -> asyncio.Future[T]:
        """Run an operation in the next transaction, after all earlier items of the queue. Return a future that is done
        when the operation is durable.

        It fails with `OperationRefusedError` when the operation is refused, with `TapeError` when the tape does not
        take it, and with `DamagedRecordError` when only this operation cannot be written; nothing is written then.
        """
        task = QueuedOperation(do)
        done: asyncio.Future[T] = self._loop.create_future()

        def release(kept: bool) -> None:
            if done.done():
                return
            if task.failure:
                done.set_exception(DamagedRecordError(task.failure))
            elif not kept:
                done.set_exception(TapeError(self.failing or _BUG))
            elif task.refusal is not None:
                done.set_exception(task.refusal)
            else:
                done.set_result(cast(T, task.result))

        self._push(task, True, release)
        # Somebody waits for the answer: later items may go with the next commit.
        self._hurry.set()
        return done

    def _push(self, call: Recordable | QueuedOperation[Any] | None, final: bool, done: Done | None) -> None:
        weight = 0 if call is None or isinstance(call, QueuedOperation) else call.weight
        self._metrics.recorder_queue_bytes += weight
        self._metrics.recorder_queue_calls += 1
        self._queue.append(_QueueItem(call, final, weight, done, time.monotonic()))
        if self._sleeping:
            self._sleeping = False
            self._wake.set()
        elif self._ended:
            self._abandon()

    async def flush(self) -> bool:
        """Wait until everything queued before is durable; False when the tape does not take it."""
        done: asyncio.Future[bool] = self._loop.create_future()

        def release(kept: bool) -> None:
            if not done.done():
                done.set_result(kept)

        self._push(None, True, release)
        self._hurry.set()
        return await done

    async def flush_all(self) -> str | None:
        """Wait until everything that any worker of this gateway has queued before is durable. Return None, or the
        reason why the tape cannot be written."""
        if await self.flush_other_workers() and ((self.idle and self.failing is None) or await self.flush()):
            return None
        return self.failing or "the gateway's log says why"

    async def flush_other_workers(self) -> bool:
        """Wait until everything that the other workers have queued before is durable; False when their tape does not
        take it."""
        return True if self._others is None else await self._others()

    async def close(self) -> None:
        """Write the queue and stop the thread."""
        self._closed = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)
        self._ended = True
        self._abandon()

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._await_work():
                self._taken = self._take()
                if self._taken:
                    self._used = True
                    self._write(self._taken)
                    self._taken, self._oldest = [], None
                elif self.failing is not None:
                    self._write_held()
            self._write_held()
        except BaseException:
            self.failing = "the recorder stopped; the log says why"
            _log.critical("the recorder stopped: nothing is recorded any more", exc_info=True)
            self._queue.extendleft(reversed(self._taken))
            self._ended = True
            self._loop.call_soon_threadsafe(self._abandon)
        if self._held:
            _log.error("%d calls that were answered are not on the tape: %s", len(self._held), self.failing)

    def _await_work(self) -> bool:
        """Wait for work, and gather it for a moment; False when it is time to stop."""
        if not self._queue:
            if self._closed:
                return False
            self._sleeping = True
            if not self._queue and not self._closed:
                self._rest()
            self._sleeping = False
            self._wake.clear()
        if not self._strict and not self._closed and len(self._queue) < _BATCH:
            self._hurry.wait(_GATHER_SECONDS)
        self._hurried = self._hurry.is_set()
        self._hurry.clear()
        return True

    def _rest(self) -> None:
        """Wait for the next call, or until a tape that failed may be tried again."""
        if self.failing is not None:
            self._wake.wait(_RETRY_SECONDS)
        elif self._used and not self._wake.wait(_REST_SECONDS):
            self._used = False
            give_back_memory()
        elif not self._used:
            self._wake.wait()

    def _take(self) -> list[_QueueItem]:
        batch: list[_QueueItem] = []
        weight = 0
        self._oldest = self._queue[0].since if self._queue else None
        most = min(_BATCH, 1 + int(_BATCH_SECONDS / self._pace)) if self._pace else _BATCH
        while self._queue and len(batch) < most and weight < _BATCH_BYTES:
            item = self._queue.popleft()
            weight += item.weight
            batch.append(item)
        return batch

    def _write(self, batch: list[_QueueItem]) -> None:
        began = time.perf_counter()
        until = math.inf if self._oldest is None else self._oldest + _LATE_SECONDS / 2
        self._loop_yield.begin(self._strict or self._hurried, until)
        entries = self._entries(batch)
        written = list(filter(None, entries))
        read = time.perf_counter()
        self._pace = (read - began) / max(1, len(batch))
        try:
            cursor, lost = self._commit(written)
        except TapeError as error:
            self._failed(str(error), written)
            self._loop.call_soon_threadsafe(self._after, batch, None, 0, 0.0)
            self._tell_of(written, set(map(id, written)))
            return
        self._commit_seconds = time.perf_counter() - read
        seconds, spans = time.perf_counter() - began, sum(map(isinstance, written, repeat(SpanEntry)))
        gone = [item for item, entry in zip(batch, entries, strict=True) if id(entry) in lost] if lost else []
        batch = [item for item, entry in zip(batch, entries, strict=True) if id(entry) not in lost] if lost else batch
        records, self._records = self._records, []
        self._loop.call_soon_threadsafe(self._after, batch, cursor, spans, seconds, records, gone)
        self._tell_of(written, lost)

    def _tell_of(self, items: Sequence[WriteItem], lost: set[int]) -> None:
        """Tell of the entries of a batch, after its callers were answered. A call that began and ended within one batch
        is there twice."""
        if self._tell is None:
            return
        for item in dict.fromkeys(items):
            if isinstance(item, SpanEntry):
                try:
                    self._tell(item, id(item) not in lost)
                except Exception:
                    _log.exception("a call of %s cannot be told of", item.rollout)

    def _entries(self, batch: list[_QueueItem]) -> list[WriteItem | None]:
        """Return the entries of the items, None where there is nothing to write; an item that fails leaves the
        batch."""
        entries: list[WriteItem | None] = []
        between = self._loop_yield
        for item in batch.copy():
            between()
            try:
                call = item.call
                entries.append(call if call is None or isinstance(call, QueuedOperation) else call.entry(item.final))
            except Exception:
                _log.exception("a call cannot be recorded: it is lost")
                self._metrics.recording_gaps += item.final
                batch.remove(item)
                self._loop.call_soon_threadsafe(self._after, [item], None, 0, 0.0)
        return entries

    def _commit(self, entries: list[WriteItem]) -> tuple[int, set[int]]:
        """Write the entries and those held back; return the cursor and the ids of those that broke the writer and are
        lost."""
        everything: list[WriteItem] = [*self._held, *entries]
        if not everything:
            self.failing = None
            return 0, set()
        try:
            cursor, lost = self._store(everything), set[int]()
        except Exception as error:
            if _refused_by_disk(error):
                raise
            _log.exception("%d calls cannot be written together: trying each alone", len(everything))
            return self._commit_singly(list(dict.fromkeys(everything)))
        if self._held or self.failing is not None:
            self._goes_on()
        return cursor, lost

    def _goes_on(self) -> None:
        self._held.clear()
        if self.failing is not None:
            self.failing = None
            _log.info("recording goes on")

    def _store(self, items: list[WriteItem]) -> int:
        cursor = self.store.write(items, self._loop_yield)
        self._records += self.store.newest
        return cursor

    def _commit_singly(self, entries: list[WriteItem]) -> tuple[int, set[int]]:
        cursor, lost = 0, set[int]()
        self._held.clear()
        for at, entry in enumerate(entries):
            try:
                cursor = self._store([entry])
            except Exception as error:
                if _refused_by_disk(error):
                    self._failed(
                        str(error), entries[at:]
                    )  # entries before it are on the tape; all marks (None) fail too
                    return cursor, lost.union(map(id, [*entries[at:], None]))
                what = "a task" if isinstance(entry, QueuedOperation) else f"a call of {entry.rollout}"
                if isinstance(entry, QueuedOperation):
                    entry.failure = str(error) if isinstance(error, DamagedRecordError) else _BUG
                _log.exception("%s cannot be written: it is lost", what)
                self._metrics.recording_gaps += not isinstance(entry, QueuedOperation)
                lost.add(id(entry))
        self._goes_on()
        return cursor, lost

    def _write_held(self) -> None:
        count = len(self._held)
        try:
            cursor, _ = self._commit([])
        except TapeError:
            return
        records, self._records = self._records, []
        self._loop.call_soon_threadsafe(self._after, list[_QueueItem](), cursor, count, 0.0, records)

    def _failed(self, reason: str, items: list[WriteItem]) -> None:
        if self.failing is None:
            _log.error("recording stopped: %s", reason)
        self.failing = reason
        for entry in (item for item in items if isinstance(item, SpanEntry)):
            entry.body = None
            if entry.status != "open":
                self._metrics.recording_gaps += not entry.gap
                entry.gap = True
                if len(self._held) < _KEPT_GAPS:
                    self._held.append(entry)

    # -- on the loop -------------------------------------------------------------------------------------------------

    def _after(
        self, batch: list[_QueueItem], cursor: int | None, spans: int, seconds: float,
        records: Sequence[bytes] = (), gone: Sequence[_QueueItem] = (),
    ) -> None:  # fmt: skip
        """Release everything that waits for the batch, and for the items lost from it, at one moment; without a cursor
        all are lost."""
        if gone:
            self._after(list(gone), None, 0, 0.0)
        self._metrics.recorder_queue_calls -= len(batch)
        for item in batch:
            self._metrics.recorder_queue_bytes -= item.weight
        if cursor:
            self._metrics.committed(spans, seconds)
            self._committed(cursor, records)
        for item in batch:
            if item.done is not None:
                try:
                    item.done(cursor is not None)
                except Exception:
                    _log.exception("the end of a call could not be passed on")

    def _abandon(self) -> None:
        """Called when the thread has ended: the queue is lost, and nobody may wait for it."""
        lost = list(self._queue)
        self._queue.clear()
        self._metrics.recording_gaps += sum(
            item.final and not isinstance(item.call, QueuedOperation | None) for item in lost
        )
        self._after(lost, None, 0, 0.0)


def _refused_by_disk(error: Exception) -> bool:
    """True if nothing can be written now; False if only this item cannot."""
    return isinstance(error, TapeError) and not isinstance(error, DamagedRecordError)
