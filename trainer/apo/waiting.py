"""Says when nobody takes the rollouts of a run: whoever has forgotten to start a runner should not wait for hours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import QueueStatus
from penstock.gateway.model.rollout import Worker
from penstock.gateway.model.run import Level

LOOK_S: Final = 15.0
"""Between two looks at the queue; how long rollouts may wait, and a runner be silent."""
MODES: Final = ("train", "val", "test")


async def say_who_is_missing(client: Client, tell: Callable[[str, Level], Awaitable[None]]) -> None:
    """Looks for ever; says it once each time that the work stands still."""
    said = ""
    while True:
        await asyncio.sleep(LOOK_S)
        queue, workers = await client.queue(), await client.workers()
        found = missing(queue, workers, time.time_ns())
        if found and found != said:
            await tell(found, "warning")
        said = found


def missing(queue: QueueStatus, workers: list[Worker], now_ns: int) -> str:
    """Why rollouts of a run wait, for a person; empty where they do not."""
    waits = any(mode in queue.waiting for mode in MODES) and now_ns - (queue.oldest_ns or now_ns) > LOOK_S * 1e9
    if not waits or queue.claimed:
        return ""
    if queue.state != "open":
        return f"the queue is {queue.state}, and hands out nothing; `penstock resume` opens it"
    if any(now_ns - worker.last_seen_ns < LOOK_S * 1e9 for worker in workers):
        return "rollouts wait, and the runners that are there do not take them: a runner needs --mode train,val,test"
    return (
        "rollouts wait, and there is no runner: `penstock run --watch --mode train,val,test -- COMMAND` here or "
        "elsewhere, or give --agent COMMAND to this command"
    )
