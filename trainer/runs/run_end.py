"""Reports the end of a run in every case, on the tape and to the caller.

A run has `succeeded`, was `stopped` by a signal or by its own rules, or has `failed` with a sentence. After `stopped`
and `failed` the same command continues from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.gateway.client.client import ClientError
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.data.collector import CollectError
from penstock.trainer.engines.errors import CheckpointError, EngineError
from penstock.trainer.runs.report import RunReporter
from penstock.trainer.serving.publisher import PublishError
from penstock.trainer.serving.vllm import InferenceError


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
