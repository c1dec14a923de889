"""Rollouts that nobody has queued, in a real gateway: they end when quiet, also after a kill, and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from fakes.process import Gateway, upstreams
from fakes.provider import Provider
from openai import AsyncOpenAI

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import ClaimRequest, RolloutSpec
from penstock.gateway.model.rollout import RolloutStatus

PATIENCE = 60.0
StartGateway = Callable[..., Awaitable[Gateway]]


async def ask(gateway: Gateway, rollout: str, messages: int = 1) -> None:
    """An agent that was given an address by hand."""
    async with AsyncOpenAI(base_url=gateway.openai(rollout), api_key="sk-test", max_retries=0) as sdk:
        for _ in range(messages):
            _ = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])


async def named(client: Client, filter: str) -> set[str]:
    """The rollouts that a filter finds."""
    return {rollout.id async for rollout in client.rollouts(filter)}


async def when(client: Client, rollout: str, status: RolloutStatus, since: int = 0) -> None:
    """Comes back when the feed has told that it stands there."""
    try:
        async with asyncio.timeout(PATIENCE):
            async for change in client.changes(since):
                if change.rollout is not None and change.rollout.id == rollout and change.rollout.status == status:
                    return
    except TimeoutError:
        raise AssertionError(f"{rollout} is not {status}: {await client.rollout(rollout)}") from None


@pytest.fixture
def config(provider: Provider) -> str:
    return "quiet_seconds = 3.0\n" + upstreams(openai=provider.openai_url)


async def test_they_end_and_come_back_and_are_nobodys(start_gateway: StartGateway, config: str) -> None:
    gateway = await start_gateway(config)
    async with Client(gateway.url) as client:
        _ = await client.enqueue([RolloutSpec(id="queued")])
        _ = await client.claim(ClaimRequest(worker="w1"))
        await ask(gateway, "by-hand")
        await when(client, "by-hand", RolloutStatus.RUNNING)
        assert await named(client, "status:claimed") == {"queued"}
        assert await named(client, "-status:claimed origin:header") == {"by-hand"}
        assert await named(client, "status:running,claimed") >= {"queued"}
        await when(client, "by-hand", RolloutStatus.SUCCEEDED)
        assert await named(client, "status:ended") == {"by-hand"}
        told = await client.rollout("by-hand")
        assert (told.attempts[0].outcome, told.reward, told.totals.calls) == (None, None, 1)
        cursor = (await client.stats(spans=0)).cursor
        await ask(gateway, "by-hand")
        await when(client, "by-hand", RolloutStatus.RUNNING, cursor)
        await when(client, "by-hand", RolloutStatus.SUCCEEDED, cursor)
        assert (await client.rollout("by-hand")).totals.calls == 2


async def test_they_end_after_a_kill(start_gateway: StartGateway, config: str) -> None:
    gateway = await start_gateway(config.replace("quiet_seconds = 3.0", "quiet_seconds = 6.0"))
    await ask(gateway, "by-hand")
    async with Client(gateway.url) as client:
        await when(client, "by-hand", RolloutStatus.RUNNING)
        assert await named(client, "status:running") == {"by-hand"}
    _ = await gateway.kill()
    await gateway.start()
    async with Client(gateway.url) as client:
        await when(client, "by-hand", RolloutStatus.SUCCEEDED)
