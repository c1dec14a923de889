"""The events that policies leave on the tape, and the releases that react to them. No call waits for any of this."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from penstock.gateway.model.base import Mode
from penstock.gateway.releases.driver import Driver
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.work.queue.dispatcher import Dispatcher

_TURNS: Final = 8
_log = logging.getLogger("penstock.mcp")


class PolicyAudit:
    """The gateway as policies need it (`policy_enforcement.Around`)."""

    def __init__(
        self, store: Store, recorder: Recorder, dispatcher: Dispatcher, releases: Driver, now_ns: Callable[[], int]
    ) -> None:
        self._store, self._recorder = store, recorder
        self._dispatcher, self._releases = dispatcher, releases
        self.now_ns = now_ns
        self._running: set[asyncio.Future[object]] = set()

    def mode_of(self, rollout: str) -> Mode | None:
        """The mode of a rollout; None while it is not on the tape."""
        found = self._store.rollout(rollout)
        return None if found is None else found.mode

    def record_event(self, entry: SpanEntry) -> None:
        """Writes an event to the tape."""
        self._begin(self._dispatcher.add([entry]))

    def report_violation(self, rollout: str) -> None:
        """Called on a hard violation: once it is on the tape, releases react to it."""
        self._begin(self._react(rollout))

    async def _react(self, rollout: str) -> None:
        # The violating call's span is put in one of the next turns of the loop.
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        await self._recorder.flush()
        await self._releases.on_violation(rollout)

    def _begin(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Future[object]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("what became of a tool call could not be noted: %s", error)

    async def finish(self, seconds: float) -> None:
        """Waits for running work for at most `seconds`."""
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
