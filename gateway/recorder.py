"""Finished calls -> tape, in batches, on one thread, never delaying a byte.

The loop appends calls to a queue; the thread takes what is there, draws facts out of the bodies, masks secrets and
commits. Calls that have run for `announce_seconds` are put on the tape as open, so that they are seen, and so that a
crash leaves an `interrupted` span and not a hole.

The queue is bounded in bytes. When it is full, `put` says so and the end of the *call* waits: training data is never
dropped to save latency. When the tape itself fails, what happens is the mode's `on_record_failure`; the heads of
unrecorded calls are kept, without bodies, until the tape takes them, and count as gaps.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gateway.config import Tape
from gateway.metrics import Metrics
from gateway.store import Entry, Store, TapeError

_log = logging.getLogger("penstock.recorder")
_BATCH = 256
_BATCH_BYTES = 16 << 20
_KEPT_GAPS = 10_000
_RETRY_SECONDS = 0.5
_SWITCH_SECONDS = 0.0002


class Recordable(Protocol):
    """A call, as the recorder sees it."""

    weight: int
    """Bytes it holds in memory."""

    def entry(self, final: bool) -> Entry:
        """What goes to the tape; called on the recorder's thread. The same object every time."""
        ...


Done = Callable[[bool], None]


class Recorder:
    """One queue, one thread, one store."""

    def __init__(self, store: Store, config: Tape, metrics: Metrics, committed: Callable[[int], None]) -> None:
        """`committed` is called on the loop with the newest cursor after every commit, never before."""
        self.store = store
        self.failing: str | None = None
        """Why the tape cannot be written now; None while it can."""
        self._config = config
        self._metrics = metrics
        self._committed = committed
        self._strict = config.record == "strict"
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[Recordable, bool, Done | None]] = deque()
        self._held: list[Entry] = []
        self._wake = threading.Event()
        self._sleeping = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="penstock-recorder", daemon=True)

    def start(self) -> None:
        """Starts the thread. The loop must not wait long for the interpreter while the thread computes."""
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._thread.start()

    def put(self, call: Recordable, done: Done | None = None) -> None:
        """Queues a finished call; `done` is called on the loop with True once it is on disk, False when it is lost."""
        self._push(call, True, done)

    def announce(self, call: Recordable) -> None:
        """Queues a running call, to be seen as open."""
        self._push(call, False, None)

    @property
    def full(self) -> bool:
        """True when the end of the next call has to wait for the writer."""
        return self._metrics.recorder_queue_bytes > self._config.queue_bytes

    def _push(self, call: Recordable, final: bool, done: Done | None) -> None:
        self._metrics.recorder_queue_bytes += call.weight
        self._metrics.recorder_queue_calls += 1
        self._queue.append((call, final, done))
        if self._sleeping:
            self._sleeping = False
            self._wake.set()

    async def flush(self) -> bool:
        """Returns once everything queued before is durable; False when some of it was lost."""
        done = self._loop.create_future()

        def release(kept: bool) -> None:
            if not done.done():
                done.set_result(kept)

        self._push(_NOTHING, True, release)
        return await done

    async def close(self) -> None:
        """Writes what is queued and stops the thread."""
        self._closed = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._await_work():
            batch = self._take()
            if batch:
                self._write(batch)
            elif self.failing is not None:
                self._write_held()

    def _await_work(self) -> bool:
        """False when it is time to stop. Otherwise there is work, gathered for `commit_ms`."""
        if not self._queue:
            if self._closed:
                return False
            self._sleeping = True
            if not self._queue and not self._closed:
                self._wake.wait(_RETRY_SECONDS if self.failing is not None else None)
            self._sleeping = False
            self._wake.clear()
        if not self._strict and not self._closed and len(self._queue) < _BATCH:
            time.sleep(self._config.commit_ms / 1000)
        return True

    def _take(self) -> list[tuple[Recordable, bool, Done | None]]:
        batch: list[tuple[Recordable, bool, Done | None]] = []
        weight = 0
        while self._queue and len(batch) < _BATCH and weight < _BATCH_BYTES:
            item = self._queue.popleft()
            weight += item[0].weight
            batch.append(item)
        return batch

    def _write(self, batch: list[tuple[Recordable, bool, Done | None]]) -> None:
        began = time.perf_counter()
        entries = [call.entry(final) for call, final, _ in batch if call is not _NOTHING]
        try:
            cursor = self.store.write([*self._held, *entries]) if entries or self._held else None
        except TapeError as error:
            self._failed(str(error), entries)
            self._loop.call_soon_threadsafe(self._after, batch, None, 0.0, False)
        else:
            self._held.clear()
            self.failing = None
            self._loop.call_soon_threadsafe(self._after, batch, cursor, time.perf_counter() - began, True)

    def _write_held(self) -> None:
        try:
            cursor = self.store.write(self._held)
        except TapeError:
            return
        self._held.clear()
        self.failing = None
        self._loop.call_soon_threadsafe(self._after, [], cursor, 0.0, True)

    def _failed(self, reason: str, entries: list[Entry]) -> None:
        if self.failing is None:
            _log.error("recording stopped: %s", reason)
        self.failing = reason
        for entry in entries:
            entry.body = None
            if entry.status != "open":
                entry.gap = True
                self._metrics.recording_gaps += 1
                if len(self._held) < _KEPT_GAPS:
                    self._held.append(entry)

    # -- on the loop -------------------------------------------------------------------------------------------------

    def _after(
        self, batch: list[tuple[Recordable, bool, Done | None]], cursor: int | None, seconds: float, kept: bool
    ) -> None:
        self._metrics.recorder_queue_calls -= len(batch)
        for call, _, _ in batch:
            self._metrics.recorder_queue_bytes -= call.weight
        if kept and cursor is not None:
            self._metrics.committed(len(batch), seconds)
            self._committed(cursor)
        for _, _, done in batch:
            if done is not None:
                done(kept)


class _Nothing:
    """Queued by `flush`: takes its turn and writes nothing."""

    weight = 0

    def entry(self, final: bool) -> Entry:
        raise AssertionError("never written")


_NOTHING = _Nothing()
