"""Reads results of batches from the tape after they were fetched (`calls.batches`): a few at a time, on a thread.

It works in the process whose call has fetched them, and takes over work that another process has left: at the start,
with the next results, and every ten minutes. Two processes that read the same results keep each result once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from penstock.gateway.model.metrics import Metrics
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.traffic.calls import batches
from penstock.gateway.traffic.calls.batches import BatchResultReader, PendingBatchRead, ResultCounter

EVERY_S: Final = 600.0
"""Seconds between two searches for results that other processes have left."""
_log = logging.getLogger("penstock.batches")


class BatchResultService:
    """The service that reads fetched results. `start` before use, `stop` before the recorder closes."""

    def __init__(
        self, tape: StoreReader, recorder: Recorder, metrics: Metrics, now_ns: Callable[[], int], count: ResultCounter,
        counted: Callable[[], None],
    ) -> None:  # fmt: skip
        """`count`: called with new results in their transaction; `counted`: called after that."""
        self._tape, self._recorder, self._metrics, self._now_ns = tape, recorder, metrics, now_ns
        self._count, self._counted = count, counted
        self._news, self._stopping = asyncio.Event(), False
        self._task: asyncio.Task[None] | None = None

    def notify(self) -> None:
        """Look for results soon: a call may have fetched some."""
        self._news.set()

    async def start(self) -> None:
        """Begin, with the results that were left unread."""
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Finish the current transaction; the rest is read later."""
        self._stopping = True
        self.notify()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while not self._stopping:
            self._news.clear()
            with suppress(TapeError):  # the recorder has reported it
                for todo in await asyncio.to_thread(batches.pending_reads, self._tape):
                    await self._safely(todo)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._news.wait()

    async def _safely(self, todo: PendingBatchRead) -> None:
        try:
            await self._read(todo)
        except TapeError:
            raise
        except Exception:
            _log.exception("results of batch %s cannot be read", todo.batch)
            await self._finish(todo, (1, "they could not be read; the gateway's log says why"))

    async def _read(self, todo: PendingBatchRead) -> None:
        # The call that has made the batch may still be queued for the tape, here or in another worker.
        await self._recorder.flush_all()
        found = await asyncio.to_thread(BatchResultReader, self._tape, todo)
        while entries := [] if self._stopping or not found.rollout else await asyncio.to_thread(found.next_entries):
            kept = await self._recorder.submit(
                partial(batches.store_results, batch=found.batch, entries=entries, count=self._count)
            )
            if kept is None:
                # Their rollout was forgotten: they belong to the call that has fetched them now, or to none.
                found = await asyncio.to_thread(BatchResultReader, self._tape, todo)
                continue
            self._metrics.batch_results[("kept",)] += kept
            self._metrics.batch_results[("again",)] += len(entries) - kept
            self._counted()
        if not self._stopping:
            await self._finish(todo, (found.left_out, found.why) if found.left_out else None)

    async def _finish(self, todo: PendingBatchRead, left: tuple[int, str] | None) -> None:
        if left is not None:
            self._metrics.batch_results[("left_out",)] += left[0]
            _log.warning("of batch %s, %d results or more are left out: %s", todo.batch, *left)
        await self._recorder.submit(partial(batches.finish_read, todo=todo, left=left, now=self._now_ns()))
