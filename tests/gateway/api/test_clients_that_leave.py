"""What somebody has asked for is done as a whole, also when nobody waits for the answer any more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
from fakes.experiment import CANDIDATE, STABLE, policy, prompt
from fakes.raw import post
from fakes.rig import Inside, inside
from fakes.waiting import PATIENCE_S, until
from pydantic import BaseModel

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import ClaimRequest, EnqueueRequest, RolloutSpec
from penstock.gateway.model.release import NewRelease


async def asked(rig: Inside, path: str, body: BaseModel) -> None:
    """Of a client that leaves as soon as the gateway does it."""
    before = rig.gateway.operations.running
    async with rig.client() as client:
        client.send(post(path, body.model_dump_json(exclude_defaults=True).encode(), host="localhost"))
        for _ in range(100_000):
            if rig.gateway.operations.running > before:
                break
            await asyncio.sleep(0)
        assert rig.gateway.operations.running > before
        client.abort()


async def test_calls_follow_a_version(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with inside(tmp_path, http) as rig:
        await asked(rig, "/api/resources/travel", prompt(STABLE, sent=True))

        async def is_known() -> bool:
            return "travel" in rig.gateway.pins.catalog.stable

        await until(is_known)


async def test_a_release_goes_on(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with inside(tmp_path, http) as rig, Client(rig.base.url) as client:
        await client.add_version("travel", prompt(STABLE, sent=True))
        await client.add_version("travel", prompt(CANDIDATE))
        await asked(rig, "/api/resources/travel/releases", NewRelease(candidate="v2", policy=policy(0.5)))

        async def is_counted() -> bool:
            return [one.stage for one in await client.releases()] == ["canary"]

        await until(is_counted)


async def test_who_waits_for_work_gets_it(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with inside(tmp_path, http) as rig, Client(rig.base.url) as client:
        claiming = asyncio.ensure_future(client.claim(ClaimRequest(worker="w1", wait_s=60)))

        async def waits() -> bool:
            return rig.gateway.operations.running == 1

        await until(waits)
        await asked(rig, "/api/rollouts", EnqueueRequest(rollouts=[RolloutSpec(id="r1")]))
        async with asyncio.timeout(PATIENCE_S):
            assert [one.rollout.id for one in (await claiming).claims] == ["r1"]
