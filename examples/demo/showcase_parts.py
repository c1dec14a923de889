"""Parts that the modules of the showcase share: the running gateway with its desk, and waiting for a release."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from examples.demo.order_desk import STABLE, DeskAgent, OrderDesk
from penstock.console.commands.watch import poll_on_change
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import FinishRequest
from penstock.gateway.model.release import ReleaseView
from penstock.gateway.model.rollout import Judgement, Outcome

PATIENCE: Final = 30.0
TASKS: Final = {
    "refund-1002": "I want my money back for the chair of order 1002.",
    "where-1001": "Where is my order 1001?",
    "refund-1006": "The clock of order 1006 is broken, I want my money back.",
}


@dataclass(slots=True)
class Showcase:
    """A running showcase: the gateway, its client and the desk."""

    url: str
    client: Client
    http: aiohttp.ClientSession
    desk: OrderDesk
    judged: Counter[str] = field(default_factory=Counter[str])
    """Number of the canary's rollouts that have a reward, by arm."""
    release: str = ""
    """Name of the release in canary."""
    running: str = ""
    """Id of the training run in progress."""

    def agent(self, rollout: str, attempt: str = "a1", prompt: str = STABLE) -> DeskAgent:
        """An agent with the gateway's addresses of one attempt."""
        base = f"{self.url}/rollout/{rollout}/attempt/{attempt}"
        return DeskAgent(self.http, f"{base}/v1", f"{base}/mcp/orders", prompt)

    async def finish(self, rollout: str, good: bool, reward: Judgement | None = None) -> None:
        """Ends a rollout of an agent that no worker runs."""
        outcome = Outcome(exit_code=0 if good else 1, reason=None if good else "exit code 1")
        rewards = [reward] if reward is not None else []
        request = FinishRequest(status="succeeded" if good else "failed", outcome=outcome, rewards=rewards)
        await self.client.finish(rollout, "a1", request)


async def wait_for_release(client: Client, release: str, so: Callable[[ReleaseView], bool]) -> None:
    """Waits until `so` holds for a release; raises `TimeoutError` after `PATIENCE` seconds."""
    looks = poll_on_change(client, lambda: client.release(release), lambda _: 0.2)
    async with asyncio.timeout(PATIENCE), aclosing(looks):
        async for view in looks:
            if so(view):
                return
