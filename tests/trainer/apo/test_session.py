"""`penstock train apo` with a real gateway: what a user gets, and what is on the tape afterwards."""

from __future__ import annotations

import re

import pytest
from fakes.optimising import Optimising

from penstock.gateway.model.answers import Change
from penstock.gateway.model.queue import RolloutSpec


@pytest.mark.smoke
async def test_a_better_prompt_is_found_and_nothing_released_moves(here: Optimising) -> None:
    """Rollouts of production that run meanwhile have the prompt that the agent sends."""
    spec = RolloutSpec(id="customer", input={"order": "1001", "question": "Where is my order 1001?"}, mode="online")
    async with here.agents(modes=("online",)):
        searching = await here.start("train", "apo", here.config())
        async with here.agents():
            await here.seen(lambda change: _of("train", change, "succeeded"))
            await here.client.enqueue([spec])
            await here.seen(
                lambda change: (
                    change.rollout is not None
                    and change.rollout.id == "customer"
                    and change.rollout.status == "succeeded"
                )
            )
            ended = await here.ended(searching)
    assert ended.code == 0, ended.output
    assert "better by" in ended.output
    before, after = map(float, re.findall(r"nobody has seen: ([0-9.]+) before, ([0-9.]+) with", ended.output)[0])
    assert after > before + 0.3
    (stable,) = [call.versions async for call in here.client.spans("customer") if call.kind == "llm"]
    assert stable == {"shop": "v1"}
    view = await here.client.resource("shop")
    assert view.stable.version == "v1"
    assert len(view.versions) > 3
    assert {one.author for one in view.versions} == {"", "apo"}
    assert await here.client.releases("shop") == []


def _of(mode: str, change: Change, status: str) -> bool:
    return change.rollout is not None and (change.rollout.mode, change.rollout.status) == (mode, status)
