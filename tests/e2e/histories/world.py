"""What all clients of a history have in common."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
from e2e.histories.history import History, Operation

from penstock.gateway.client.client import Client

PATIENCE = aiohttp.ClientTimeout(total=30)
AGAIN_S = 0.3


@dataclass(slots=True)
class World:
    """The gateway, the history, and what clients know of each other."""

    seed: int
    url: str
    history: History
    http: aiohttp.ClientSession
    client: Client
    lease_s: float
    queued: list[str] = field(default_factory=list[str])
    """Rollouts that are known to be queued, in order."""
    taken: list[str] = field(default_factory=list[str])
    """Those that workers were given, in order."""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def chance(self, actor: str) -> random.Random:
        """Of one client."""
        return random.Random(f"{self.seed} {actor}")

    async def pause(self, seconds: float) -> None:
        """For so long, or until it is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                _ = await self.over.wait()

    async def again(self, once: Callable[[], Awaitable[Operation]], tries: int = 60) -> Operation:
        """Until it is answered, or refused for good."""
        for _ in range(tries - 1):
            done = await once()
            if done.result == "ok" or (done.result == "refused" and done.answer["status"] < 500):
                return done
            await asyncio.sleep(AGAIN_S)
        return await once()
