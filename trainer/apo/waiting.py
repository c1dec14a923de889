"""Says what a run waits for. One that waits for rollouts which nobody runs looks like one that works."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import QueueState
from penstock.gateway.model.rollout import Worker
from penstock.gateway.model.run import RunChange
from penstock.trainer.data.awaiting import Awaited
from penstock.trainer.runs.report import Reporter

LOOK_S: Final = 10.0
"""Between two looks; each is a sign of life too, so that a run that waits is not taken for a silent one."""
QUIET: Final = 2
"""Looks without an end of a rollout after which it says what it waits for."""
SEEN_NS: Final = 15_000_000_000
"""How long ago a runner was seen that is there."""


async def keep_saying(client: Client, reporter: Reporter, awaited: Awaited, run: str, every_s: float = LOOK_S) -> None:
    """Says it on the tape, for ever. A run that nobody works for is warned of once, until something ends."""
    before, quiet, said = 0, 0, ""
    while True:
        await asyncio.sleep(every_s)
        waiting = awaited.open()
        quiet = quiet + 1 if waiting == before else 0
        before = waiting
        text = ""
        if waiting and quiet >= QUIET:
            workers, state = await client.workers(), (await client.queue()).state
            # By the gateway's clock, as workers are seen; ours may be another.
            now_ns = (await client.change_run(run, RunChange())).last_seen_ns
            text = waits(waiting, run, workers, state, now_ns)
        if text == said:
            await reporter.alive()
            continue
        await reporter.change(RunChange(message=text))
        if "?" in text:
            await reporter.warning(text)
        said = text


def waits(rollouts: int, run: str, workers: Sequence[Worker], state: QueueState, now_ns: int) -> str:
    """What a run waits for, for a person; a question where nobody works for it."""
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
