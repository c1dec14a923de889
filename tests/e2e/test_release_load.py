"""A release under load: 200 calls a second while it starts, ramps up, is rolled back, and the next one is promoted."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
from fakes.experiment import CANDIDATE, STABLE, Traffic, policy, prompt
from fakes.process import Gateway
from fakes.provider import Provider, Seen
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.rollout import Judgement

PACE = 200
"""Calls a second."""
AT_ONCE = 40
"""Rollouts under way at most: a machine that does not keep the pace has fewer calls, not ever more that wait."""
ENOUGH = 600
"""Calls that must have been answered before the load may end, however quickly the release went through."""


def system(seen: Seen) -> str:
    """The system text of a call that the provider has seen."""
    return json.loads(seen.body)["messages"][0]["content"]


class Load:
    """Agents whose rollouts are three calls long, at a steady pace, until they are told to stop."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.calls = 0
        self.under_way: set[tuple[str, int]] = set()
        self.stopping = False

    async def run(self) -> None:
        """All of it; a rollout ends with a reward that no arm decides."""
        began, rollouts = time.monotonic(), set[asyncio.Task[None]]()
        room = asyncio.Semaphore(AT_ONCE)
        while not self.stopping:
            due = began + len(rollouts) * 3 / PACE
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await room.acquire()
            rollouts.add(rollout := asyncio.ensure_future(self._rollout(f"load-{len(rollouts)}")))
            rollout.add_done_callback(lambda _: room.release())
        await asyncio.gather(*rollouts)

    async def _rollout(self, name: str) -> None:
        for number in range(3):
            self.under_way.add((name, number))
            await self.traffic.call(name)
            self.under_way.discard((name, number))
            self.calls += 1
        await self.traffic.client.reward(name, "a1", Judgement(value=0.7))


async def test_no_call_fails_because_of_a_release(
    gateway: Gateway, provider: Provider, http: aiohttp.ClientSession, client: Client
) -> None:
    await client.add_version("travel", prompt(STABLE, sent=True))
    await client.add_version("travel", prompt(CANDIDATE))
    traffic = Traffic(gateway.url, http, client)
    load = Load(traffic)
    running = asyncio.ensure_future(load.run())

    async def sends(text: str) -> None:
        """Comes back when the provider has seen a new rollout with this text."""
        at = len(provider.log)

        def is_new() -> bool:
            nonlocal at
            # Each is read once: reading takes time that the load lacks.
            first, at = at, len(provider.log)
            return any(text in system(seen) for seen in provider.log[first:])

        await until(is_new)

    await sends("Acme Air. Today is")
    first = await traffic.start("travel", "v2", policy(0.2, 0.5, 0.8, rollouts=5))
    await sends("careful")
    _ = await traffic.when(first.id, lambda view: view.release.step == 2)
    await client.decide(first.id, "rollback", ActionRequest(who="ann", why="to see how quick it is"))
    # Those that were under way may still get there; nothing that came later does.
    under_way = list(load.under_way)
    await until(lambda: not any(one in load.under_way for one in under_way))
    seen = len(provider.log)
    await until(lambda: len(provider.log) >= seen + PACE)
    assert not any("careful" in system(one) for one in provider.log[seen:])
    second = await traffic.start("travel", "v2", policy(0.5))
    await sends("careful")
    await client.decide(second.id, "promote", ActionRequest(who="ann", why="it is better"))
    await sends("careful")
    await until(lambda: load.calls >= ENOUGH)
    load.stopping = True
    await running
    assert traffic.failures == []
    mixed = 0
    for number in range(load.calls // 3):
        (pin,) = await client.pins(f"load-{number}")
        mixed += pin.mixed
    assert mixed < load.calls / 3
