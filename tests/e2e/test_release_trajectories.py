"""Releases on real trajectories: one template is found in their system prompts, an identical candidate is promoted on
their real rewards, and one whose rewards are lowered is rolled back. Skipped where the data is not there."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import aiohttp
import pytest
from fakes.experiment import SKIP, Traffic
from fakes.process import Gateway
from fakes.provider import Provider

from bench.trajectories import DATA, calls_of
from penstock.gateway.client.client import Client
from penstock.gateway.model.release_policy import ReleasePolicy
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.releases.prompt_induction import PromptSample, propose

pytestmark = pytest.mark.skipif(not DATA.exists(), reason=f"{DATA.name} is not here")
AT_ONCE = 16


@pytest.fixture(scope="module")
def trajectories() -> list[dict[str, Any]]:
    """As they were recorded."""
    with gzip.open(DATA) as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("kept", "end"), [(1.0, "promoted"), (0.2, "rolled_back")])
async def test_real_rewards_decide(
    gateway: Gateway,
    provider: Provider,
    http: aiohttp.ClientSession,
    client: Client,
    trajectories: list[dict[str, Any]],
    kept: float,
    end: str,
) -> None:
    texts = [one["messages"][0]["content"] for one in trajectories]
    (found,) = propose([PromptSample(text, rollout=str(at)) for at, text in enumerate(texts)])
    assert found.coverage == 1.0
    text = found.template.source
    await client.add_version("airline", NewVersion(kind="prompt", content={"text": text, "sent": True}))
    await client.add_version("airline", NewVersion(kind="prompt", version="same", content={"text": text}))
    how = {"stages": [{"split": 0.5}], "holdback": {"rollouts": 0}, "margin_absolute": 0.25, "horizon": 3000}
    how |= {"guards": {"margin": 0.25}}
    policy = ReleasePolicy.model_validate(how | SKIP)
    traffic = Traffic(gateway.url, http, client)
    release = await traffic.start("airline", "same", policy)
    limit = asyncio.Semaphore(AT_ONCE)

    async def rollout(number: int) -> None:
        one = trajectories[number % len(trajectories)]
        body, _ = next(calls_of(one["messages"]))
        name = f"t{number}"
        async with limit, http.post(f"{gateway.url}/rollout/{name}/v1/chat/completions", data=body) as answer:
            assert answer.status == 200
        (pin,) = await client.pins(name)
        # Every fifth of a lowered candidate's rewards is left.
        lowered = pin.arm == "candidate" and number % 5 >= kept * 5
        await client.reward(name, "a1", Judgement(value=0.0 if lowered else one["reward"]))

    view = await client.release(release.id)
    for first in range(0, policy.horizon, 100):
        await asyncio.gather(*(rollout(number) for number in range(first, first + 100)))
        view = await traffic.when(release.id, lambda view: not view.release.live or not view.waiting)
        if not view.release.live:
            break
    assert view.release.stage == end, view.release.reason
    # The candidate is the stable text: whatever was sent is what the agents sent.
    sent = {json.loads(seen.body)["messages"][0]["content"] for seen in provider.log}
    assert sent <= set(texts)
