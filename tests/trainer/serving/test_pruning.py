"""Directories of old versions go, and none that a release or a rollout may need. Against a real gateway."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from fakes.engine import FakeEngine
from fakes.experiment import Traffic, policy
from fakes.process import Gateway
from fakes.workers import finish

from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ClientError
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import ClaimRequest, RolloutSpec
from penstock.gateway.model.resource import Audience, Need, NewVersion
from penstock.trainer.serving.publisher import Publisher, prune, step_of

TRAINING = Audience(modes=["train", "val", "test"])
ONLINE = Audience(modes=["online"])
ANN = ActionRequest(who="ann")


@pytest.fixture
def traffic(served: Gateway, http: aiohttp.ClientSession, client: Client) -> Traffic:
    return Traffic(served.url, http, client, model="policy")


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    return tmp_path / "adapters"


def make(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).mkdir(parents=True)
        (directory / name / "weights").write_text(name)


def there(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_what_is_needed_stays_and_what_is_not_goes(
    traffic: Traffic, client: Client, vllm: FakeEngine, adapters: Path
) -> None:
    publisher = Publisher(client, "policy", "fake-openai", "base", "run")
    await publisher.begin()
    names = [f"run.{step}" for step in range(12)]
    make(adapters, *names, "other.1", "run.x")

    async def train_on(name: str) -> None:
        await publisher.register(name, adapters / name, None, "")
        await publisher.train_on(name)

    # 0 is production's, 1 is tried on it, 2 a rollout has, 3 another model, 4 a rollout had, 11 is training's.
    await train_on("run.0")
    release = await traffic.start("policy", "run.0", policy(0.5, checked="required"), only=ONLINE)
    await client.decide(release.id, "promote", ANN)
    await train_on("run.1")
    tried = await traffic.start("policy", "run.1", policy(0.5, checked="required"), only=ONLINE)
    for number in (2, 4):
        await train_on(f"run.{number}")
        await client.enqueue([RolloutSpec(id=f"r{number}", mode="train")])
        (claim,) = (await client.claim(ClaimRequest(worker="w", wait_s=20))).claims
        await traffic.call(f"r{number}")
    await finish(client, claim)
    content = {"upstream": "fake-openai", "base": "base", "adapter": str(adapters / "run.3")}
    await client.add_version("second", NewVersion(kind="model", content=content))
    await train_on("run.11")
    assert traffic.failures == []

    needs = {need.version: need for need in await client.needed_versions("policy")}
    assert needs == {
        "base": Need(version="base", audiences=[Audience()]),
        "run.0": Need(version="run.0", audiences=[ONLINE], releases=[tried.id]),
        "run.1": Need(version="run.1", releases=[tried.id]),
        "run.2": Need(version="run.2", rollouts=["r2"]),
        "run.11": Need(version="run.11", audiences=[TRAINING]),
    }
    with pytest.raises(ClientError, match="there is no resource 'poilcy'"):
        await client.needed_versions("poilcy")

    gone = await prune(client, adapters, "run", 2)
    assert gone == [f"run.{step}" for step in range(4, 10)]
    kept = [f"run.{step}" for step in (0, 1, 2, 3, 10, 11)]
    assert there(adapters) == sorted([*kept, "other.1", "run.x"])
    assert await prune(client, adapters, "run", 2) == []

    # What is gone can be released to nobody, and says why.
    vllm.files = {str(adapters / name) for name in there(adapters)}
    await client.decide(tried.id, "abort", ANN)
    await publisher.register("run.5", adapters / "run.5", None, "")
    late = await publisher.release("run.5", policy(0.5, checked="required"))
    ended = await traffic.when(late.id, lambda view: not view.release.live)
    assert ended.release.stage == "rolled_back"
    assert f"would not load adapter 'policy@run.5' from {adapters / 'run.5'}" in ended.release.reason
    assert "the path must exist on the server" in ended.release.reason


async def test_what_an_earlier_life_began_to_remove_goes_too(client: Client, adapters: Path) -> None:
    make(adapters, *(f"run.{step}" for step in range(3)), ".run.9.gone")
    assert await prune(client, adapters, "run", 3) == []
    assert await prune(client, adapters / "nothing", "run", 1) == []
    assert await prune(client, adapters, "run", 1) == ["run.0", "run.1"]
    assert there(adapters) == ["run.2"]


def test_steps_are_those_of_the_run_and_are_ordered_as_numbers() -> None:
    found = [step_of("my.run", name) for name in ("my.run.10", "my.run.9", "run.1", "my.run.x", "my.run.", "base")]
    assert found == [10, 9, None, None, None, None]
