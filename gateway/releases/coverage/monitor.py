"""Adds up the notes of calls, once a second, and reports when the coverage of a resource has fallen or is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final, Protocol

from penstock.gateway.model.coverage import Coverage, LastMiss
from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.releases.catalog import Catalog
from penstock.gateway.releases.coverage.counter import CoverageCounter
from penstock.gateway.releases.coverage.notes import CallNotes
from penstock.gateway.releases.coverage.operations import CoverageDelta, CoverageOperations, CoverageUpdates
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.recorder import Recorder

EVERY_S: Final = 1.0
_log = logging.getLogger("penstock.releases")


class CallPins(Protocol):
    """The versions that calls get, and what was noted of calls."""

    @property
    def catalog(self) -> Catalog: ...
    @property
    def notes(self) -> CallNotes: ...


class CoverageMonitor:
    """The coverage of all resources. `start` before use, `stop` before the recorder closes."""

    def __init__(
        self,
        pins: CallPins,
        recorder: Recorder,
        metrics: Metrics,
        now_ns: Callable[[], int],
        fell: Callable[[str, Coverage], Awaitable[None]],
        secrets: Secrets,
    ) -> None:
        """`fell` is called for each resource whose coverage has fallen."""
        self._pins, self._recorder, self._metrics, self._now_ns, self._fell = pins, recorder, metrics, now_ns, fell
        self._adding = CoverageCounter(secrets)
        self._untold = dict[str, Coverage]()
        """Resources whose coverage has fallen and for which `fell` has not succeeded yet."""
        self._failing = dict[str, str]()
        """The error of `fell`, by resource; logged once."""
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Stop the task and add up the rest. Calls that are being added up are no longer in the notes, so that is
        finished first."""
        self._stopping.set()
        if self._task is not None:
            await self._task
        await self._safely()

    async def _run(self) -> None:
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._stopping.wait()
            if self._pins.notes.calls or self._untold:
                await self._safely()

    async def _safely(self) -> None:
        try:
            await self._add_up()
        except Exception:
            _log.exception("the coverage of prompts could not be added up")
        # Also for one for which `fell` failed before: its canaries must not go on.
        for name, coverage in list(self._untold.items()):
            await self._tell(name, coverage)

    async def _tell(self, name: str, coverage: Coverage) -> None:
        try:
            await self._fell(name, coverage)
        except Exception as error:
            if str(error) != self._failing.get(name):
                _log.error("canaries of %s are not held yet, it is tried again: %s", name, error)
            self._failing[name] = str(error)
        else:
            self._failing.pop(name, None)
            del self._untold[name]

    async def _add_up(self) -> None:
        calls, catalog, now = self._pins.notes.take(), self._pins.catalog, self._now_ns()
        if not calls:
            return
        added = await asyncio.to_thread(self._adding.count, calls, catalog, now)
        try:
            changed = await self._recorder.submit(lambda tape: CoverageOperations(tape).add(added, now))
        except TapeError as error:
            _log.error("the coverage of prompts lacks %d calls: %s", len(calls), error)
            return
        self._count(added, changed)
        for name, (coverage, turned) in changed.items():
            if turned == "fell":
                _log.warning("the coverage of %s fell: %s%s", name, coverage.fell, _said(coverage.last))
                self._untold[name] = coverage
            elif turned == "back":
                self._untold.pop(name, None)
                _log.info("the coverage of %s is back", name)

    def _count(self, added: Mapping[str, CoverageDelta], changed: CoverageUpdates) -> None:
        for name, one in added.items():
            if one.matched:
                self._metrics.resource_calls[name, "matched"] += one.matched
            for why, count in one.missed.items():
                self._metrics.resource_calls[name, why] += count
        for name, (coverage, _) in changed.items():
            self._metrics.resource_coverage_fell[(name,)] = int(coverage.fell_ns is not None)


def _said(last: LastMiss | None) -> str:
    if last is None:
        return ""
    where = last.difference
    return f"; rollout {last.rollout}: {last.why}" + (
        "" if where is None else f", at character {where.at} {where.found!r} in place of {where.wanted!r}"
    )
