"""All weights on two servers that take turns: who needs a version keeps it, and a name never stands for other weights.

Real are the gateway and the processes that the trainer starts; what answers in them is scripted, by the name it was
started with.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

from fakes.engine import engine
from fakes.experiment import Traffic, policy
from fakes.ports import steady_ports
from fakes.process import Gateway, child, running, vllms
from fakes.staging import address
from fakes.vllm_process import install
from fakes.waiting import until
from fakes.workers import beside, finish

from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import Claim, ClaimRequest, RolloutSpec
from penstock.gateway.model.release import NewRelease, ReleaseView
from penstock.gateway.model.resource import Audience, Need
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import TrainConfig, check_full
from penstock.trainer.runs.supervision import RetryClient
from penstock.trainer.serving import vllm
from penstock.trainer.serving.publisher import Publisher, PublishError
from penstock.trainer.serving.vllm import Replicas, replicas_of

ONLINE = Audience(modes=["online"])
ANN = ActionRequest(who="ann")


class Asking(RetryClient):
    """Tells when it has asked what is needed."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.looked = asyncio.Event()

    async def needed_versions(self, name: str) -> list[Need]:
        found = await super().needed_versions(name)
        self.looked.set()
        return found


class Stage:
    """A run's versions between a gateway and two servers."""

    def __init__(self, home: Path, gateway: Gateway, client: Asking, ports: list[int], http: aiohttp.ClientSession):
        self.home, self.gateway, self.client, self.ports, self.http = home, gateway, client, ports, http
        self.said: list[str] = []
        self.traffic = Traffic(gateway.url, http, client, model="policy")
        self.publisher = Publisher(client, "policy", "vllm", "base", "run")

    def replicas(self, timeout: float = 60.0, **more: Any) -> Replicas:
        """A life's."""
        wanted = {"python": install(self.home), "port": self.ports[0]}
        tree: dict[str, Any] = {
            "run": {"name": "run", "directory": self.home},
            "model": {"path": self.home, "weights": "full"},
            "rollouts": {"timeout": timeout},
            "inference": wanted | {"flags": [f"--hold={self.home}/hold"]} | more,
        }
        config = TrainConfig.model_validate(tree)
        python = config.inference.python
        assert python is not None
        return replicas_of(config, self.client, self.say, python, cpu=True)

    async def say(self, text: str) -> None:
        self.said.append(text)

    async def publish(self, replicas: Replicas, step: int) -> str:
        """A step's version, as the loop does it; the upstream that serves it."""
        version = f"run.{step}"
        directory = self.home / "models" / version
        await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
        await self.publisher.begin()
        upstream = await replicas.serve(version, directory)
        await self.publisher.register_replica(version, upstream, None, "")
        await self.publisher.train_on(version)
        return upstream

    async def claim(self, rollout: str, mode: Any = "train") -> Claim:
        """A rollout in a worker's hands."""
        await self.client.enqueue([RolloutSpec(id=rollout, mode=mode)])
        (claim,) = (await self.client.claim(ClaimRequest(worker="w", wait_s=20))).claims
        return claim

    async def call(self, claim: Claim) -> str:
        """What the model says to it."""
        return await self.post(f"{self.gateway.url}{claim.address}/v1/chat/completions", "policy")

    async def post(self, url: str, model: str) -> str:
        body = {"model": model, "messages": [{"role": "user", "content": "who are you?"}]}
        async with self.http.post(url, json=body) as answer:
            if answer.status != 200:
                return str(answer.status)
            return (await answer.json())["choices"][0]["message"]["content"]

    def process(self, place: int) -> int:
        """A server."""
        return child(os.getpid(), f"--port={self.ports[place]}\0".encode())

    async def direct(self, place: int, version: str) -> str:
        """What a server says to a version's name."""
        url = f"{address(self.ports[place])}/chat/completions"
        return await self.post(url, f"policy@{version}")


@pytest.fixture
async def stage(tmp_path: Path, http: aiohttp.ClientSession) -> AsyncGenerator[Stage]:
    ports = steady_ports(2)
    async with (
        running(tmp_path / "gateway", vllms(*map(address, ports), train=None)) as gateway,
        Asking(gateway.url) as client,
    ):
        yield Stage(tmp_path, gateway, client, ports, http)


@asynccontextmanager
async def life(replicas: Replicas) -> AsyncGenerator[Replicas]:
    """They run, and are looked after."""
    try:
        await replicas.ready()
        async with beside(replicas.run()):
            yield replicas
    finally:
        await replicas.stop()


def over(view: ReleaseView) -> bool:
    return not view.release.live


@pytest.mark.slow
async def test_versions_take_turns_and_a_name_stands_for_no_other_weights(stage: Stage) -> None:
    async with life(stage.replicas()) as replicas:
        for step, place in enumerate((0, 1, 0, 1)):
            assert await stage.publish(replicas, step) == ("vllm", "vllm-2")[place]
            claim = await stage.claim(f"r{step}")
            assert await stage.call(claim) == f"I am policy@run.{step}."
            await finish(stage.client, claim)
            if step > 1:
                # Those that are gone are nobody's.
                assert await stage.direct(place, f"run.{step - 2}") == "404"
                assert await stage.direct(1 - place, f"run.{step - 1}") == f"I am policy@run.{step - 1}."
        # Said again, as after a crash, nothing happens.
        assert [await stage.publisher.is_published(step) for step in (2, 3, 4)] == [True, True, False]
        # A version that is gone can be released to nobody: its server serves another one, or there is none.
        said = "would not answer as 'policy@run.0': The model `policy@run.0` does not exist."
        assert said in await refused(stage, "run.0")
    _ = await refused(stage, "run.1")


async def refused(stage: Stage, version: str) -> str:
    """Why a release of this version was rolled back."""
    new = NewRelease(candidate=version, only=ONLINE, policy=policy(0.5, checked="required"))
    release = await stage.client.start_release("policy", new)
    found = (await stage.traffic.when(release.id, over)).release
    assert found.stage == "rolled_back"
    return found.reason


@pytest.mark.slow
async def test_a_rollout_keeps_its_version_until_it_ends(stage: Stage) -> None:
    async with life(stage.replicas()) as replicas:
        await stage.publish(replicas, 0)
        old = await stage.claim("old")
        assert await stage.call(old) == "I am policy@run.0."
        await stage.publish(replicas, 1)
        stage.client.looked.clear()
        third = asyncio.ensure_future(stage.publish(replicas, 2))
        # It has looked, and waits.
        await stage.client.looked.wait()
        new = await stage.claim("new")
        assert [await stage.call(old), await stage.call(new)] == ["I am policy@run.0.", "I am policy@run.1."]
        assert not third.done()
        await finish(stage.client, old)
        assert await third == "vllm"
        assert await stage.call(new) == "I am policy@run.1."


@pytest.mark.slow
async def test_a_rollout_that_does_not_end_is_named(stage: Stage) -> None:
    async with life(stage.replicas(timeout=0.01)) as replicas:
        await stage.publish(replicas, 0)
        old = await stage.claim("old")
        await stage.call(old)
        await stage.publish(replicas, 1)
        with pytest.raises(
            PublishError, match=r"'vllm' serves policy@run\.0, and after 0\.01 s .* still call: old; end"
        ):
            await stage.publish(replicas, 2)
        assert await stage.call(old) == "I am policy@run.0."


@pytest.mark.slow
async def test_production_never_loses_its_server(stage: Stage) -> None:
    async with life(stage.replicas()) as replicas:
        await stage.publish(replicas, 0)
        release = await stage.traffic.start("policy", "run.0", policy(0.5, checked="required"), only=ONLINE)
        await stage.publish(replicas, 1)
        with pytest.raises(PublishError, match=rf"'vllm' serves policy@run\.0, which release {release.id} tries: "):
            await stage.publish(replicas, 2)
        await stage.client.decide(release.id, "promote", ANN)
        with pytest.raises(
            PublishError, match=r"which is stable for modes=\['online'\]: release what a server of prod"
        ):
            await stage.publish(replicas, 2)
        customer = f"{stage.gateway.url}/rollout/customer/v1/chat/completions"
        assert await stage.post(customer, "policy") == "I am policy@run.0."


@pytest.mark.slow
async def test_another_life_starts_what_calls_may_ask_for(stage: Stage) -> None:
    async with life(stage.replicas()) as replicas:
        for step in range(2):
            await stage.publish(replicas, step)
        old = await stage.claim("old")
        assert await stage.call(old) == "I am policy@run.1."
        await stage.publish(replicas, 2)
    async with life(stage.replicas()) as replicas:
        new = await stage.claim("new")
        assert [await stage.call(old), await stage.call(new)] == ["I am policy@run.1.", "I am policy@run.2."]
        # They take turns as before.
        await finish(stage.client, old)
        assert await stage.publish(replicas, 3) == "vllm-2"
    await asyncio.to_thread((stage.home / "models" / "run.3").rmdir)
    with pytest.raises(
        PublishError, match=r"policy@run\.3 is what calls may ask upstream 'vllm-2' for, and .*run\.3 is"
    ):
        async with life(stage.replicas()):
            pass


@pytest.mark.slow
async def test_a_server_that_dies_starts_again_with_what_it_had(stage: Stage) -> None:
    async with life(stage.replicas()) as replicas:
        for step in range(3):
            await stage.publish(replicas, step)
        os.kill(stage.process(0), signal.SIGKILL)

        async def serves() -> bool:
            try:
                return await stage.direct(0, "run.2") == "I am policy@run.2."
            except aiohttp.ClientError:
                return False

        await until(serves)
        assert stage.said == ["vLLM ended with -9 and is started again; calls to it wait"]
        assert await stage.call(await stage.claim("r")) == "I am policy@run.2."
        assert await stage.publish(replicas, 3) == "vllm-2"


@pytest.mark.slow
async def test_a_port_that_an_earlier_life_has_not_left_yet_is_waited_for(stage: Stage) -> None:
    async with life(stage.replicas()) as replicas:
        async with engine(stage.ports[0]) as dying:
            publishing = asyncio.ensure_future(stage.publish(replicas, 0))
            await dying.until("/health", 2)
        assert await publishing == "vllm"


@pytest.mark.slow
async def test_a_port_that_somebody_else_has_is_named(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "STOP_S", 0.5)
    async with engine(stage.ports[0]), life(stage.replicas()) as replicas:
        with pytest.raises(vllm.InferenceError, match=rf":{stage.ports[0]}/v1 answers already: stop what serves"):
            await stage.publish(replicas, 0)


@pytest.mark.slow
async def test_an_upstream_that_the_gateway_does_not_know_is_named_at_once(stage: Stage) -> None:
    with pytest.raises(ConfigError, match=r"inference\.upstream: the gateway has no .* 'b'; it has .*vllm, vllm-2"):
        await stage.replicas(upstream="b").ready()
    with pytest.raises(ConfigError, match=r"inference\.upstream: the gateway has no .* 'vllm-2-2'; it has"):
        await stage.replicas(upstream="vllm-2").ready()


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"inference": {"urls": ["http://gpu:8000/v1"]}}, r"inference\.urls: what others have started"),
        ({"publish": {"release": "auto"}}, r"publish\.release: all weights need a server of their own"),
    ],
)
def test_what_cannot_be_served_is_refused(sections: dict[str, Any], problem: str) -> None:
    check_full(TrainConfig.model_validate({"model": {"path": Path("m")}} | sections))
    with pytest.raises(ConfigError, match=problem):
        check_full(TrainConfig.model_validate({"model": {"path": Path("m"), "weights": "full"}} | sections))
