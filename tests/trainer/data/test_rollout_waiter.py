"""Rollouts that are waited for: by several at once, and named more than once."""

from __future__ import annotations

import asyncio

from fakes.process import Gateway
from fakes.workers import finish

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import ClaimRequest, RolloutSpec
from penstock.gateway.model.rollout import RolloutStatus
from penstock.trainer.data.collector import RolloutWaiter

NAMES = ("q1", "q2", "q1")


async def test_the_same_rollouts_may_be_waited_for_by_several_and_named_twice(gateway: Gateway) -> None:
    async with Client(gateway.url) as client:
        awaited = RolloutWaiter(client)
        following = asyncio.ensure_future(awaited.run())

        async def waits() -> int:
            await awaited.enqueue([RolloutSpec(id=name, input=1) for name in NAMES])
            late = await awaited.wait_for(NAMES, 60.0)
            awaited.forget(NAMES)
            return late

        both = asyncio.gather(waits(), waits())
        while awaited.pending() < 2:  # noqa: ASYNC110 - two requests
            await asyncio.sleep(0.01)
        for name in {*NAMES}:
            await client.cancel(name)
        assert await both == [0, 0]
        assert awaited.pending() == 0
        following.cancel()


async def test_what_has_ended_unheard_when_time_is_up_is_not_late(gateway: Gateway) -> None:
    async with Client(gateway.url) as client:
        awaited = RolloutWaiter(client)
        # It follows, and news come late.
        awaited._follows.set()
        await awaited.enqueue([RolloutSpec(id=name, input=1) for name in NAMES])
        (claim,) = (await client.claim(ClaimRequest(worker="w", wait_s=20))).claims
        await finish(client, claim)
        assert await awaited.wait_for(NAMES, 0.01) == 1


async def test_many_rollouts_take_linear_time() -> None:
    """Were it not linear, this would take longer than a test may."""
    awaited, names = RolloutWaiter(Client("http://127.0.0.1:1")), [f"q{at}" for at in range(30_000)]
    awaited._waiting = dict.fromkeys(names, RolloutStatus.QUEUING)
    waiting = asyncio.ensure_future(awaited.wait_for(names, 600.0))
    for name in names:
        await awaited._note(name, RolloutStatus.SUCCEEDED)
        await asyncio.sleep(0)
    assert await waiting == 0
