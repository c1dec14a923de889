"""Attempts in this process, for a debugger: breakpoints in the agent work, and its rollout is like any other's.

    worker = InProcessWorker(RunnerSettings("http://127.0.0.1:4747", "desk", lease_s=3600))
    result = worker.step(agent)

    async for attempt in worker.iter():
        async with attempt:
            attempt.output = await agent(attempt.task)

Each attempt has a `Runner` of its own, on the event loop of a thread: heartbeats go out while the agent's thread stands
at a breakpoint. (Some debuggers stop all threads, so a lease should outlast that.) The agent runs in the caller's
thread, with the variables that a subprocess gets. They are the process's while it runs: one attempt at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import threading
import traceback
from bdb import BdbQuit
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import Any, Self, TypeVar

from penstock.gateway.client.child_process import LockedFolder
from penstock.gateway.model.queue import Claim
from penstock.sidecar.run.agent import helper
from penstock.sidecar.run.agent.callables import await_result, extra_arguments
from penstock.sidecar.run.agent.environment import environment, launch_plan
from penstock.sidecar.run.agent.process import AgentHandle, ExitStatus, Sink, Stream
from penstock.sidecar.run.progress import AttemptResult, AttemptTally, LineProgress
from penstock.sidecar.run.runner import Runner
from penstock.sidecar.run.settings import RunnerSettings, UsageError

T = TypeVar("T")


class InProcessWorker:
    """Claims rollouts one at a time for an agent that is the caller's code."""

    def __init__(self, settings: RunnerSettings) -> None:
        """`settings`: all count but those of agents' commands and the number of workers. Raises `UsageError` for agents
        that are not this process.
        """
        agents = settings.agents
        if agents.command or agents.callable or agents.image or agents.policy:
            raise UsageError("agents in this process have no command, callable, image or policy: call `step(agent)`")
        self._settings = replace(settings, workers=1, most=1)

    def step(self, agent: Callable[..., Any]) -> AttemptResult | None:
        """Run `agent`, maybe async, on one rollout; return the result, None when the queue has none. The agent gets the
        task, and its address if it has a parameter `address`; what it returns is its output. Raises what the agent
        raises, once the attempt has ended as failed, `ClientError` when the gateway refuses the worker, and
        `UsageError` for an async agent in a thread that runs an event loop already.
        """
        if inspect.iscoroutinefunction(agent) and _loop_runs():
            raise UsageError("`step` runs async agents in an event loop of its own; where one runs already use `iter`")
        run = _OneAttempt(self._settings)
        try:
            attempt = run.attempt.result()
            if attempt is None:
                return run.result.result()
            attempt.begin()
            try:
                attempt.output = await_result(agent(attempt.task, **extra_arguments(agent)))
            except BaseException as e:
                attempt.end(e)
                raise
            attempt.end(None)
            return attempt.result
        finally:
            run.hand_back()

    async def iter(self) -> AsyncGenerator[InProcessAttempt]:
        """Yield attempts, each for an `async with`, until there are no more. Raises `ClientError` when the gateway
        refuses the worker.
        """
        while True:
            run = _OneAttempt(self._settings)
            try:
                attempt = await asyncio.wrap_future(run.attempt)
                if attempt is not None:
                    yield attempt
                    if not run.result.done():
                        raise RuntimeError(f"{attempt.claim.rollout.id} was not run: use `async with attempt:`")
                elif await asyncio.wrap_future(run.result) is None:
                    return
            finally:
                run.hand_back()


class InProcessAttempt:
    """A claimed attempt. The code inside its `async with` is its agent, and has the variables of one. An exception that
    leaves the block is the attempt's failure; one by which the user stops (Ctrl-C, `quit` in pdb) hands it back, and
    counts as no try.
    """

    def __init__(self, claim: Claim, variables: Mapping[str, str], run: _OneAttempt) -> None:
        """`variables`: all variables of an agent of this attempt."""
        self.claim = claim
        """The rollout, the attempt, its path and its token."""
        self.output: Any = None
        """The output, any JSON: set it inside the block."""
        self.result: AttemptResult | None = None
        """The result; None until the block is left."""
        self._variables, self._run = variables, run
        self._before: dict[str, str] | None = None

    @property
    def task(self) -> Any:
        """The rollout's input, any JSON."""
        return self.claim.rollout.input

    def begin(self) -> None:
        """Give this process the variables of the attempt."""
        self._before = dict(os.environ)
        _set_variables(self._variables)

    def end(self, error: BaseException | None) -> None:
        """Take the variables away and end the attempt, with `error` if it is not None. Waits until the gateway knows.
        Raises `ClientError` when it refuses the worker.
        """
        _ = helper.flush(helper.PATIENCE_S)
        if self._before is not None:
            _set_variables(self._before)
        if error is None:
            try:
                # As one line, like the last one that an agent prints.
                self._run.end_agent("stdout", json.dumps(self.output, allow_nan=False))
            except (TypeError, ValueError) as e:
                error = e
        if isinstance(error, BdbQuit) or not isinstance(error, Exception | SystemExit | None):
            self._run.hand_back()
        elif error is not None:
            self._run.end_agent("stderr", "".join(traceback.format_exception(error)).rstrip())
        self.result = self._run.result.result()

    async def __aenter__(self) -> Self:
        self.begin()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await asyncio.to_thread(self.end, error)


class _OneAttempt:
    """A runner of one attempt, on the event loop of a thread, and the engine that brings its claim to the caller."""

    def __init__(self, settings: RunnerSettings) -> None:
        """Raises `UsageError` when the settings name a judge or a hook that does not exist."""
        self.attempt: Future[InProcessAttempt | None] = Future()
        """The attempt; None when there is none, or its agent cannot begin."""
        self.result: Future[AttemptResult | None] = Future()
        """Its result; None when there was no attempt."""
        self._settings, self._progress = settings, _ResultProgress(settings.echo)
        self._runner = Runner(settings, self, self._progress)
        self._loop = asyncio.new_event_loop()
        self._agent: _CallersAgent | None = None
        self._stopped = False
        # A daemon: Python can end while the gateway is away.
        threading.Thread(target=self._live, name="penstock-worker", daemon=True).start()

    def hand_back(self) -> None:
        """Hand the attempt back, if it has not ended, also one that is being claimed."""
        self._stopped = True
        with suppress(RuntimeError):  # the loop has ended
            _ = self._loop.call_soon_threadsafe(self._runner.hand_back, "its user stopped it")

    def end_agent(self, stream: Stream, last: str) -> None:
        """End the agent: as succeeded with its output on stdout, or as failed with an error on stderr."""
        assert self._agent is not None
        with suppress(RuntimeError):
            _ = self._loop.call_soon_threadsafe(self._agent.end, stream, last)

    def _live(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                _ = runner.run(self._runner.run())
        except BaseException as e:
            _settle(self.attempt, None)
            _settle(self.result, e)
        else:
            _settle(self.attempt, None)
            _settle(self.result, self._progress.result)

    @asynccontextmanager
    async def running(self, claim: Claim, sink: Sink) -> AsyncGenerator[AgentHandle]:
        """Hand the attempt to the caller; its agent is the caller's code (`AgentEngine`)."""
        with LockedFolder("penstock-") as home:
            made = launch_plan(claim, self._settings.gateway, self._settings.agents, Path(home, "input.json"))
            if made.file is not None:
                _ = made.file.write_text(made.task, encoding="utf-8")
            self._agent = _CallersAgent(sink)
            if self._stopped:
                self.hand_back()
            _settle(self.attempt, InProcessAttempt(claim, environment(os.environ, made.own, self._settings.key), self))
            yield self._agent


class _CallersAgent:
    """The caller's code as the runner sees it: an agent that nothing can kill. To the runner it ends when told to."""

    def __init__(self, sink: Sink) -> None:
        self.pid = os.getpid()
        self._sink, self._began = sink, monotonic_ns()
        self._ended: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self._ended)

    def end(self, stream: Stream, last: str) -> None:
        """End with the last lines of the agent; on stderr they say why it failed."""
        if not self._ended.done():
            self._sink(stream, last.encode(errors="replace") + b"\n")
            self._ended.set_result(ExitStatus(int(stream == "stderr"), duration_ns=monotonic_ns() - self._began))

    def terminate(self) -> None:
        """End with the runner's reason; the caller's code goes on for nothing."""
        if not self._ended.done():
            self._ended.set_result(ExitStatus(error="it was stopped", duration_ns=monotonic_ns() - self._began))

    def kill(self) -> None:
        self.terminate()


class _ResultProgress(LineProgress):
    """Keeps the result of the only attempt."""

    result: AttemptResult | None = None

    def on_end(self, result: AttemptResult, tally: AttemptTally) -> None:
        """Keep the result, and print it."""
        self.result = result
        super().on_end(result, tally)


def _settle(future: Future[T | None], value: T | BaseException | None) -> None:
    """Set a result or an error, unless there is one, or nobody waits."""
    with suppress(InvalidStateError):
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)


def _loop_runs() -> bool:
    """True in a thread that runs an event loop."""
    with suppress(RuntimeError):
        return bool(asyncio.get_running_loop())
    return False


def _set_variables(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)
