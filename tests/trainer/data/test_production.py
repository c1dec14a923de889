"""Production's rollouts on their way into a step: what is waited for, what is left out, and that each is taken once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from conftest import StartGateway
from fakes.engine import FakeEngine, Planned
from fakes.mistakes import tells
from fakes.process import vllms
from fakes.production import Shop
from fakes.settings import merged
from fakes.tiny_model import config
from fakes.workers import beside, finish

from penstock.gateway.client.client import Client
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import Claim, ClaimRequest, RolloutSpec
from penstock.gateway.model.release import NewRelease
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.data.collector import RolloutBatch
from penstock.trainer.data.production import ConsumedLog, ProductionRollouts
from penstock.trainer.serving.publisher import IMMEDIATE_POLICY, PRODUCTION, Publisher

pytestmark = pytest.mark.usefixtures("small_tokens")
CHAT = "/v1/chat/completions"


@pytest.fixture
async def shop(shop: Shop) -> Shop:
    """With the first version of a run, which production does not get."""
    made = Publisher(shop.client, "policy", "vllm", "base", "run")
    await made.begin()
    await made.register("run.0", Path("/adapters/run.0"), None, "")
    return shop


class Learner:
    """A run without its learning."""

    def __init__(self, shop: Shop, home: Path, **sections: dict[str, Any]) -> None:
        own: dict[str, Any] = {"run": {"name": "run"}, "online": {"batch_rollouts": 4, "quiet_seconds": 0.0}}
        own["advantage"] = {"estimator": "reinforce++"}
        self.directory = home / "taken"
        settings = config(home, **merged(own, sections))
        self.traffic = ProductionRollouts(shop.client, settings, ConsumedLog(self.directory))
        self.told: list[str] = []

    async def step(self, step: int, version: int = 0) -> RolloutBatch:
        """What a step takes, as soon as there is enough."""
        await self.traffic.begin(version)
        async with asyncio.timeout(60):
            while True:
                self.told += await self.traffic.inspect_quiet()
                if (found := await self.traffic.take(step, version)) is not None:
                    return found
                await self.traffic.wait_for_news()

    def of(self, step: int) -> list[str]:
        """The rollouts that a step took."""
        return list(ConsumedLog(self.directory).rollouts_of(step) or ())


@asynccontextmanager
async def learner(shop: Shop, home: Path, **sections: dict[str, Any]) -> AsyncGenerator[Learner]:
    made = Learner(shop, home, **sections)
    async with beside(made.traffic.run()):
        yield made


def names(*numbers: int) -> list[str]:
    return [f"r{number}" for number in numbers]


async def test_a_step_takes_what_has_a_reward_and_each_once(shop: Shop, tmp_path: Path) -> None:
    await shop.serve(*names(*range(9)))
    # Two are judged before anybody follows, and most are never judged.
    await shop.reward("r5", 1.0)
    await shop.reward("r1", 0.0)
    async with learner(shop, tmp_path) as run:
        first = asyncio.ensure_future(run.step(1))
        await shop.reward("r7", 1.0)
        await shop.reward("r3", 0.5)
        found = await first
        assert run.of(1) == names(1, 3, 5, 7)
        assert (found.mean, len(found.samples), found.report.reasons) == (0.625, 4, {})
        assert {sample.reward for sample in found.samples} == {0.0, 0.5, 1.0}
        # What was taken and is judged again is not taken again.
        await shop.reward("r5", 0.2)
        for number, name in enumerate(names(0, 2, 4, 6)):
            await shop.reward(name, number % 2)
        await run.step(2)
        assert run.of(2) == names(0, 2, 4, 6)


async def test_a_step_that_is_done_again_takes_what_it_took_as_it_was(shop: Shop, tmp_path: Path) -> None:
    await shop.busy(*names(0, 1, 2, 3))
    async with learner(shop, tmp_path) as run:
        before = await run.step(1)
    # Afterwards users change their minds, agents go on, and more has come.
    await shop.reward("r0", 0.9)
    await shop.busy(*names(0, 4, 5, 6, 7))
    async with learner(shop, tmp_path) as run:
        again = await run.step(1)
        assert [(one.rollout, one.reward, one.response.tolist()) for one in again.samples] == [
            (one.rollout, one.reward, one.response.tolist()) for one in before.samples
        ]
        await run.step(2)
        assert (run.of(1), run.of(2)) == (names(0, 1, 2, 3), names(4, 5, 6, 7))


async def test_a_step_that_is_done_again_goes_on_without_what_was_forgotten(shop: Shop, tmp_path: Path) -> None:
    """Retention knows nothing of steps that have no checkpoint yet."""
    await shop.busy(*names(0, 1, 2, 3))
    async with learner(shop, tmp_path) as run:
        await run.step(1)
    await shop.client.cancel("r2")
    await shop.client.forget("r2")
    async with learner(shop, tmp_path) as run:
        again = await run.step(1)
        assert sorted({one.rollout for one in again.samples}) == names(0, 1, 3)
        assert again.figures["left_out/gone"] == 1


async def test_a_rollout_is_left_until_it_is_quiet(shop: Shop, vllm: FakeEngine, tmp_path: Path) -> None:
    gate = asyncio.Event()
    await shop.busy(*names(0, 1, 2, 3, 4))
    vllm.plan(CHAT, Planned(before=gate))
    asked = len([path for path, _ in vllm.asked if path == CHAT])
    running = asyncio.ensure_future(shop.serve("r0"))
    await vllm.until(CHAT, asked + 1)
    # The gateway tells of a call that is under way after a moment.
    await shop.when(lambda: _calls(shop, "r0", 2), "span")
    async with learner(shop, tmp_path) as run:
        await run.step(1)
        assert run.of(1) == names(1, 2, 3, 4)
        gate.set()
        await running
        await shop.busy(*names(5, 6, 7))
        await run.step(2)
        assert run.of(2) == names(0, 5, 6, 7)


async def _calls(shop: Shop, rollout: str, count: int) -> bool:
    return len([span async for span in shop.client.spans(rollout, filter="kind:llm")]) >= count


async def production_gets(shop: Shop, version: str) -> None:
    """A person releases it."""
    publisher = Publisher(shop.client, "policy", "vllm", "base", "run")
    await publisher.register(version, Path(f"/adapters/{version}"), None, "")
    new = NewRelease(candidate=version, only=PRODUCTION, policy=IMMEDIATE_POLICY, author="ann")
    release = (await shop.client.start_release("policy", new)).id

    async def checked() -> bool:
        return (await shop.client.release(release)).release.stage == "canary"

    await shop.when(checked, "release")
    await shop.client.decide(release, "promote", ActionRequest(who="ann"))


async def test_only_production_by_weights_of_this_run_that_are_not_too_old(shop: Shop, tmp_path: Path) -> None:
    limit = {"staleness": 2}
    async with learner(shop, tmp_path / "follows", rollouts=limit) as run:
        await run.traffic.begin(0)
        await shop.busy("base-1", "base-2")
        for version in ("other.3", "run.2", "run.3"):
            await production_gets(shop, version)
            await shop.busy(f"{version}-1", f"{version}-2")
        await shop.serve("training", mode="train")
        await shop.reward("training", 1.0)
        found = await run.step(1, version=4)
        assert run.of(1) == ["run.2-1", "run.2-2", "run.3-1", "run.3-2"]
        assert found.figures == {"left_out/other_version": 2.0, "left_out/stale": 2.0}
        (told,) = run.told
        assert re.search(r"rollout other\.3-\d, .* neither made nor begun from", told)
        assert {run.traffic.age(sample.segments[0].version, 4) for sample in found.samples} == {1, 2}
    # One that comes later does not even look at what is older than the oldest version that counts.
    async with learner(shop, tmp_path / "later", rollouts=limit) as later:
        found = await later.step(1, version=4)
        assert (later.of(1), found.figures) == (run.of(1), {})
    # Another run that goes on from what one has made begins with what is served by it.
    begun = {"path": tmp_path, "adapter": Path("/adapters/run.3")}
    async with learner(
        shop, tmp_path / "next", run={"name": "next"}, model=begun, online={"batch_rollouts": 2}
    ) as other:
        await other.step(1, version=0)
        assert other.of(1) == ["run.3-1", "run.3-2"]


async def test_the_filter_says_who_is_learnt_from(shop: Shop, tmp_path: Path) -> None:
    async with learner(shop, tmp_path, online={"filter": "rollout:vip-*", "batch_rollouts": 2}) as run:
        first = asyncio.ensure_future(run.step(1))
        # What has never asked for the model is nobody's business either.
        await replace(shop, model="base").busy("vip-0")
        await shop.busy("r1", "vip-1", "r2", "vip-2", rewards=(0.0, 0.0, 1.0, 1.0))
        found = await first
        assert (run.of(1), found.figures, run.told) == (["vip-1", "vip-2"], {}, [])
    async with learner(shop, tmp_path / "wrong", online={"filter": "agnt:planner"}) as run:
        with pytest.raises(ConfigError, match=r"online\.filter: .*unknown field 'agnt'; did you mean 'agent'"):
            await run.step(1)


async def test_groups_of_the_queue_are_compared_where_it_is_told_so(shop: Shop, tmp_path: Path) -> None:
    async def begun(name: str, group: str | None) -> Claim:
        await shop.client.enqueue([RolloutSpec(id=name, group=group, mode="online", input=1)])
        (claim,) = (await shop.client.claim(ClaimRequest(worker="w", modes=["online"]))).claims
        url = f"{shop.gateway.url}{claim.address}{CHAT}"
        async with shop.http.post(url, json={"model": "policy", "messages": []}) as answer:
            assert answer.status == 200
        return claim

    async def done(name: str, value: float, group: str | None) -> None:
        await finish(shop.client, await begun(name, group), value)

    async with learner(
        shop, tmp_path, online={"batch_rollouts": 2}, advantage={"estimator": "dr_grpo"}, rollouts={"group_size": 2}
    ) as run:
        first = asyncio.ensure_future(run.step(1))
        await shop.busy("alone-1", "alone-2")
        # Judged, and not over.
        running = await begun("running", "good")
        await shop.client.reward("running", running.attempt.id, Judgement(value=0.5, source="judge"))
        for place, group in enumerate(["same", "same", "half", "good", None, "good"]):
            await done(f"q{place}", float(place > 4) if group == "good" else 0.5, group)
        found = await first
        assert run.of(1) == ["q3", "q5"]
        assert found.rewards == {"good": [0.0, 1.0]}
        assert any(tells(text, "no group", "advantage.estimator") for text in run.told)
        await done("q6", 0.9, "good")
        await finish(shop.client, running)
        found = await run.step(2)
        assert (sorted(run.of(2)), found.figures) == (["q6", "running"], {})


async def test_what_cannot_be_trained_on_is_said_once(
    start_gateway: StartGateway, vllm: FakeEngine, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    gateway = await start_gateway(vllms(vllm.openai_url, train="false"))
    async with Client(gateway.url) as client:
        publisher = Publisher(client, "policy", "vllm", "base", "run")
        await publisher.begin()
        shop = Shop(gateway, http, client)
        await shop.busy(*names(0, 1, 2, 3))
        async with learner(shop, tmp_path) as run:
            await run.traffic.begin(0)
            # Not again for the others.
            (told,) = await run.traffic.inspect_quiet()
            assert re.search(r"others like it: no_token_ids; penstock doctor r\d ", told)
            assert await run.traffic.take(1, 0) is None
