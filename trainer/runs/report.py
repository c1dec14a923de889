"""The reports of a run: points and events on the gateway's tape, and lines for whoever watches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import Any, Final, Protocol, cast

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.run import End, Kind, Level, Made, NewRun, Point, RunChange, RunEnd, RunEvent
from penstock.gateway.model.toml import ConfigError

NOT_FOUND: Final = 404
LAST_WORDS_S: Final = 5.0
"""How long a run that stops tries to say why."""


def changed(before: Any, now: Any, path: str = "") -> list[str]:
    """Names of the settings that two configurations do not have in common."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [path]
    one, other = cast(dict[str, Any], before), cast(dict[str, Any], now)
    found = (changed(one.get(key), other.get(key), f"{path}.{key}".lstrip(".")) for key in {**one, **other})
    return [name for names in found for name in names]


class Display(Protocol):
    """Shows a run on this machine."""

    def phase(self, step: int, text: str) -> None:
        """What is being done."""
        ...

    def point(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a step."""
        ...

    def line(self, level: Level, text: str) -> None:
        """Something that happened."""
        ...


class Reporter:
    """The reports of one process of a run. `begin` before use."""

    def __init__(self, client: Client, run: str, display: Display) -> None:
        self._client, self._run, self._display = client, run, display
        self._resumed = 0
        self._step = 0
        self._begun = False
        """Whether the tape may have a run of this process: only that is ended."""

    async def begin(self, kind: Kind, config: Any, steps: int | None, step: int) -> None:
        """Starts the run, or goes on with it at `step`: reports of an earlier process about later steps are superseded.
        `steps`: how many are planned; None when nobody knows. Raises `ConfigError` when the name is that of another
        kind of run.
        """
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
        for name in changed(run.config, config):
            await self.event(step, f"{name} is not what the run was started with", "warning")

    async def _first(self, request: Awaitable[object]) -> None:
        """Makes it a run of this process. A signal may end the wait for the answer when the tape has it already."""
        self._begun = True
        try:
            await request
        except ClientError:
            self._begun = False
            raise

    def phase(self, step: int, text: str) -> None:
        """What is being done now."""
        self._step = step
        self._display.phase(step, text)

    async def point(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a step."""
        point = Point(step=step, time_ns=time.time_ns(), values=dict(values))
        self._display.point(step, values)
        await self._client.add_points(self._run, [point], resumed=self._resumed)

    async def alive(self) -> None:
        """A sign of life."""
        await self._client.add_points(self._run, [], resumed=self._resumed)

    async def event(self, step: int, text: str, level: Level = "info") -> None:
        """Something that happened."""
        event = RunEvent(time_ns=time.time_ns(), step=step, level=level, text=text[:4000])
        self._display.line(level, text)
        await self._client.add_run_events(self._run, [event])

    async def warning(self, text: str) -> None:
        """Something that went wrong beside the step that is under way."""
        await self.event(self._step, text, "warning")

    async def made(self, model: str, version: str) -> None:
        """A version that the run has made."""
        await self.change(RunChange(made=[Made(name=model, version=version)]))

    async def change(self, change: RunChange) -> None:
        """What else is to be said of the run."""
        await self._client.change_run(self._run, change)

    async def end(self, status: End, message: str) -> None:
        """The run is over, where it has begun. One that stops does not wait for a gateway that is away."""
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
