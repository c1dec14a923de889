"""Sends every finished span of the tape to a collector: a follower of the change feed like any other.

It reads the feed from its cursor in pieces, makes one request of each (`batches`) and continues when that was accepted
or dropped (`collector_client`); `selection` chooses what is sent when. The cursor is kept on the tape, at most once a
second and at the end, so a gateway that is started again continues where it was. Nothing is lost; after a crash the
spans of the last second may be sent twice, with the same ids. A gateway that exports for the first time begins at the
end of the feed. While the collector is away the tape is the buffer: only one request is in memory. Calls never wait
for any of this; conversion and compression happen in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from time import monotonic, time_ns

from penstock.gateway.config import OtlpSettings
from penstock.gateway.followers.otlp import batches
from penstock.gateway.followers.otlp.collector_client import DEFAULT_LIMITS, CollectorClient, ExportLimits
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.work.queue.dispatcher import Dispatcher

NOTE = "otlp.cursor"
"""The name of the cursor on the tape."""
GATHER_S, NOTE_S, RETRY_S = 0.5, 1.0, 1.0
"""Seconds to wait for a fuller request; between writes of the cursor; before another look at a tape that failed."""
_log = logging.getLogger("penstock.otlp")


class Exporter:
    """Exports a tape. `start` once the desk runs, `stop` before it stops."""

    def __init__(
        self,
        settings: OtlpSettings,
        servers: Mapping[str, str],
        tape: Store,
        feed: ChangeFeed,
        dispatcher: Dispatcher,
        metrics: Metrics,
        now_ns: Callable[[], int] = time_ns,
        pace: ExportLimits = DEFAULT_LIMITS,
    ) -> None:
        """`settings` must have an endpoint; `servers`: URL of each upstream and server of tools. Raises
        `ConfigError`."""
        self._timeout = pace.timeout
        self._tape = tape
        self._feed = feed
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._delivery = CollectorClient(settings.traces_url(), settings.headers(), pace.timeout, metrics)
        self._reader = batches.BatchReader(tape, settings, servers, metrics, now_ns, pace.batch)
        self._cursor = self._noted = 0
        self._noted_at = 0.0
        self._said = ""
        """The error of the last reading of the tape, as logged; empty if it succeeded."""
        self.continued = False
        """True if another process continues at once from where this one stops."""
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the cursor and begin."""
        kept = self._tape.note(NOTE)
        end = self._tape.cursor()
        self._cursor = self._noted = end if kept is None else min(int(kept), end)
        if kept is None:
            await self._dispatcher.note(NOTE, str(end).encode())
        self._delivery.open()
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Send the rest of the tape, unless the collector accepts nothing or takes too long, and keep the cursor."""
        self._stopping.set()
        if self._task is not None:
            patience = 0.0 if self._delivery.failing or self.continued else self._timeout
            await asyncio.wait([self._task], timeout=patience)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._note(0.0)
        await self._delivery.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
                return
            except TapeError as error:
                if str(error) != self._said:
                    self._said = str(error)
                    _log.error("the tape cannot be exported, it is tried again: %s", error)
            except Exception:
                _log.exception("exporting failed at change %d", self._cursor)
            if self._stopping.is_set():
                return  # The next start continues from there.
            await self._pause(RETRY_S)

    async def _follow(self) -> None:
        """Export until the gateway stops, and then to the end of the tape."""
        while not self._stopping.is_set() or self._cursor < self._tape.cursor():
            if not self._stopping.is_set():
                await self._wait()
            piece = await asyncio.to_thread(self._reader.read, self._cursor, not self._stopping.is_set())
            if piece.spans:
                await self._delivery.send(piece.body, piece.spans, self._measure)
            self._cursor, self._said = piece.after, ""
            self._measure()
            await self._note(NOTE_S)
            if not piece.full:
                await self._pause(GATHER_S)

    def _measure(self) -> None:
        self._metrics.otlp_lag_changes = self._tape.cursor() - self._cursor

    async def _wait(self) -> None:
        """Wait for a change, or for the stop."""
        waiting = [asyncio.ensure_future(one) for one in (self._feed.wait(self._cursor), self._stopping.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _note(self, every_s: float) -> None:
        """Keep the cursor when it has moved and the last write is long enough ago. If the tape does not take it, it is
        tried again later: until then a crash would send more spans twice."""
        if self._cursor == self._noted or monotonic() - self._noted_at < every_s:
            return
        self._noted_at, cursor = monotonic(), self._cursor
        try:
            await self._dispatcher.note(NOTE, str(cursor).encode())
            self._noted = cursor
        except TapeError as error:
            _log.warning("the exporter's position cannot be kept: %s", error)
