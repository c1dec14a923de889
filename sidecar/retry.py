"""Two ways to wait: for a gateway that may be away, because a restart must not cost an agent's work
(`retry_until_answered`), and for a step unless an event comes first (`cancel_on`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from penstock.gateway.client.client import ClientError
from penstock.gateway.model.times import Backoff

PAUSES = Backoff(0.1, 2.0)
MOST_FAILURES = 8
"""The number of failures (such as 500) of a reachable gateway after which it is not asked again."""
AWAY = frozenset({None, 502, 503, 504})
T = TypeVar("T")


async def retry_until_answered(ask: Callable[[], Awaitable[T]], away: Callable[[str], None] = lambda _: None) -> T:
    """Ask until the gateway answers, however long it is away; raise the `ClientError` of a refusal. The request must be
    safe to send twice. `away` is called with the reason of every failure.
    """
    tries = failures = 0
    while True:
        try:
            return await ask()
        except ClientError as e:
            failures += e.status not in AWAY
            if not e.temporary or failures >= MOST_FAILURES:
                raise
            away(str(e))
        tries += 1
        await asyncio.sleep(PAUSES.after(tries))


async def cancel_on(event: asyncio.Event, step: Coroutine[Any, Any, T]) -> T | None:
    """The step's result; None when the event comes first: then the step is cancelled, or not even begun."""
    if event.is_set():
        step.close()
        return None
    task, waiting = asyncio.ensure_future(step), asyncio.ensure_future(event.wait())
    try:
        _ = await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        _ = waiting.cancel()
        _ = task.cancel()
