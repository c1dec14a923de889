"""The work that only one of the processes that write a tape may do: hand out work, drive releases, keep adapters,
forget, send webhooks and telemetry, keep an index.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from penstock.gateway.followers.index.link import IndexLink
from penstock.gateway.followers.webhooks.service import WebhookService
from penstock.gateway.process.shutdown import stop_all
from penstock.gateway.releases.driver import Driver
from penstock.gateway.tape.retention.service import RetentionService
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.traffic.trials.adapter_keeper import AdapterKeeper
from penstock.gateway.work.queue.dispatcher import Dispatcher

if TYPE_CHECKING:
    from penstock.gateway.followers.otlp.exporter import Exporter


RETRY_S: Final = 1.0
"""Seconds until a service that could not start is started again."""
_log = logging.getLogger("penstock.app")
Start: TypeAlias = "Callable[[], Awaitable[None]]"


@dataclass(slots=True)
class LeaderServices:
    """The services that this process runs if it is that one."""

    recorder: Recorder
    dispatcher: Dispatcher
    webhooks: WebhookService
    releases: Driver
    adapter_keeper: AdapterKeeper
    retention: RetentionService
    index: IndexLink
    exporter: Exporter | None
    begun: bool = False
    """True if this process runs them."""
    _beginning: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        """Start them; no other process runs them now."""
        self.begun = True
        self.index.remove_leftovers()
        starts = [self.dispatcher.start, self.webhooks.start, self.releases.start]
        starts += [] if self.exporter is None else [self.exporter.start]
        waiting = await _not_started(starts)
        self.adapter_keeper.start()
        self.retention.start()
        if waiting:
            self._beginning = asyncio.ensure_future(self._begin_later(waiting))

    async def _begin_later(self, waiting: Sequence[Start]) -> None:
        """Start the services that a full tape did not let start. Calls are served meanwhile: the process that has
        handed over to this one does not serve any more."""
        while waiting:
            await asyncio.sleep(RETRY_S)
            waiting = await _not_started(waiting)
        _log.info("all that only one process may do has begun")

    async def end(self, last: bool) -> None:
        """Stop them, once. `last`: no other process continues them at once, so the collector gets everything that is
        left."""
        if not self.begun:
            return
        self.begun = False
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.gather(self._beginning, return_exceptions=True)
        if self.exporter is not None:
            await stop_all(self.recorder.flush, partial(self.exporter.stop, last))
        await stop_all(
            self.retention.stop, self.dispatcher.stop, self.releases.stop, self.adapter_keeper.stop,
            self.webhooks.stop, partial(asyncio.to_thread, self.index.close),
        )  # fmt: skip


async def _not_started(starts: Sequence[Start]) -> list[Start]:
    """Start services and return those that the tape did not let start."""
    left = list[Start]()
    for start in starts:
        try:
            await start()
        except TapeError as error:
            # The recorder logs once that it cannot write the tape.
            _log.debug("a part of the gateway waits for the tape: %s", error)
            left.append(start)
    return left
