"""Reports a run: points and events on the gateway's tape, and lines for a person who watches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import Any, Final, Protocol, cast

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.run import (
    EventLevel,
    NewRun,
    Point,
    RunChange,
    RunEnd,
    RunEndStatus,
    RunEvent,
    RunKind,
    VersionReference,
)
from penstock.gateway.model.toml import ConfigError

NOT_FOUND: Final = 404
LAST_WORDS_S: Final = 5.0
"""Seconds that a run that stops tries to report why."""


def changed_settings(before: Any, now: Any, path: str = "") -> list[str]:
    """Return the names of the settings that differ between two configurations."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [path]
    one, other = cast(dict[str, Any], before), cast(dict[str, Any], now)
    found = (changed_settings(one.get(key), other.get(key), f"{path}.{key}".lstrip(".")) for key in {**one, **other})
    return [name for names in found for name in names]


class RunDisplay(Protocol):
    """Shows a run on this machine."""

    def phase(self, step: int, text: str) -> None:
        """Show the present phase of a step."""
        ...

    def point(self, step: int, values: Mapping[str, float]) -> None:
        """Show the metrics of a step."""
        ...

    def line(self, level: EventLevel, text: str) -> None:
        """Show an event in one line."""
        ...


class RunReporter:
    """The reports of one process of a run. Call `begin` before use."""

    def __init__(self, client: Client, run: str, display: RunDisplay) -> None:
        self._client, self._run, self._display = client, run, display
        self._resumed = 0
        self._step = 0
        self._begun = False
        """True if the tape may have a run of this process: only such a run is ended."""

    async def begin(self, kind: RunKind, config: Any, steps: int | None, step: int) -> None:
        """Start the run, or continue it at `step`: reports of an earlier process about later steps are superseded.
        `steps`: number of planned steps; None if unknown. Raises `ConfigError` when the name is that of another kind of
        run."""
        try:
            run = await self._client.run(self._run)
        except ClientError as error:
            if error.status != NOT_FOUND:
                raise
            await self._first(self._client.start_run(NewRun(id=self._run, kind=kind, config=config, steps=steps)))
            return
        if run.kind != kind:
            raise ConfigError(f"run.name: {self._run!r} is a run of {run.kind} on the tape; choose another name")
        self._resumed = run.resumed + 1
        await self._first(self._client.add_points(self._run, [], since_step=step, resumed=self._resumed))
        await self._client.change_run(self._run, RunChange(steps=steps))
        await self.event(step, f"goes on at step {step}")
        for name in changed_settings(run.config, config):
            await self.event(step, f"{name} is not what the run was started with", "warning")

    async def _first(self, request: Awaitable[object]) -> None:
        """Send the first request and mark the run as begun. It is marked before the answer, because a signal may end
        the wait when the tape has the run already."""
        self._begun = True
        try:
            await request
        except ClientError:
            self._begun = False
            raise

    def phase(self, step: int, text: str) -> None:
        """Show the present phase of a step."""
        self._step = step
        self._display.phase(step, text)

    async def point(self, step: int, values: Mapping[str, float]) -> None:
        """Report the metrics of a step."""
        point = Point(step=step, time_ns=time.time_ns(), values=dict(values))
        self._display.point(step, values)
        await self._client.add_points(self._run, [point], resumed=self._resumed)

    async def heartbeat(self) -> None:
        """Report no points, as a sign of life."""
        await self._client.add_points(self._run, [], resumed=self._resumed)

    async def event(self, step: int, text: str, level: EventLevel = "info") -> None:
        """Report an event of a step."""
        event = RunEvent(time_ns=time.time_ns(), step=step, level=level, text=text[:4000])
        self._display.line(level, text)
        await self._client.add_run_events(self._run, [event])

    async def warning(self, text: str) -> None:
        """Report a problem that does not fail the step under way."""
        await self.event(self._step, text, "warning")

    async def new_version(self, model: str, version: str) -> None:
        """Report a version that the run has made."""
        await self.change(RunChange(made=[VersionReference(name=model, version=version)]))

    async def change(self, change: RunChange) -> None:
        """Report another change of the run."""
        await self._client.change_run(self._run, change)

    async def end(self, status: RunEndStatus, message: str) -> None:
        """End the run on the tape, if it has begun. A run that does not succeed waits at most `LAST_WORDS_S` for the
        gateway."""
        if not self._begun:
            return
        good = status == "succeeded"
        self._display.line("info" if good else "warning", message)
        end = RunEnd(status=status, message=message[:4000], resumed=self._resumed)
        try:
            async with asyncio.timeout(None if good else LAST_WORDS_S):
                await self._client.finish_run(self._run, end)
        except (ClientError, TimeoutError) as error:
            if good:
                raise
            self._display.line("warning", f"the gateway was not told: {str(error) or 'it does not answer'}")
