"""The gateway's share of a training step, and how far engine and trainer are apart, on the demo's own loop.

    .venv-train/bin/python -m bench.training [--steps 6] [--model DIRECTORY] [--home DIRECTORY]

Everything is real: the model of `examples.lookup_rl`, vLLM, a gateway, `penstock run` with 20 agents at a time, and
`penstock train grpo`. It takes about four minutes on two quiet cores, and as many to make the model, unless `--model`
names one that the demo has made (`python -m examples.lookup_rl --out DIRECTORY` makes DIRECTORY/model). From the second
step on, a step is the time between two points of the run; of it are told

* *CPU*: user and system time of the gateway's process, over the step's wall time and all cores of the machine: what
  the gateway took from vLLM and the trainer;
* *time*: by how much a step is longer because calls go through a gateway: what it adds to a call, times the calls that
  follow one another. Agents work at the same time, so those are the step's calls by the number of agents, and at
  least those of its longest rollout. Once the gateway's own measure of what it adds is taken, once the difference of
  the same calls to the same vLLM, in turns directly and through the gateway, token ids and log-probabilities included;
* *time if no calls overlapped*: the bound that needs no assumption, with the gateway's own measure.

Then the run goes on for some steps in which no rollout begins before the weights are there (`rollouts.ahead = false`),
so that engine and trainer compute with the same weights. Of every token of these steps the trainer's log-probability is
compared with the engine's; quantiles are those that each step reports, and the worst step's are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.procfs import cpu_seconds
from bench.store import HERE, Figure, report
from examples.lookup import TOOLS
from examples.lookup_rl import GATEWAY, ROOT, TRAIN, free_ports, prepare, ready
from penstock.gateway.client.child_process import ChildProcess, spawn
from penstock.gateway.client.client import Client
from penstock.gateway.model.run import Point
from penstock.trainer.serving.vllm import VllmServer, adapter_arguments, server_arguments

OUT = HERE / "out" / "training.json"
FRESH: Final = 2
"""Steps in which log-probabilities are compared."""
SLOTS: Final = 7
"""Adapters at a time, as `penstock train grpo` would set it."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The counters at the end of a step."""

    step: int
    seconds: float
    """Monotonic time."""
    cpu: float
    """Seconds of CPU that the gateway has used."""
    overhead: float
    """Seconds that its calls have spent in the gateway itself."""
    calls: float
    """Number of those calls."""


@dataclass(frozen=True, slots=True)
class Step:
    """The gateway's part in one step."""

    wall: float
    cpu: float
    added: float
    """Seconds that the gateway adds to a call, by its own measure; mean."""
    calls: int
    """Calls that ended in it, those of an evaluation included."""
    longest: int
    """Calls of the rollout with the most."""


async def moment(client: Client, http: aiohttp.ClientSession, step: int, pid: int) -> Moment:
    """Return the counters of now."""
    async with http.get(client.url + "/metrics") as answer:
        text = await answer.text()
    found = dict(re.findall(r"^penstock_overhead_seconds_(sum|count) (\S+)$", text, re.MULTILINE))
    return Moment(step, time.monotonic(), cpu_seconds(pid), float(found["sum"]), float(found["count"]))


async def followed(client: Client, pid: int, steps: int) -> list[Moment]:
    """Return a moment for each step, taken when it is reported."""
    found: list[Moment] = []
    async with aiohttp.ClientSession() as http, aclosing(client.changes()) as changes:
        async for change in changes:
            if change.kind != "run":
                continue
            done = [point.step async for point in client.points("lookup")]
            if done and (not found or done[-1] > found[-1].step):
                found.append(await moment(client, http, done[-1], pid))
                print(f"step {done[-1]} of {steps}", file=sys.stderr, flush=True)
            if done and done[-1] == steps:
                return found
    raise AssertionError("the feed has ended")


async def calls_by_step(client: Client) -> dict[int, Counter[str]]:
    """Return the calls of each rollout, by step."""
    found: dict[int, Counter[str]] = {}
    async for rollout in client.rollouts("mode:train status:over"):
        count = sum(attempt.totals.calls for attempt in rollout.attempts)
        found.setdefault(int((rollout.metadata or {})["penstock.step"]), Counter())[rollout.id] = count
    return found


def steps_of(moments: list[Moment], calls: dict[int, Counter[str]]) -> Iterator[Step]:
    """Yield the steps between moments. The first step is left out: its agents are just starting."""
    for before, after in pairwise(moments):
        if before.step > 0 and after.step == before.step + 1:
            made, longest = after.calls - before.calls, max(calls[after.step].values())
            wall, cpu = after.seconds - before.seconds, after.cpu - before.cpu
            yield Step(wall, cpu, (after.overhead - before.overhead) / made, int(made), longest)


async def added_by_gateway(gateway: str, vllm: str, pairs: int) -> float:
    """Return the seconds that the gateway adds to a call: the median difference of pairs, in turns."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "How many bridges does Oslo have?"}]}
    body |= {"tools": TOOLS, "max_tokens": 48, "temperature": 0}
    direct = body | {"model": "base", "return_token_ids": True, "logprobs": True}
    found: list[float] = []
    async with aiohttp.ClientSession() as http:
        for number in range(pairs):
            url = f"{gateway}/rollout/pair-{number // 10}/attempt/a1/v1"
            there = await timed(http, vllm, direct)
            through = await timed(http, url, body | {"model": "policy"})
            # The first pairs open connections.
            found += [through - there] if number >= pairs // 10 else []
    return statistics.median(found)


async def timed(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """Make a call; return its seconds."""
    began = time.perf_counter()
    async with http.post(url + "/chat/completions", json=body) as answer:
        said = await answer.json()
        assert answer.status == 200, said
    return time.perf_counter() - began


@asynccontextmanager
async def started(command: list[str], log: Path | None) -> AsyncGenerator[ChildProcess]:
    """Run a process for the context."""
    made = await spawn([sys.executable, *command], os.environ, log)
    try:
        yield made
    finally:
        await made.stop()


async def measured(home: Path, python: Path, steps: int, pairs: int) -> tuple[list[Step], list[Point], float]:
    """Return the steps of a run, points of those whose rollouts are fresh, and the seconds that the gateway adds to a
    call."""
    port, serves = free_ports(2)
    words: dict[str, Any] = {"home": home, "python": python, "port": port, "vllm": serves, "steps": steps, "seed": 0}
    (home / "penstock.toml").write_text(GATEWAY.format(**words))
    asked = TRAIN.format(**words)
    flags: list[str] = tomllib.loads(asked)["inference"]["flags"]
    url, vllm = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{serves}/v1"
    # The server is ours, so that it is still there when the run is over.
    mine = re.sub(r"\[inference\].*?\n\n", f'[inference]\nurls = ["{vllm}"]\n\n', asked, flags=re.DOTALL)
    (home / "train.toml").write_text(mine)
    server = VllmServer(
        python,
        server_arguments(home / "model", "base", vllm, [*adapter_arguments(16, SLOTS), *flags]),
        vllm,
        home / "vllm.log",
        cpu=True,
    )
    train = ["-m", "penstock", "train", "grpo", str(home / "train.toml"), "--gateway", url]
    serve = ["-m", "penstock", "serve", "--config", str(home / "penstock.toml")]
    try:
        await server.start()
        async with started(serve, home / "gateway.log") as gateway, Client(url) as client:
            await ready(url)
            async with started(train, home / "trainer.log") as trainer:
                moments = await unless_ended(trainer, followed(client, gateway.pid, steps))
            found = list(steps_of(moments, await calls_by_step(client)))
            more = mine.replace("ahead = true", "ahead = false").replace(
                f"steps = {steps}\n", f"steps = {steps + FRESH}\n"
            )
            (home / "train.toml").write_text(more)
            async with started(train, home / "trainer.log") as trainer:
                if await trainer.wait():
                    sys.exit(trainer.tail())
            points = [point async for point in client.points("lookup", since_step=steps + 1)]
            return found, points, await added_by_gateway(url, vllm, pairs)
    finally:
        await server.stop()


async def unless_ended(trainer: ChildProcess, following: Coroutine[Any, Any, list[Moment]]) -> list[Moment]:
    """Return the moments; exit with the trainer's log if it has failed."""
    moments, ended = asyncio.ensure_future(following), asyncio.ensure_future(trainer.wait())
    await asyncio.wait([moments, ended], return_when=asyncio.FIRST_COMPLETED)
    if ended.done() and ended.result():
        sys.exit(trainer.tail())
    found = await moments
    _ = await ended
    return found


def figures(steps: list[Step], points: list[Point], paired: float, agents: int) -> Iterator[Figure]:
    cores = os.cpu_count() or 1
    wall, cpu = sum(one.wall for one in steps), sum(one.cpu for one in steps)
    calls = sum(one.calls for one in steps)
    own = sum(one.added * one.calls for one in steps) / calls
    after_another = sum(max(one.longest, -(-one.calls // agents)) for one in steps)
    yield Figure("steps", len(steps), "")
    yield Figure("a step, mean", wall / len(steps), "s")
    yield Figure("calls of a step, mean", calls / len(steps), "")
    yield Figure("calls of a step that follow one another, mean", after_another / len(steps), "")
    yield Figure("added to a call: the gateway's own measure, mean", own * 1e3, "ms")
    yield Figure("added to a call: through it less directly, median", paired * 1e3, "ms")
    yield Figure(f"CPU of the gateway, of the step on {cores} cores", 100 * cpu / wall / cores, "%", at_most=2.0)
    yield Figure("time: its own measure x calls in a row", 100 * own * after_another / wall, "%", at_most=2.0)
    yield Figure("time: difference x calls in a row", 100 * paired * after_another / wall, "%", at_most=2.0)
    yield Figure("time if no calls overlapped: its own measure x calls", 100 * own * calls / wall, "%")
    learnt = [point.values for point in points if point.values.get("mismatch_max") is not None]
    assert all(one["staleness/max"] == 0 for one in learnt), "a rollout is older than its step's weights"
    yield Figure("trained tokens of fresh rollouts", sum(one["tokens"] or 0 for one in learnt), "")
    yield Figure("of these without a log-probability of the engine", sum(one["unscored"] or 0 for one in learnt), "")
    for which, name in (("p50", "median"), ("p99", "99 %"), ("max", "largest")):
        worst = max(one.get(f"mismatch_{which}") or 0.0 for one in learnt)
        yield Figure(f"|trainer - engine| of a log-probability, {name}", worst * 1e6, "1e-6 nats")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="steps of the run (default: 6); the first does not count")
    parser.add_argument("--pairs", type=int, default=200, help="calls made directly and through it (default: 200)")
    parser.add_argument("--model", type=Path, help="a model that the demo has made; otherwise one is made")
    parser.add_argument("--home", type=Path, help="where everything goes, and stays")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    asked = parser.parse_args()
    if asked.steps < 2:
        parser.error("--steps must be at least 2")
    with nullcontext(asked.home) if asked.home else tempfile.TemporaryDirectory(prefix="penstock-bench-") as given:
        home = Path(given).absolute()
        if asked.model is not None:
            shutil.copytree(asked.model, home / "model")
        prepare(home, 0)
        steps, points, paired = asyncio.run(measured(home, asked.vllm, asked.steps, asked.pairs))
        words: list[str] = tomllib.loads((home / "train.toml").read_text())["rollouts"]["run"]
        agents = next(int(word.partition("=")[2]) for word in words if word.startswith("--workers="))
        report(figures(steps, points, paired, agents), OUT)


if __name__ == "__main__":
    main()
