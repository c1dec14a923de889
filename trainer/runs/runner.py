"""Runs the companions of a run: a runner that takes its rollouts, and other tasks that must not end before it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.gateway.client.child_process import spawn
from penstock.gateway.client.client import ClientError
from penstock.trainer.runs.report import RunReporter
from penstock.trainer.runs.run_end import RunError

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
