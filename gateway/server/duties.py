"""What only one of the processes that write a tape may do: hand out work, drive releases, look after adapters, forget,
tell others of what happens, keep an index.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock.gateway.index.link import Link
from penstock.gateway.queue.dispatcher import Dispatcher
from penstock.gateway.releases.adapter_keeper import AdapterKeeper
from penstock.gateway.releases.driver import Driver
from penstock.gateway.retention.service import Retention
from penstock.gateway.server.ending import ended
from penstock.gateway.store.recorder import Recorder
from penstock.gateway.webhooks.service import Webhooks

if TYPE_CHECKING:
    from penstock.gateway.otlp.exporter import Exporter


@dataclass(slots=True)
class Duties:
    """Those of one process."""

    recorder: Recorder
    dispatcher: Dispatcher
    webhooks: Webhooks
    releases: Driver
    adapter_keeper: AdapterKeeper
    retention: Retention
    index: Link
    exporter: Exporter | None
    begun: bool = False
    """Whether this process has them."""

    async def begin(self) -> None:
        """Nobody else has them."""
        self.begun = True
        self.index.begin()
        await self.dispatcher.start()
        await self.webhooks.start()
        await self.releases.start()
        self.adapter_keeper.start()
        self.retention.start()
        if self.exporter is not None:
            await self.exporter.start()

    async def end(self, last: bool) -> None:
        """Lets go of them, once. `last`: nobody goes on with them at once, so the collector gets all that is there."""
        if not self.begun:
            return
        self.begun = False
        if self.exporter is not None:
            await ended(self.recorder.flush, partial(self.exporter.stop, last))
        await ended(
            self.retention.stop, self.dispatcher.stop, self.releases.stop, self.adapter_keeper.stop,
            self.webhooks.stop, partial(asyncio.to_thread, self.index.close),
        )  # fmt: skip
