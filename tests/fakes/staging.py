"""A whole training run and what it needs around it: tasks, a `train.toml`, a gateway, and vLLMs that it starts itself,
scripted unless it is told otherwise.

    async with staged(home, model, 3, {"engine": {"batch_tokens": 64}}) as stage:
        stage.hold(1)                       # this version does not answer
        async with stage.life() as life:    # the same command may be given again and again
            await stage.in_step(life, 2)
            await life.kill()

What a scripted vLLM answers follows from the version and the question, so what a run has learnt can be held against
another's, number by number.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from fakes.lives import Life, begun
from fakes.ports import steady_ports
from fakes.process import PATHS, Gateway, running, vllms
from fakes.settings import Sections, merged, toml
from fakes.vllm_process import install

from penstock.gateway.client.client import Client

GROUPS, SIZE = 2, 3
AGENT = ["--callable=fakes.asking:agent", "--preload", "--reward=fakes.asking:reward"]
RUNNER = ["--workers=6", *AGENT]
LEARNT = ("reward", "loss", "entropy", "grad_norm", "tokens", "samples", "ratio", "mismatch_k1", "mismatch_max")
"""Metrics that follow from what the rollouts said and from the weights, and from nothing else."""
Learnt = list[dict[str, float | None]]
Served = dict[tuple[str, int], set[tuple[str, str | None]]]


@dataclass(slots=True)
class Stage:
    """A run's surroundings."""

    home: Path
    gateway: Gateway
    ports: list[int]
    steps: int
    flags: Sequence[str] = ()

    def life(self, own_runner: bool = False) -> AbstractAsyncContextManager[Life]:
        """The same command, given once more."""
        return begun(self.home / "train.toml", self.gateway.url, *self.flags, own_runner=own_runner)

    async def to_the_end(self) -> None:
        """A life that nothing happens to."""
        async with self.life() as life:
            assert await life.ended() == 0

    @property
    def client(self) -> Client:
        return Client(self.gateway.url)

    def hold(self, version: int, word: str = "") -> None:
        """From now on this version does not answer questions that have this word in them."""
        (self.home / "hold").write_text(f"policy@run.{version} {word}".rstrip())

    def let_go(self) -> None:
        """It does again."""
        (self.home / "hold").unlink()

    async def in_step(self, life: Life, step: int) -> None:
        """Until every agent of a step waits for the version that does not answer."""
        await life.said(rf"^step {step - 1}/{self.steps} ")
        await self.waits(step - 1)

    async def waits(self, version: int = 0, agents: int = GROUPS * SIZE) -> None:
        """Until so many agents wait at the server of this version: every one of a step, where nothing is given."""
        port = self.ports[version % len(self.ports)]
        async with aiohttp.ClientSession() as http:
            while True:
                with suppress(aiohttp.ClientError):
                    async with http.get(f"http://127.0.0.1:{port}/held/{agents}") as answer:
                        assert answer.status == 200
                        return
                # It is being started.
                await asyncio.sleep(0.05)

    async def learnt(self, metrics: Sequence[str] = LEARNT) -> Learnt:
        """What every step came to."""
        async with self.client as client:
            return await learnt(client, metrics)


@asynccontextmanager
async def staged(
    home: Path, model: Path, steps: int, sections: Sections, servers: int = 1, train: str | None = "true"
) -> AsyncGenerator[Stage]:
    """A run of this model that may begin, with these settings beside those of `settings`. `train`: what the gateway's
    route of the model says of training; None: there is no such route."""
    ports = steady_ports(servers)
    write_tasks(home, *(f"q{number}" for number in range(4)))
    (home / "train.toml").write_text(toml(merged(settings(home, model, ports, steps), sections)))
    async with running(home / "gateway", vllms(*map(address, ports), train=train)) as gateway:
        yield Stage(home, gateway, ports, steps)


def settings(home: Path, model: Path, ports: Sequence[int], steps: int) -> Sections:
    """What a short run has in common with all others: groups, agents, and a scripted vLLM."""
    return {
        "run": {"name": "run", "directory": home / "run", "steps": steps},
        "model": {"path": model},
        "rollouts": {"tasks": home / "tasks.jsonl", "groups": GROUPS, "group_size": SIZE, "run": RUNNER},
        "optimiser": {"learning_rate": 0.01},
        "inference": {"python": install(home), "port": ports[0], "flags": [f"--hold={home}/hold"]},
    }


def write_tasks(home: Path, *questions: str, name: str = "tasks") -> None:
    """A file of tasks."""
    (home / f"{name}.jsonl").write_text("".join(json.dumps({"question": one}) + "\n" for one in questions))


def address(port: int) -> str:
    """The base URL of a vLLM on this machine."""
    return f"http://127.0.0.1:{port}/v1"


async def trained(home: Path, gateway: str, **env: str) -> None:
    """The whole run, in a process that is forked from no other."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "train", "grpo", str(home / "train.toml"), "--gateway", gateway),
        env=os.environ | {"PYTHONPATH": PATHS} | env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def learnt(client: Client, metrics: Sequence[str] = LEARNT) -> Learnt:
    """What every step of the run came to."""
    return [{name: point.values[name] for name in metrics} async for point in client.points("run") if point.step]


async def served(client: Client, calls: str) -> Served:
    """Versions that answered these calls, and their upstreams, by mode and step."""
    found: defaultdict[tuple[str, int], set[tuple[str, str | None]]] = defaultdict(set)
    async for span in client.recent_spans(calls):
        rollout = await client.rollout(span.rollout)
        assert span.versions is not None
        step = int(str((rollout.metadata or {})["penstock.step"]))
        found[rollout.mode, step].add((span.versions["policy"], span.upstream))
    return found
