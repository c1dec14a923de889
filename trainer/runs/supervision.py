"""The frame of a run: its reports (points and events on the gateway's tape, lines for a person who watches), its end in
every case, and its companions: a runner that takes its rollouts, other tasks that must not end before it, and a client
that waits for a gateway that is away.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from penstock.gateway.client.child_process import spawn
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import NotFound, Params
from penstock.gateway.client.exchanges import WholeRollout
from penstock.gateway.model.base import SpanKind
from penstock.gateway.model.foreign_text import terminal_safe
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
from penstock.gateway.model.times import Backoff
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.data.collector import CollectError
from penstock.trainer.engines import CheckpointError, EngineError
from penstock.trainer.serving.publisher import PublishError
from penstock.trainer.serving.vllm import InferenceError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

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
        except NotFound:
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


# Shows a run on this machine's stderr. On a terminal: a bar with the present phase and its duration, below a line for
# each step. Elsewhere, in a log: the lines. A line has the figures that fit; all of them are on the tape.


SHOWN: Final = (
    "reward",
    "evaluation/*reward",
    "groups/differ",
    "evaluation/*/pass@*",
    "seed/reward",
    "best/reward",
    "test/seed",
    "test/winner",
    "loss",
    "evaluation/loss",
    "accuracy",
    "evaluation/accuracy",
    "failed",
    "cells/old_old",
    "cells/new_new",
    "entropy",
    "kl",
    "clip_fraction",
    "mismatch_k3",
    "staleness/mean",
    "tokens_per_second",
)
"""Metrics of a step's line, the most important first. A star stands for the name of a suite."""
LOG_WIDTH: Final = 120
"""Columns of a line in a log."""
BAR_WIDTH: Final = 10


def point_line(step: int, steps: int | None, values: Mapping[str, float], width: int) -> str:
    """Return a step as a line of at most `width` columns, with the figures that fit."""
    line = f"step {step}" if steps is None else f"step {step}/{steps}"
    for figure in shown_metrics(values):
        if len(line) + 2 + len(figure) <= width:
            line += "  " + figure
    return line


def shown_metrics(values: Mapping[str, float]) -> Iterator[str]:
    """Yield the metrics of `SHOWN`, each with its interval where it has one."""
    named = (name for pattern in SHOWN for name in values if fnmatchcase(name, pattern))
    for name in dict.fromkeys(named):
        low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
        between = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
        yield f"{name} {values[name]:.4g}{between}"


class LogDisplay:
    """Prints one line for each step."""

    def __init__(self, steps: int | None) -> None:
        self._steps = steps

    def phase(self, step: int, text: str) -> None:
        """Prints nothing: a log is for finished work."""

    def point(self, step: int, values: Mapping[str, float]) -> None:
        print(point_line(step, self._steps, values, LOG_WIDTH), file=sys.stderr, flush=True)

    def line(self, level: EventLevel, text: str) -> None:
        print(_line(level, text), file=sys.stderr, flush=True)


class BarDisplay:
    """Shows a bar, with lines above it."""

    def __init__(self, progress: Progress, steps: int | None) -> None:
        self._progress, self._steps = progress, steps
        self._task: TaskID = progress.add_task("gets ready", total=steps, since=progress.get_time())

    def phase(self, step: int, text: str) -> None:
        now = self._progress.get_time()
        self._progress.update(self._task, description=f"step {step} {text}", completed=max(0, step - 1), since=now)

    def point(self, step: int, values: Mapping[str, float]) -> None:
        # A terminal may go to the next line when a character is in its last column.
        line = point_line(step, self._steps, values, self._progress.console.width - 1)
        self._progress.console.print(line, highlight=False, markup=False, no_wrap=True, overflow="ellipsis")
        self._progress.update(self._task, completed=step)

    def line(self, level: EventLevel, text: str) -> None:
        self._progress.console.print(_line(level, text), highlight=False, markup=False)


def _line(level: EventLevel, text: str) -> str:
    """Return an event without terminal controls: it may contain words of models and agents, which must not control a
    terminal."""
    return terminal_safe(text if level == "info" else f"{level}: {text}")


@contextmanager
def display(steps: int | None) -> Generator[LogDisplay | BarDisplay]:
    """Yield the display that fits stderr. `steps`: number of planned steps; None if unknown."""
    if not sys.stderr.isatty():
        yield LogDisplay(steps)
        return
    with _bar() as progress:
        yield BarDisplay(progress, steps)


def _bar() -> Progress:
    """Return a bar as wide as the terminal: present phase, its duration, steps done, time since the start."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
    from rich.table import Column
    from rich.text import Text

    class PhaseColumn(ProgressColumn):
        """The phase and its duration: the clock goes on while nothing else changes."""

        def render(self, task: Task) -> Text:
            return Text(f"{task.description}, {task.get_time() - task.fields['since']:.0f} s", overflow="ellipsis")

    doing = PhaseColumn(Column(ratio=1, no_wrap=True))
    columns = (doing, BarColumn(bar_width=BAR_WIDTH), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), expand=True)


# Reports the end of a run in every case, on the tape and to the caller.
#
# A run has `succeeded`, was `stopped` by a signal or by its own rules, or has `failed` with a sentence. After
# `stopped` and `failed` the same command continues from the newest checkpoint.


class RunHalt(Exception):
    """A run has stopped by its own rules; the message says why."""


class RunError(Exception):
    """A run has ended early; the message says why."""


EXPECTED = (
    CheckpointError, ClientError, CollectError, ConfigError, EngineError, InferenceError, PublishError, RunError,
)  # fmt: skip
"""Errors that end a run with a sentence and not with a traceback."""


def run_blocking(run: Coroutine[Any, Any, None]) -> None:
    """Run it in an event loop of its own. Raises `RunError` when it ended early."""
    try:
        asyncio.run(run)
    except EXPECTED as error:
        raise RunError(str(error)) from None
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise RunError(f"{error.strerror or error}{where}; the same command goes on once that is mended") from None


async def supervise(
    work: Coroutine[Any, Any, None],
    reporter: RunReporter,
    step: Callable[[], int],
    done: Callable[[], str] | None = None,
) -> None:
    """Do the work, which begins the run, and report how it ended; the first SIGINT or SIGTERM stops it. `step`: returns
    the number of steps done; `done`: returns the result for a person."""

    async def succeeds() -> None:
        await work
        await reporter.end("succeeded", f"all {step()} steps are done" if done is None else done())

    task = asyncio.ensure_future(succeeds())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        await reporter.end("stopped", f"stopped after step {step()}; the same command goes on")
        raise RunError("stopped") from None
    except RunHalt as why:
        await reporter.end("stopped", str(why))
        raise RunError(str(why)) from None
    except Exception as error:
        await reporter.end("failed", str(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}")
        raise


# The companions of a run.

ALIVE_S: Final = 60.0
"""Seconds between signs of life of a run that may wait for long, so that it is not shown as silent."""


async def run_alongside(work: Coroutine[Any, Any, None], others: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Do the work while the others run; when one of them ends early, the work ends too."""
    tasks = [asyncio.ensure_future(one) for one in (work, *others)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_after(event: asyncio.Event, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Wait for the event, then do the work."""
    await event.wait()
    await work()


async def send_heartbeats(reporter: RunReporter) -> None:
    """Report for ever that the run lives; it must have begun. A temporary error of the gateway is ignored."""
    while True:
        await asyncio.sleep(ALIVE_S)
        try:
            await reporter.heartbeat()
        except ClientError as error:
            if not error.temporary:
                raise


async def keep_running(words: Sequence[str], gateway: str, key: str | None, log: Path) -> None:
    """Run `penstock run --watch` with these arguments until cancelled. Raises `RunError` if it ends."""
    env = dict(os.environ) | ({"PENSTOCK_ADMIN_KEY": key} if key else {})
    start = [sys.executable, "-P", "-m", "penstock", "run", "--watch", "--gateway", gateway]
    child = await spawn([*start, *words], env, log)
    try:
        code = await child.wait()
        raise RunError(f"the runner (rollouts.run) ended with {code}; {child.tail()}")
    finally:
        await child.stop()


# A client that repeats requests while the gateway is away: a gateway restarts in a moment, and a run must survive that.

T = TypeVar("T")

PAUSES: Final = Backoff(0.1, 5.0)
MOST_BROKEN: Final = 8
"""Most times that an answer of a gateway that is there may break off at one place."""
PATIENCE_S: Final = 600.0
"""Seconds that a gateway may be away before the run stops; it can be resumed."""


class RetryClient(Client):
    """The typed client, with retries; all its requests are safe to send again."""

    async def read(self, method: str, path: str, params: Params | None = None, body: str | None = None) -> bytes:
        """Return the body of a successful answer, waiting for the gateway. Raises ClientError when it refuses, or is
        away for too long."""
        ask = super().read
        return await self._patiently(lambda: ask(method, path, params, body))

    async def whole_rollouts(self, ids: Sequence[str], kinds: Sequence[SpanKind] = ()) -> AsyncGenerator[WholeRollout]:
        """See `Client.whole_rollouts`. When the gateway goes away in between, the remaining rollouts are requested
        again."""
        given, broken = 0, 0
        while given < len(ids):
            try:
                async with aclosing(super().whole_rollouts(ids[given:], kinds)) as found:
                    async for whole in found:
                        given, broken = given + 1, 0
                        yield whole
            except ClientError as error:
                broken += 1
                if not error.temporary or broken > MOST_BROKEN:
                    raise
                # This request waits until the gateway is back.
                _ = await self.stats(spans=0)

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        clock = asyncio.get_running_loop().time
        failures, end = 0, clock() + PATIENCE_S
        while True:
            try:
                return await ask()
            except ClientError as error:
                failures += 1
                if not error.temporary or clock() + PAUSES.after(failures) > end:
                    raise
            await asyncio.sleep(PAUSES.after(failures))
