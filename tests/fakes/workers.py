"""The end of a rollout as its runner says it, and work that goes on beside a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import Claim, FinishRequest
from penstock.gateway.model.rollout import Judgement


async def finish(client: Client, claim: Claim, *rewards: float) -> None:
    """The rollout of a claim by worker `w` has succeeded, with these rewards."""
    judged = [Judgement(value=value, source="runner") for value in rewards]
    asked = FinishRequest(worker="w", status="succeeded", rewards=judged)
    await client.finish(claim.rollout.id, claim.attempt.id, asked)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, object]) -> AsyncGenerator[None]:
    """The work is under way from here on, and is cancelled at the end."""
    running = asyncio.ensure_future(work)
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
