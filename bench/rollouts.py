"""What a rollout of two calls costs the gateway, from the queue to a sample: `python -m bench.rollouts`.

Everything is real but the model: a gateway, `penstock run` with the agent and the reward of `examples.lookup`, and the
trainer's own collector, which queues steps of 96 rollouts, waits for them and reads them as samples. The engine answers
prepared bytes at once, as vLLM writes them: first a tool call, then an answer, with token ids and log-probabilities. So
a step is short, and nothing but the loop around the model is measured.

How fast a core is differs from minute to minute where machines are shared, by a third and more. So a loop of Python is
timed before and after the steps (`loop_seconds`): figures of two runs compare as far as their loops do.

The first step does not count: agents and connections are started in it. `--profile DIR` leaves what the threads of the
gateway did as `loop.prof` and `recorder.prof`, and slows it down.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from openai import OpenAI

import penstock
from bench.procfs import cpu_seconds
from bench.queue import PROFILED
from bench.store import HERE, Figure, report
from examples import lookup
from penstock.adapters.samples import Options
from penstock.gateway.client.client import Client
from penstock.trainer.data.collector import RolloutCollector
from penstock.trainer.data.tasks import RolloutTask

OUT = HERE / "out" / "rollouts.json"
GROUPS, SIZE = 12, 8
AGENTS: Final = 20
RUNNER: Final = [f"--concurrency={AGENTS}", "--callable=bench.rollouts:agent", "--reward=examples.lookup:reward"]
CONFIG = """\
port = 0
data = "{home}/tape"

[[upstream]]
name = "vllm"
base_url = "http://127.0.0.1:{engine}/v1"

[[route]]
model = "policy"
upstream = ["vllm"]
train = true
"""
PROMPT, SAID = list(range(1000, 1160)), list(range(2000, 2024))
"""Token ids of the first prompt and of an answer."""


_client = OpenAI(base_url="http://127.0.0.1:9", api_key="none", max_retries=0, timeout=300)


def agent(task: dict[str, Any], address: penstock.Address) -> dict[str, Any]:
    """Run the agent of the demo; all attempts share the connections of one client."""
    return lookup.agent(task, _client.with_options(base_url=address.openai_url, api_key=address.token))


# -- the engine ------------------------------------------------------------------------------------------------------


def answer(prompt: list[int], message: dict[str, Any], finish: str) -> bytes:
    """Return an answer as vLLM writes it with token ids and log-probabilities."""
    scored = [{"token": f"t{it}", "logprob": -0.25, "bytes": [116], "top_logprobs": []} for it in SAID]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None, "refusal": None, "reasoning": None} | message,
        "logprobs": {"content": scored},
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": SAID,
    }
    usage = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + len(SAID), "completion_tokens": len(SAID)}
    about: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy"}
    tail = {"usage": usage, "prompt_logprobs": None, "prompt_token_ids": prompt}
    body = json.dumps(about | {"choices": [choice]} | tail, separators=(",", ":")).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\ncontent-type: application/json\r\n\r\n"
    return head.encode() + body


ASK = {"id": "call-1", "type": "function", "function": {"name": lookup.TOPICS[0], "arguments": '{"city": "Oslo"}'}}
FIRST = answer(PROMPT, {"tool_calls": [ASK]}, "tool_calls")
SECOND = answer([*PROMPT, *SAID, *PROMPT[:24]], {"content": "100"}, "stop")


class Engine(asyncio.Protocol):
    """A connection to the engine: one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, ended, body = self._received.partition(b"\r\n\r\n")
        length = next((int(it[15:]) for it in head.lower().split(b"\r\n") if it.startswith(b"content-length:")), 0)
        if ended and len(body) >= length:
            self._received = b""
            self._transport.write(SECOND if b'"role":"tool"' in body else FIRST)


async def serve_engine() -> None:
    """Run the engine, in a process of its own."""
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# -- the loop --------------------------------------------------------------------------------------------------------


@contextmanager
def process(words: list[str], log: Path) -> Generator[subprocess.Popen[bytes]]:
    """Run a Python process in the project's directory for the context."""
    env = os.environ | {"PYTHONPATH": str(HERE.parent)}
    with log.open("wb") as file:
        made = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=file, cwd=HERE.parent, env=env)
    try:
        yield made
    finally:
        made.terminate()
        _ = made.communicate()


def said(made: subprocess.Popen[bytes]) -> str:
    """Return the first line that a process prints."""
    assert made.stdout is not None
    return made.stdout.readline().decode().strip()


@dataclass(frozen=True, slots=True)
class Steps:
    """The cost of some steps."""

    rollouts: int
    wall: float
    """Seconds of wall time."""
    gateway: float
    """Seconds of CPU of the gateway."""
    runner: float
    """Seconds of CPU of the runner and its agents."""
    trainer: float
    """Seconds of CPU of the collector."""
    loop: float
    """Seconds of CPU of a loop of Python, the mean of before and after."""


def loop_seconds() -> float:
    """Return the CPU of a million rounds of a loop."""
    began = time.process_time()
    for _ in range(1_000_000):
        pass
    return time.process_time() - began


async def steps(url: str, gateway: int, runner: int, count: int) -> Steps:
    """Take one step that does not count, and then the measured ones."""
    async with Client(url) as client:
        collector = RolloutCollector(client, "bench", Options(model="policy"))
        following = asyncio.ensure_future(collector.run())
        await step(collector, 0)
        loop = loop_seconds()
        before = [cpu_seconds(gateway), cpu_seconds(runner), time.process_time(), time.perf_counter()]
        for number in range(1, count + 1):
            await step(collector, number)
        after = [cpu_seconds(gateway), cpu_seconds(runner), time.process_time(), time.perf_counter()]
        loop = (loop + loop_seconds()) / 2
        _ = following.cancel()
        with suppress(asyncio.CancelledError):
            await following
    spent = [one - other for one, other in zip(after, before, strict=True)]
    return Steps(count * GROUPS * SIZE, spent[3], spent[0], spent[1], spent[2], loop)


async def step(collector: RolloutCollector, number: int) -> None:
    """Take one step as the trainer does."""
    asked = [RolloutTask(place, it) for place, it in enumerate(lookup.tasks(1.0)[:GROUPS])]
    order = await collector.order("train", str(number), number, asked, SIZE, 60.0)
    found = await collector.gather(order, 120.0)
    assert len(found.samples) == GROUPS * SIZE, (len(found.samples), found.report, found.ended)


def measured(home: Path, count: int, profile: Path | None, runner: list[str]) -> Steps:
    """Return the cost of steps with processes of their own."""
    with process(["-m", "bench.rollouts", "--engine"], home / "engine.log") as engine:
        config = home / "penstock.toml"
        config.write_text(CONFIG.format(home=home, engine=said(engine)))
        serve = ["-m", "penstock", "serve", "--config", str(config)]
        watched = serve if profile is None else ["-c", PROFILED, str(profile), str(config), ""]
        with process(watched, home / "gateway.log") as gateway:
            url = "http://127.0.0.1:" + said(gateway).rpartition(":")[2]
            run = ["-m", "penstock", "run", "--watch", "--gateway", url, *runner]
            with process(run, home / "runner.log") as agents:
                return asyncio.run(steps(url, gateway.pid, agents.pid, count))


def figures(found: Steps) -> Iterator[Figure]:
    each = 1e3 / found.rollouts
    yield Figure("rollouts", found.rollouts, "")
    yield Figure("CPU of the gateway", found.gateway * each, "ms a rollout", at_most=4)
    yield Figure("CPU of the runner and its agents", found.runner * each, "ms a rollout")
    yield Figure("CPU of the collector", found.trainer * each, "ms a rollout")
    yield Figure("a million rounds of a Python loop", found.loop * 1e3, "ms")
    yield Figure(f"a step of {GROUPS * SIZE}, wall", found.wall / (found.rollouts / GROUPS / SIZE), "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="steps that count (default: 10)")
    parser.add_argument("--profile", type=Path, help="where profiles go")
    parser.add_argument("--runner", default=" ".join(RUNNER), help="options of `penstock run`")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.engine:
        asyncio.run(serve_engine())
        return
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as home:
        report(figures(measured(Path(home), asked.steps, asked.profile, asked.runner.split())), OUT)


if __name__ == "__main__":
    main()
