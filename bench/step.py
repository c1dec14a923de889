"""A training step through Penstock beside the same step of a direct loop on the same vLLM: `python -m bench.step`.

    .venv-train/bin/python -m bench.step --model DIRECTORY [--steps 4] [--home DIRECTORY]

Both have the same model (`python -m examples.lookup_rl --out DIRECTORY` makes DIRECTORY/model), the same agent and
reward (`examples.lookup`), 96 rollouts a step, 20 at a time, and the same update and LoRA directory; both wait for new
weights before the next rollouts begin. The direct loop runs the agent in threads of its own process, asks vLLM itself,
keeps what it answers in memory and loads the adapter. Penstock is `penstock serve`, `penstock run --concurrency 20` and
`penstock train grpo`: a durable tape, a queue, leases, a release for each version. The direct loop goes half of its
steps before and half after, because other work on the machine comes and goes. First steps do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import httpx2
import numpy as np
from openai import OpenAI

from bench.rollouts import AGENTS, RUNNER
from bench.store import HERE, Figure, report
from bench.training import Moment, calls_by_step, followed, started, unless_ended
from examples import lookup
from examples.lookup_rl import GATEWAY, ROOT, free_ports, prepare, ready
from penstock.adapters.samples import Sample, Segment
from penstock.adapters.tokens import CompletionOutput, read_outputs
from penstock.gateway.client.client import Client
from penstock.trainer.config import TrainConfig, load
from penstock.trainer.data.tasks import RolloutTask, draw_tasks, read_tasks
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.engines.remote import make_engine
from penstock.trainer.mathematics.update import learn
from penstock.trainer.serving.vllm import VllmServer, adapter_arguments, server_arguments

OUT = HERE / "out" / "step.json"
FLAGS: Final = [
    "--dtype=float32", "--enforce-eager", "--max-model-len=512", "--max-num-seqs=32",
    "--enable-auto-tool-choice", "--tool-call-parser=hermes",
]  # fmt: skip
TRAIN: Final = """\
[run]
name = "lookup"
directory = "{home}/run"
steps = {steps}
checkpoint_every = 1000

[model]
path = "{home}/model"
name = "policy"
rank = 16

[rollouts]
tasks = "{home}/train.jsonl"
groups = 12
group_size = 8
ahead = false
timeout = 300.0
run = [{run}]

[optimiser]
learning_rate = 2e-3

[inference]
urls = ["{vllm}"]
"""
_answers: contextvars.ContextVar[list[bytes] | None] = contextvars.ContextVar("answers", default=None)


# -- the direct loop -------------------------------------------------------------------------------------------------


class Asking(httpx2.HTTPTransport):
    """Requests token ids and log-probabilities of the newest weights, and stores the answers."""

    model = "base"

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        more = {"model": self.model, "return_token_ids": True, "logprobs": True, "top_logprobs": 0}
        body = json.dumps(json.loads(request.content) | more).encode()
        headers = {name: value for name, value in request.headers.items() if name != "content-length"}
        answer = super().handle_request(httpx2.Request("POST", request.url, headers=headers, content=body))
        said = answer.read()
        kept = _answers.get()
        if kept is not None:
            kept.append(said)
        return httpx2.Response(answer.status_code, headers=answer.headers, content=said)


class Direct:
    """The direct loop, without Penstock."""

    def __init__(
        self, config: TrainConfig, engine: TrainingEngine, tasks: Sequence[RolloutTask], vllm: str, home: Path
    ) -> None:
        self._config, self._engine, self._tasks, self._vllm, self._home = config, engine, tasks, vllm, home
        self._asking = Asking(limits=httpx2.Limits(max_connections=AGENTS))
        http = httpx2.Client(transport=self._asking, timeout=300)
        self._client = OpenAI(base_url=vllm, api_key="none", http_client=http, max_retries=0)
        self._step = 0

    def steps(self, count: int) -> Iterator[float]:
        """Do steps; yield the seconds of each."""
        for _ in range(count):
            began = time.perf_counter()
            self._once()
            yield time.perf_counter() - began

    def _once(self) -> None:
        wanted, place = self._config.rollouts, self._step * self._config.rollouts.groups
        asked = draw_tasks(self._tasks, place, wanted.groups, self._config.run.seed)
        each = [(group, number) for group in range(len(asked)) for number in range(wanted.group_size)]

        def made_of(one: tuple[int, int]) -> list[Sample]:
            return self._rollout(asked[one[0]].input, *one)

        with ThreadPoolExecutor(AGENTS) as pool:
            made = pool.map(made_of, each)
            samples = [sample for some in made for sample in some]
        assert samples, "no rollout has a sample"
        _ = learn(self._engine, samples, lambda _: 0, self._config)
        self._step += 1
        name = f"direct-{self._step}"
        directory = self._home / "direct" / name
        self._engine.save_adapter(directory)
        answer = httpx2.post(
            f"{self._vllm}/load_lora_adapter", json={"lora_name": name, "lora_path": str(directory)}, timeout=300
        )
        assert answer.status_code == 200, answer.text
        self._asking.model = name

    def _rollout(self, task: dict[str, Any], group: int, number: int) -> list[Sample]:
        said: list[bytes] = []
        token = _answers.set(said)
        output = lookup.agent(task, self._client)
        _answers.reset(token)
        calls = [choices[0] for body in said if (choices := read_outputs(body, False))]
        reward = lookup.reward(task, output)
        return list(samples_of(f"{group}-{number}", str(group), calls, reward))


def samples_of(rollout: str, group: str, calls: Sequence[CompletionOutput], reward: float) -> Iterator[Sample]:
    """Yield one sample, if each prompt begins with the conversation before; else one for each call."""
    whole = [*calls]
    for before, after in pairwise(calls):
        known = np.concatenate([before.prompt, before.ids])
        if not np.array_equal(after.prompt[: len(known)], known):
            whole = []
    for row in [whole] if whole else [[call] for call in calls]:
        begin = len(row[0].prompt)
        response = np.concatenate([row[-1].prompt[begin:], row[-1].ids])
        mask, scores = np.zeros(len(response), np.bool_), np.zeros(len(response), np.float32)
        segments: list[Segment] = []
        for place, call in enumerate(row, 1):
            start = len(call.prompt) - begin
            end = start + len(call.ids)
            mask[start:end], scores[start:end] = True, call.logprobs
            segments.append(Segment(place, 0, start, end, None, None, False, call.finish == "length"))
        yield Sample(
            rollout, "a1", group, None, "policy", row[0].prompt, response, mask, scores, tuple(segments), reward, {}
        )


# -- both ------------------------------------------------------------------------------------------------------------


async def measured(home: Path, python: Path, count: int) -> tuple[list[float], list[Moment], int, dict[str, float]]:
    """Return (seconds of direct steps, moments of Penstock's, its rollouts of a step, parts of its time in seconds)."""
    port, serves = free_ports(2)
    url, vllm = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{serves}/v1"
    words: dict[str, Any] = {"home": home, "vllm": vllm, "steps": count + 1}
    (home / "train.toml").write_text(TRAIN.format(**words, run=", ".join(map(json.dumps, RUNNER))))
    (home / "penstock.toml").write_text(GATEWAY.format(home=home, port=port, vllm=serves))
    config = load(home / "train.toml")
    tasks = read_tasks("rollouts.tasks", home / "train.jsonl")
    more = [*adapter_arguments(16, 7), *FLAGS]
    server = VllmServer(python, server_arguments(home / "model", "base", vllm, more), vllm, home / "vllm.log", cpu=True)
    try:
        await server.start()
        direct = Direct(config, make_engine(config), tasks, vllm, home)
        half = count - count // 2
        found = await asyncio.to_thread(lambda: list(direct.steps(1 + half))[1:])
        train = ["-m", "penstock", "train", "grpo", str(home / "train.toml"), "--gateway", url]
        serve = ["-m", "penstock", "serve", "--config", str(home / "penstock.toml")]
        async with started(serve, home / "gateway.log") as gateway, Client(url) as client:
            await ready(url)
            async with started(train, home / "trainer.log") as trainer:
                moments = await unless_ended(trainer, followed(client, gateway.pid, count + 1))
            points = [point.values async for point in client.points("lookup", since_step=2)]
            rollouts = len((await calls_by_step(client))[2])
        found += await asyncio.to_thread(lambda: list(direct.steps(count // 2)))
        names = ("collect", "update", "publish")
        return found, moments, rollouts, {it: fmean(one[f"seconds/{it}"] or 0.0 for one in points) for it in names}
    finally:
        await server.stop()


def figures(direct: list[float], moments: list[Moment], rollouts: int, where: dict[str, float]) -> Iterator[Figure]:
    first, last = next(one for one in moments if one.step == 1), moments[-1]
    count = last.step - first.step
    through = (last.seconds - first.seconds) / count
    yield Figure("steps each", count, "")
    yield Figure("calls of a rollout, mean", (last.calls - first.calls) / count / rollouts, "")
    yield Figure("a step of the direct loop, mean", fmean(direct), "s")
    yield Figure("a step through Penstock, mean", through, "s")
    for name, seconds in where.items():
        yield Figure(f"of it: {name}", seconds, "s")
    yield Figure("through Penstock / direct", through / fmean(direct), "", at_most=1.25)
    cpu = (last.cpu - first.cpu) / count / rollouts
    yield Figure("CPU of the gateway", cpu * 1e3, "ms a rollout", at_most=4)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a model that the demo has made")
    parser.add_argument("--steps", type=int, default=4, help="steps of each that count (default: 4)")
    parser.add_argument("--home", type=Path, help="where everything goes, and stays")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    asked = parser.parse_args()
    if asked.steps < 2:
        parser.error("--steps must be at least 2")
    with nullcontext(asked.home) if asked.home else tempfile.TemporaryDirectory(prefix="penstock-bench-") as given:
        home = Path(given).absolute()
        home.mkdir(parents=True, exist_ok=True)
        (home / "model").symlink_to(asked.model.absolute())
        prepare(home, 0)
        report(figures(*asyncio.run(measured(home, asked.vllm, asked.steps))), OUT)


if __name__ == "__main__":
    sys.exit(main())
