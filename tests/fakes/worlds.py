"""Worlds in which the blocks of the documentation are run: a folder, a terminal in it, models, and mostly a gateway.

The folder has what the pages speak of (`tests/docs/stubs`): an agent, a grader, tasks, prompts, a policy. The models
are a scripted provider and a scripted vLLM. A world is named by what has happened in it:

    checkout    no gateway and no models, only the examples, as in a fresh checkout
    bare        no gateway; `penstock serve` finds a configuration in the folder, with the models in it
    new         a gateway
    worked      agents were at work: 24 rollouts of an agent `planner`, `r1`, and `q1.0` to `q2.1` from a queue
    versions    and the prompt `planner` has the versions v1, which agents send, and v2
    canary      and a release of v2 is in its canary, in which rollouts take part
    weights     the model `policy` has the version v11 on the upstream `vllm`, and rollouts that used it are judged
    reported    a trainer has reported the runs `grpo-6` and `grpo-7`

Ports are free ones: what a page says of port 4747 (the gateway) and 8000 (a model) is rewritten before it is run.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import aiohttp
from fakes.engine import FakeEngine, engine
from fakes.experiment import policy, prompt
from fakes.preloaded import door
from fakes.process import ROOT, running, upstreams
from fakes.provider import Provider, serving
from fakes.terminal import Printed, Terminal, terminal
from fakes.waiting import until

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.queue import Claim, ClaimRequest, FinishRequest, RolloutSpec
from penstock.gateway.model.release import NewRelease
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.model.run import NewRun, Point, RunEnd, RunEvent
from penstock.gateway.model.state import SqlRequest

STUBS = ROOT / "tests" / "docs" / "stubs"
BASE = "Qwen/Qwen3-8B"
COLUMNS = 100
"""Width of the terminal, in which the outputs on the pages were made too."""
PLANNERS = 24
"""A prompt is discovered from 20 rollouts on."""
CUSTOMERS = ("Ann", "Bob", "Cleo")
SLOTS = {"customer": "Ann", "date": "Tuesday"}
TASKS = {"q1": "Where is the luggage?", "q2": "When does it leave?"}


class Follower(NamedTuple):
    """A command that goes on until it is stopped."""

    pattern: str
    """How its statement begins."""
    awaited: str
    """What it prints when it has done what it should; its group, if it has one, is the port that it has taken."""
    port: int | None = None
    """Its port as pages write it."""


FOLLOWERS = (
    Follower(r"penstock serve\b", r"listening on http://127\.0\.0\.1:(\d+)", 4747),
    Follower(r"python (?:\S*/)?model\.py\b", r"http://127\.0\.0\.1:(\d+)", 8000),
    Follower(r"penstock changes\b", r"rollout"),
    Follower(r"penstock release watch\b", r"→ replayed|\bcanary\b"),
    Follower(r"penstock runs watch\b", r"\breward\b"),
)


@dataclass(slots=True)
class World:
    """A terminal, and what can be reached from it."""

    folder: Path
    terminal: Terminal
    ports: dict[int, int] = field(default_factory=dict[int, int])
    """What is listened on, by what pages write."""

    async def run(self, statement: str) -> str:
        """A command of a page; what it printed, with the ports of the page. One that fails fails the test."""
        made = self._here(statement)
        found = next((one for one in FOLLOWERS if re.match(rf"(\w+=\S*\s+)*{one.pattern}", made)), None)
        if found is not None:
            return await self._follow(made, found)
        done = await self.terminal.run(made)
        assert done.code == 0, failed(made, done)
        return self._there(done.out)

    async def _follow(self, statement: str, how: Follower) -> str:
        if how.port is not None:
            statement = re.sub(how.pattern, lambda found: f"{found[0]} --port 0", statement, count=1)
        printed = await self.terminal.follow(statement, how.awaited)
        if how.port is not None:
            found = re.search(how.awaited, printed)
            assert found is not None
            await self.reach(how.port, int(found[1]))
        return self._there(printed)

    async def reach(self, written: int, port: int) -> None:
        """Someone listens on a port that pages write otherwise."""
        self.ports[written] = port
        if written == 4747:
            _ = await self.terminal.run(f"export PENSTOCK_GATEWAY=http://127.0.0.1:{port}")

    def _here(self, text: str) -> str:
        for written, port in self.ports.items():
            text = re.sub(rf"(127\.0\.0\.1|localhost):{written}\b", f"127.0.0.1:{port}", text)
        return text

    def _there(self, text: str) -> str:
        for written, port in self.ports.items():
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{written}")
        return text


def failed(statement: str, done: Printed) -> str:
    """What is said of a command that failed."""
    return f"exit code {done.code} of: {statement}\n{done.out}{done.err}"


@dataclass(slots=True)
class Before:
    """What prepares a world before anybody reads on."""

    client: Client
    http: aiohttp.ClientSession
    url: str
    template: str

    async def call(
        self, address: str, question: str, slots: Mapping[str, str] = SLOTS, key: str = "none", turns: int = 1
    ) -> None:
        """An agent's calls."""
        talk = [{"role": "system", "content": self.template.format_map(slots)}]
        for turn in range(turns):
            talk.append({"role": "user", "content": "Thank you." if turn else question})
            asked = {"model": "policy", "messages": talk}
            headers = {"Authorization": f"Bearer {key}"}
            async with self.http.post(
                f"{self.url}{address}/v1/chat/completions", json=asked, headers=headers
            ) as answer:
                assert answer.status == 200, await answer.text()
                talk.append((await answer.json())["choices"][0]["message"])


async def work(before: Before) -> None:
    """Agents were at work: `worked`."""
    for number in range(PLANNERS):
        slots = {"customer": CUSTOMERS[number % 3], "date": f"{number % 27 + 1} May"}
        await before.call(f"/rollout/p{number}/attempt/a1/agent/planner", f"Book flight {number}.", slots)
    await before.call("/rollout/r1/attempt/a1", "Where is my seat?", turns=2)
    specs = [
        RolloutSpec(id=f"{name}.{at}", group=name, input={"id": name, "question": text}, metadata={"run": 7})
        for name, text in TASKS.items()
        for at in range(2)
    ]
    _ = await before.client.enqueue(specs)
    claims = (await before.client.claim(ClaimRequest(worker="gpu-1", limit=len(specs)))).claims
    assert len(claims) == len(specs)
    for claim in claims:
        await attempt(before, claim)


async def attempt(before: Before, claim: Claim) -> None:
    """A task from the queue is done and judged."""
    rollout, one = claim.rollout.id, claim.attempt.id
    asked = claim.rollout.input["question"]
    await before.call(claim.address, asked, key=claim.token, turns=2)
    value = 1.0 if rollout.endswith(".0") else 0.25
    _ = await before.client.reward(rollout, one, Judgement(value=value))
    _ = await before.client.finish(rollout, one, FinishRequest(worker="gpu-1", status="succeeded"))


async def register(before: Before) -> None:
    """A prompt has two versions: `versions`."""
    _ = await before.client.add_version("planner", prompt(before.template, sent=True))
    _ = await before.client.add_version("planner", prompt((STUBS / "better.txt").read_text()))


async def begin(before: Before) -> None:
    """A release is in its canary: `canary`."""
    how = policy(0.5, rollouts=100)
    _ = await before.client.start_release("planner", NewRelease(candidate="v2", policy=how))
    for number in range(8):
        await before.call(f"/rollout/c{number}/attempt/a1", "Hello?")
        _ = await before.client.reward(f"c{number}", "a1", Judgement(value=1.0))


async def serve_weights(before: Before) -> None:
    """A model has a version: `weights`."""
    content = {"upstream": "vllm", "base": BASE, "adapter": "/adapters/policy/v11"}
    _ = await before.client.add_version("policy", NewVersion(kind="model", content=content, version="v11"))
    for number in range(3):
        await before.call(f"/rollout/w{number}/attempt/a1", "Hello?")
        _ = await before.client.reward(f"w{number}", "a1", Judgement(value=1.0))


async def report(before: Before) -> None:
    """A trainer has reported: `reported`."""
    for name in ("grpo-6", "grpo-7"):
        _ = await before.client.start_run(NewRun(id=name, kind="grpo", config={"lr": 1e-6}, steps=20))
        points = [Point(step=step, values={"reward": step / 20, "kl": 0.01 * step}) for step in range(20)]
        await before.client.add_points(name, points)
        await before.client.add_run_events(
            name, [RunEvent(step=1, text="published policy v12", time_ns=1_790_000_000_000_000_000)]
        )
    _ = await before.client.finish_run("grpo-6", RunEnd(status="succeeded"))


async def index(before: Before) -> None:
    """Their calls are in the index: `indexed`."""

    async def answered() -> bool:
        try:
            _ = await before.client.sql(SqlRequest(query="select 1"))
        except ClientError as error:
            if error.status != 503:
                raise
            return False
        return True

    await until(answered)


WORLDS: Mapping[str, tuple[Callable[[Before], Awaitable[None]], ...]] = {
    "checkout": (),
    "bare": (),
    "new": (),
    "worked": (work,),
    "versions": (work, register),
    "canary": (work, register, begin),
    "weights": (serve_weights,),
    "reported": (report,),
    "indexed": (work, index),
}


@asynccontextmanager
async def world(name: str, home: Path) -> AsyncGenerator[World]:
    """A world below `home`, which is there and empty."""
    folder = home / "folder"
    shutil.copytree(STUBS, folder)
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(serving())
        vllm = await stack.enter_async_context(engine())
        vllm.base = BASE
        command = stack.enter_context(door(home / "door"))
        opened = await stack.enter_async_context(terminal(folder, home / "printed", environment(folder, command)))
        made, config = World(folder, opened), configuration(provider, vllm)
        if name == "bare":
            (folder / "penstock.toml").write_text(config)
        elif name != "checkout":
            gateway = await stack.enter_async_context(running(home / "gateway", config))
            await made.reach(4747, gateway.port)
            client = await stack.enter_async_context(Client(gateway.url))
            http = await stack.enter_async_context(aiohttp.ClientSession())
            before = Before(client, http, gateway.url, (STUBS / "planner.txt").read_text())
            for step in WORLDS[name]:
                await step(before)
        yield made


def configuration(provider: Provider, vllm: FakeEngine) -> str:
    """Of its gateway."""
    servers = [f'[[upstream]]\nname = "{name}"\nbase_url = "{vllm.openai_url}"\n' for name in ("vllm", "production-2")]
    teams = '[[budget]]\nname = "teams"\nper = "key"\nunit = "usd"\nlimit = 200\nwindow = "month"\n'
    return upstreams(openai=provider.openai_url, anthropic=provider.url) + "".join(servers) + teams


def environment(folder: Path, command: str) -> dict[str, str]:
    """Variables of the terminal. Commands are those of this environment, the folder's `bin` first; `command`: what is
    called `penstock`."""
    write(folder / "bin" / "penstock", command)
    write(folder / "bin" / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    paths = [str(folder / "bin"), str(Path(sys.executable).parent), kept.get("PATH", "/usr/bin:/bin")]
    return kept | {
        "PATH": os.pathsep.join(paths),
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
        "COLUMNS": str(COLUMNS),
    }


def write(path: Path, code: str) -> None:
    """A command of its own."""
    path.write_text(code)
    path.chmod(0o755)
