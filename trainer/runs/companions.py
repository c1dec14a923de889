"""The companions of a run: a runner that takes its rollouts, other tasks that must not end before it, and a client that
waits for a gateway that is away.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.gateway.client.child_process import spawn
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import Params
from penstock.gateway.client.exchanges import WholeRollout
from penstock.gateway.model.base import SpanKind
from penstock.gateway.model.times import Backoff
from penstock.trainer.runs.report import RunError, RunReporter

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
