"""Reports what a run waits for. Without it a run whose rollouts no runner takes would look like one that works."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import QueueState
from penstock.gateway.model.rollout import Worker
from penstock.gateway.model.run import RunChange
from penstock.trainer.data.rollout_waiter import RolloutWaiter
from penstock.trainer.runs.report import RunReporter

LOOK_S: Final = 10.0
"""Seconds between two looks; each is a sign of life too, so that a waiting run is not taken for a silent one."""
QUIET: Final = 2
"""Looks without the end of a rollout after which the run reports what it waits for."""
SEEN_NS: Final = 15_000_000_000
"""A runner that was seen within these ns is there."""


async def report_waiting(
    client: Client, reporter: RunReporter, awaited: RolloutWaiter, run: str, every_s: float = LOOK_S
) -> None:
    """Report on the tape what the run waits for, for ever. A run without a runner is warned of once, until a rollout
    ends."""
    before, quiet, said = 0, 0, ""
    while True:
        await asyncio.sleep(every_s)
        waiting = awaited.pending()
        quiet = quiet + 1 if waiting == before else 0
        before = waiting
        text = ""
        if waiting and quiet >= QUIET:
            workers, state = await client.workers(), (await client.queue()).state
            # The gateway's clock, which also dates `last_seen_ns` of workers; ours may differ.
            now_ns = (await client.change_run(run, RunChange())).last_seen_ns
            text = describe_wait(waiting, run, workers, state, now_ns)
        if text == said:
            await reporter.heartbeat()
            continue
        await reporter.change(RunChange(message=text))
        if "?" in text:
            await reporter.warning(text)
        said = text


def describe_wait(rollouts: int, run: str, workers: Sequence[Worker], state: QueueState, now_ns: int) -> str:
    """Return what a run waits for, for a person; it has a question mark if no worker runs its rollouts."""
    busy = sum(any(attempt.startswith(f"{run}.") for attempt in worker.attempts) for worker in workers)
    if busy:
        return f"waits for {rollouts:,} rollouts, and {busy:,} workers run some"
    if state != "open":
        return f"waits for {rollouts:,} rollouts, and the queue is {state}: is that meant? `penstock resume` opens it"
    if any(now_ns - worker.last_seen_ns < SEEN_NS for worker in workers):
        return (
            f"waits for {rollouts:,} rollouts, and the runners that are there take none: have they --mode "
            "train,val,test?"
        )
    return (
        f"waits for {rollouts:,} rollouts, and nobody runs one: is there a runner? `penstock run --watch --mode "
        "train,val,test -- COMMAND` here or elsewhere is one, and so is --agent COMMAND of this command"
    )
