"""Rollouts of a step, ordered, awaited and read; versions of weights on their way to them. Against a real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from fakes.engine import LOAD, FakeEngine, Planned
from fakes.experiment import prompt
from fakes.process import Gateway
from fakes.waiting import until
from fakes.workers import beside, finish

from penstock.adapters.samples import Options
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import Claim, ClaimRequest
from penstock.gateway.model.release_policy import CanaryStage, ReleasePolicy
from penstock.gateway.model.rollout import RolloutStatus
from penstock.trainer.data.collector import CollectError, RolloutCollector, Variant
from penstock.trainer.data.tasks import RolloutTask
from penstock.trainer.serving.publisher import Publisher, PublishError

TASKS = [RolloutTask(number, {"n": number}) for number in range(3)]


@asynccontextmanager
async def collecting(client: Client) -> AsyncGenerator[RolloutCollector]:
    """A collector that follows what happens."""
    made = RolloutCollector(client, "run", Options())
    async with beside(made.run()):
        yield made


@pytest.fixture
async def collector(client: Client) -> AsyncGenerator[RolloutCollector]:
    async with collecting(client) as made:
        yield made


@pytest.fixture
async def publisher(client: Client) -> Publisher:
    made = Publisher(client, "policy", "fake-openai", "base", "run")
    await made.begin()
    return made


class Worker:
    """Takes rollouts and ends them with a reward."""

    def __init__(self, served: Gateway, http: aiohttp.ClientSession, client: Client) -> None:
        self.served, self.http, self.client = served, http, client
        self.model = "base"
        self.models: list[str] = []
        """Models that answered."""

    async def work(self, reward: Callable[[Claim], float | None], most: int) -> None:
        """So many rollouts."""
        for _ in range(most):
            claims = (await self.client.claim(ClaimRequest(worker="w", wait_s=20))).claims
            for claim in claims:
                await self._one(claim, reward(claim))

    async def _one(self, claim: Claim, reward: float | None) -> None:
        body = {"model": self.model, "messages": [{"role": "user", "content": "hello"}]}
        async with self.http.post(f"{self.served.url}{claim.address}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            self.models.append((await answer.json())["choices"][0]["message"]["content"])
        await finish(self.client, claim, *([] if reward is None else [reward]))


@pytest.fixture
def worker(served: Gateway, http: aiohttp.ClientSession, client: Client) -> Worker:
    return Worker(served, http, client)


async def test_a_step_is_ordered_once_and_read_when_it_has_ended(collector: RolloutCollector, worker: Worker) -> None:
    order = await collector.order("train", "1", 1, TASKS, 2, 60.0)
    assert order.names == tuple(f"run-train-1-{place}-{number}" for place in range(3) for number in range(2))
    working = worker.work(lambda claim: float(claim.rollout.id[-1]), 6)
    found, _ = await asyncio.gather(collector.gather(order, 60.0), working)
    assert found.rewards == {f"run-train-1-{place}": [0.0, 1.0] for place in range(3)}
    assert (found.mean, found.informative, found.late) == (0.5, 3, 0)
    assert found.ended == {RolloutStatus.SUCCEEDED: 6}
    # The engine gave no token ids: every call is in the report, with that reason.
    assert (found.samples, found.report.reasons) == ([], {"no_token_ids": 6})


async def test_rollouts_of_a_group_are_spread_over_variants(
    collector: RolloutCollector, worker: Worker, client: Client
) -> None:
    for text in ("one", "two"):
        await client.add_version("shop", prompt(text))
    variants = [Variant("one", {"shop": "v1"}), Variant("two", {"shop": "v2"})]
    order = await collector.order("train", "1", 1, TASKS, 3, 60.0, variants)
    given = {name: (await client.rollout(name)).config.versions["shop"] for name in order.names}
    # With an odd number in a group, each is in the majority in turn.
    assert [given[f"run-train-1-{place}-{number}"] for place in range(2) for number in range(3)] == [
        "v1", "v2", "v1", "v2", "v1", "v2",
    ]  # fmt: skip
    working = worker.work(lambda claim: float(given[claim.rollout.id] == "v2"), 9)
    found, _ = await asyncio.gather(collector.gather(order, 60.0), working)
    assert {name: set(rewards) for name, rewards in found.by_variant.items()} == {"one": {0.0}, "two": {1.0}}
    assert len(found.rewards) == len(TASKS)


async def test_a_life_after_a_crash_finds_what_has_ended(
    collector: RolloutCollector, worker: Worker, client: Client
) -> None:
    _ = await collector.order("train", "1", 1, TASKS, 2, 60.0)
    await worker.work(lambda _: 1.0, 6)
    async with collecting(client) as later:
        found = await later.gather(await later.order("train", "1", 1, TASKS, 2, 60.0), 60.0)
    assert found.ended == {RolloutStatus.SUCCEEDED: 6}
    assert (await client.queue()).waiting == {}


async def test_what_does_not_end_in_time_is_cancelled_and_the_others_count(
    collector: RolloutCollector, worker: Worker
) -> None:
    order = await collector.order("train", "1", 1, TASKS, 2, 60.0)
    await worker.work(lambda _: 1.0, 5)
    found = await collector.gather(order, 0.01)
    assert found.late == 1
    assert found.ended == {RolloutStatus.SUCCEEDED: 5, RolloutStatus.CANCELLED: 1}
    assert sum(map(len, found.rewards.values())) == 5


async def test_what_runs_out_of_time_has_the_reward_of_failures(client: Client, worker: Worker) -> None:
    collector = RolloutCollector(client, "run", Options(), failed_reward=-1.0)
    async with beside(collector.run()):
        order = await collector.order("train", "1", 1, TASKS[:1], 3, 5.0)
        (claim, mute) = (await client.claim(ClaimRequest(worker="w", wait_s=20, limit=2))).claims
        body = {"model": "base", "messages": [{"role": "user", "content": "hello"}]}
        async with worker.http.post(f"{worker.served.url}{claim.address}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
        # One asks and loops, one is silent, and one is not even begun.

        async def ran_out() -> bool:
            ends = [(await client.rollout(one.rollout.id)).status for one in (claim, mute)]
            return ends == [RolloutStatus.FAILED] * 2

        await until(ran_out)
        found = await collector.gather(order, 0.01)
    assert (found.late, found.ended) == (1, {RolloutStatus.FAILED: 2, RolloutStatus.CANCELLED: 1})
    assert found.rewards == {"run-train-1-0": [-1.0, -1.0]}
    assert found.failed_rewards == {"run-train-1-0": [-1.0]}
    assert found.failed == pytest.approx(2 / 3)
    assert mute.rollout.id != claim.rollout.id


async def test_without_a_runner_it_says_so(collector: RolloutCollector) -> None:
    order = await collector.order("train", "1", 1, TASKS, 2, 60.0)
    with pytest.raises(CollectError, match="is there a runner"):
        await collector.gather(order, 0.01)


async def test_training_gets_a_version_at_once_and_production_does_not(
    publisher: Publisher, worker: Worker, collector: RolloutCollector, client: Client, vllm: FakeEngine
) -> None:
    worker.model = "policy"
    for step in range(3):
        await publisher.register(f"run.{step}", Path(f"/adapters/run.{step}"), None, "")
        await publisher.train_on(f"run.{step}")
        assert f"policy@run.{step}" in vllm.adapters
        order = await collector.order("train", str(step), step, TASKS[:1], 1, 60.0)
        await worker.work(lambda _: 1.0, 1)
        await collector.gather(order, 60.0)
    assert worker.models == [f"I am policy@run.{step}." for step in range(3)]
    body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    async with worker.http.post(f"{worker.served.url}/rollout/customer/v1/chat/completions", json=body) as answer:
        assert (await answer.json())["choices"][0]["message"]["content"] == "I am base."
    # Said again, as after a crash, nothing happens.
    await publisher.begin()
    before = len(await client.releases("policy"))
    await publisher.register("run.2", Path("/adapters/run.2"), None, "")
    await publisher.train_on("run.2")
    assert len(await client.releases("policy")) == before


async def test_production_sees_it_by_a_release_of_its_own(publisher: Publisher, client: Client) -> None:
    for step in range(2):
        await publisher.register(f"run.{step}", Path(f"/adapters/run.{step}"), None, "")
    await publisher.train_on("run.1")
    policy = ReleasePolicy(stages=[CanaryStage(split=0.5)], margin_absolute=0.1)
    release = await publisher.release("run.1", policy)
    assert release.only.modes == ["online"]
    assert (release.stable, release.candidate) == ("base", "run.1")


async def test_weights_that_do_not_load_stop_the_run_and_no_agent(
    publisher: Publisher, vllm: FakeEngine, client: Client
) -> None:
    await publisher.register("run.0", Path("/adapters/run.0"), None, "")
    vllm.files = {"/adapters/run.0"}
    await publisher.register("run.1", Path("/adapters/gone"), None, "")
    with pytest.raises(PublishError, match=r"policy@run\.1 cannot be served: check: .*/adapters/gone"):
        await publisher.train_on("run.1")
    assert (await client.resource("policy")).stable.version == "base"


async def test_a_release_that_an_earlier_life_has_left_is_taken_over(
    publisher: Publisher, vllm: FakeEngine, client: Client
) -> None:
    for step in range(3):
        await publisher.register(f"run.{step}", Path(f"/adapters/run.{step}"), None, "")
    held = asyncio.Event()
    vllm.plan(LOAD, Planned(before=held))
    killed = asyncio.ensure_future(publisher.train_on("run.1"))

    async def begun() -> bool:
        return bool(await client.releases("policy", live=True))

    await until(begun)
    killed.cancel()
    with suppress(asyncio.CancelledError):
        await killed
    held.set()
    await publisher.train_on("run.2")
    assert (await client.resource("policy")).stable.rules[0].version == "run.2"
    assert not await client.releases("policy", live=True)
