"""A run that trains all weights, on two scripted servers that it starts itself: it goes on after `kill -9` as if
nothing had been, each server with what it had, and leaves no more directories than it must.

What a server answers follows from its version and the question, so what a run has learnt can be held against another's.
"""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.lives import Life, begun
from fakes.ports import steady_ports
from fakes.process import Gateway, running
from fakes.tiny_model import make_model
from fakes.vllm_process import install

from penstock.gateway.client.client import Client
from penstock.gateway.model.resource import Need

pytestmark = pytest.mark.timeout(600)

STEPS, GROUPS, SIZE, KEEP = 4, 2, 3, 2
LEARNT = ("reward", "loss", "grad_norm", "tokens", "samples", "ratio", "mismatch_max", "staleness/max", "updates")
"""Metrics that follow from what the rollouts said and from the weights, and from nothing else."""
UPSTREAMS = ("vllm", "vllm-2")
GATEWAY = """
[[upstream]]
name = "vllm"
base_url = "http://127.0.0.1:{ports[0]}/v1"

[[upstream]]
name = "vllm-2"
base_url = "http://127.0.0.1:{ports[1]}/v1"

[[route]]
model = "policy"
upstream = "vllm"
train = true
"""
TRAIN = """
[run]
name = "run"
directory = "{home}/run"
steps = {steps}
checkpoint_every = 2

[model]
path = "{model}"
weights = "full"

[rollouts]
tasks = "{home}/tasks.jsonl"
groups = {groups}
group_size = {size}
ahead = {ahead}
run = ["--lease=60s", "--workers=6", "--callable=fakes.asking:agent", "--preload", "--reward=fakes.asking:reward"]

[optimiser]
learning_rate = 0.01

[engine]
batch_tokens = 64

[inference]
python = "{python}"
port = {ports[0]}
flags = ["--hold={home}/hold"]

[publish]
keep = {keep}
"""


@dataclass(slots=True)
class Stage:
    """A run's surroundings."""

    home: Path
    gateway: Gateway
    ports: list[int]

    def life(self) -> AbstractAsyncContextManager[Life]:
        """The same command, given once more."""
        return begun(self.home / "train.toml", self.gateway.url)

    @property
    def client(self) -> Client:
        return Client(self.gateway.url)

    async def waits(self, version: int) -> None:
        """Until every agent of a step waits for the version that does not answer."""
        url = f"http://127.0.0.1:{self.ports[version % 2]}/held/{GROUPS * SIZE}"
        async with aiohttp.ClientSession() as http:
            answered = False
            while not answered:
                # It may be starting.
                with suppress(aiohttp.ClientError):
                    async with http.get(url) as answer:
                        answered = answer.status == 200

    async def learnt(self) -> list[dict[str, float | None]]:
        """What every step came to."""
        async with self.client as client:
            points = [point.values async for point in client.points("run") if point.step]
        return [{name: values[name] for name in LEARNT} for values in points]

    async def served(self) -> dict[int, set[tuple[str, str | None]]]:
        """Versions of each step's calls, and the upstreams that answered them."""
        found: defaultdict[int, set[tuple[str, str | None]]] = defaultdict(set)
        async with self.client as client:
            async for span in client.recent_spans("kind:llm status:ok"):
                step = ((await client.rollout(span.rollout)).metadata or {})["penstock.step"]
                assert span.versions is not None
                found[int(str(step))].add((span.versions["policy"], span.upstream))
        return found

    @property
    def directories(self) -> list[str]:
        """Versions that lie on the disk."""
        return sorted(path.name for path in (self.home / "run" / "models").iterdir())


@asynccontextmanager
async def staged(home: Path, model: Path, ahead: bool = False) -> AsyncGenerator[Stage]:
    ports = steady_ports(2)
    (home / "tasks.jsonl").write_text("".join(json.dumps({"question": f"q{n}"}) + "\n" for n in range(4)))
    words = {"home": home, "model": model, "python": install(home), "ports": ports, "ahead": str(ahead).lower()}
    (home / "train.toml").write_text(TRAIN.format(**words, steps=STEPS, groups=GROUPS, size=SIZE, keep=KEEP))
    async with running(home / "gateway", GATEWAY.format(ports=ports)) as gateway:
        yield Stage(home, gateway, ports)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_model(tmp_path_factory.mktemp("model"))
    (made / "tokenizer.json").write_text("{}")
    (made / "model.safetensors.index.json").write_text("{}")
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[dict[str, float | None]]:
    """What a run comes to that nothing happens to."""
    async with staged(tmp_path_factory.mktemp("whole"), model) as stage:
        async with stage.life() as life:
            assert await life.ended() == 0
        found = await stage.learnt()
        # No step mixes versions, and servers take turns.
        assert await stage.served() == {
            step: {(f"run.{step - 1}", UPSTREAMS[(step - 1) % 2])} for step in range(1, STEPS + 1)
        }
        # What training gets is needed, the others are among the newest.
        assert stage.directories == [f"run.{STEPS - 1}", f"run.{STEPS}"]
        # All that a server needs, and nothing of the weights that it began with.
        names = {path.name for path in (stage.home / "run" / "models" / f"run.{STEPS}").iterdir()}
        assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert len(found) == STEPS
    assert all(step["loss"] and step["updates"] and step["staleness/max"] == 0 for step in found)
    return found


async def test_a_trainer_that_is_killed_goes_on_where_it_was(
    tmp_path: Path, model: Path, whole: list[dict[str, float | None]]
) -> None:
    async with staged(tmp_path, model) as stage:
        hold = stage.home / "hold"
        # In step 4 the newest checkpoint is that of step 2; the version of step 3 is what training gets.
        hold.write_text("policy@run.3")
        async with stage.life() as life:
            await stage.waits(3)
            life.signal(signal.SIGKILL)
            assert await life.ended() == -signal.SIGKILL
        hold.unlink()
        async with stage.life() as life:
            assert await life.ended() == 0
        assert await stage.learnt() == whole
        served = await stage.served()
        # Agents have asked again and were answered by the same weights, although the trainer was two steps back.
        assert served[4] == {("run.3", "vllm-2")}
        assert stage.directories == ["run.3", "run.4"]


async def test_with_the_next_step_ahead_two_versions_are_enough(tmp_path: Path, model: Path) -> None:
    async with staged(tmp_path, model, ahead=True) as stage:
        async with stage.life() as life:
            assert await life.ended() == 0
        learnt = await stage.learnt()
        assert [step["updates"] for step in learnt] == [1.0] * STEPS
        assert max(step["staleness/max"] or 0 for step in learnt) <= 1
        for step, found in (await stage.served()).items():
            allowed = {max(0, step - 2), step - 1}
            assert found <= {(f"run.{version}", UPSTREAMS[version % 2]) for version in allowed}
        async with stage.client as client:
            needs = await client.needed_versions("policy")
        assert [need for need in needs if need.rollouts] == list[Need]()
