"""Rollouts that nobody takes are spoken of."""

from __future__ import annotations

import asyncio

import pytest
from fakes.optimising import Optimising
from fakes.workers import beside

from penstock.gateway.model.queue import QueueState, QueueStatus, RolloutSpec
from penstock.gateway.model.rollout import Worker
from penstock.trainer.apo import waiting
from penstock.trainer.apo.waiting import missing

MINUTE = 60 * 10**9
THERE, GONE = Worker(id="w", last_seen_ns=MINUTE), Worker(id="w", last_seen_ns=1)


@pytest.mark.parametrize(
    ("state", "modes", "claimed", "oldest", "workers", "said"),
    [
        ("open", {"train": 3}, 0, 1, [], "there is no runner"),
        ("open", {"train": 3}, 0, 1, [GONE], "there is no runner"),
        ("open", {"val": 3}, 0, 1, [THERE], "do not take them"),
        ("paused", {"test": 3}, 0, 1, [THERE], "the queue is paused"),
        ("open", {"train": 3}, 1, 1, [THERE], ""),
        ("open", {"train": 3}, 0, MINUTE - 1, [], ""),
        ("open", {"online": 3}, 0, 1, [], ""),
    ],
)
def test_why_nobody_takes_them(
    state: QueueState, modes: dict[str, int], claimed: int, oldest: int, workers: list[Worker], said: str
) -> None:
    queue = QueueStatus.model_validate({"state": state, "waiting": modes, "claimed": claimed, "oldest_ns": oldest})
    found = missing(queue, workers, MINUTE)
    assert said in found
    assert bool(said) == bool(found)


async def test_it_is_said_once(here: Optimising, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_S", 0.01)
    said: asyncio.Queue[str] = asyncio.Queue()

    async def tell(text: str, level: str) -> None:
        await said.put(text)

    await here.client.enqueue([RolloutSpec(id="r", mode="train")])
    async with beside(waiting.say_who_is_missing(here.client, tell)):
        assert "there is no runner" in await asyncio.wait_for(said.get(), 30)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(said.get(), 0.3)
