"""Prompts alone, weights alone, both: on two CPU cores, with a real vLLM, in some minutes, without a network.

    python -m examples.fast_slow [--seed 0] [--steps 12] [--out DIRECTORY]

A tiny model is made and taught to follow instructions, sometimes (`examples.fast_slow_model`). The agent's prompt asks
for one part of what the shop wants (`examples.fast_slow_agent`). Then everything is the real thing: a gateway, vLLM
with versioned LoRA adapters, `penstock run`, and `penstock train grpo` twice with the same steps, without `--prompts`
and with it. Only the model that reflects is a script. What it prints is the reward on orders that were never trained
on, and the release of the pair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from transformers import PreTrainedTokenizerFast

from examples.demo.model import DemoAnswer, Json, chat, last_text
from examples.fast_slow_agent import PARTS, PROMPT
from examples.fast_slow_model import VAGUE, WORDINGS, lessons, order, write_model, write_tokenizer
from examples.lookup_model import teach
from examples.lookup_rl import ROOT, free_ports, ready
from penstock.gateway.client.child_process import spawn
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.rollout import RolloutConfig
from penstock.trainer.data.training_examples import tokenise
from penstock.trainer.runs.prompt_rounds import Rewards, by_task, task_difference, task_mean
from penstock.trainer.runs.prompt_rounds import format_mean as told
from penstock.trainer.serving.vllm import VllmServer, adapter_arguments, server_arguments

THINKER: Final = "thinker"
"""Name of the model that reflects."""
UNDERSTOOD: Final = 0.7
"""Share of its hypotheses that are right."""
LAPS: Final = (True, False)
"""How the model is taught: first by conversations that follow all instructions, then by such that follow some."""
LESSONS: Final = 8_000
TRAINED, HELD_OUT, SAMPLES = 48, 24, 4
"""Orders that are trained on; others that it is judged by; rollouts of each of these."""
RUN: Final = [
    "--workers=16", "--callable=examples.fast_slow_agent:agent", "--preload",
    "--reward=examples.fast_slow_agent:reward",
]  # fmt: skip

GATEWAY = """\
port = {port}
data = "{home}/tape"

[[upstream]]
name = "vllm"
base_url = "http://127.0.0.1:{vllm}/v1"

[[upstream]]
name = "thinker"
base_url = "{thinker}/v1"

[[route]]
model = "policy"
upstream = ["vllm"]
train = true

[[route]]
model = "thinker"
upstream = ["thinker"]
"""
TRAIN = """\
[run]
name = "{name}"
directory = "{home}/{name}"
steps = {steps}
seed = {seed}
checkpoint_every = 5

[model]
path = "{home}/model"
name = "policy"

[rollouts]
tasks = "{home}/train.jsonl"
groups = 8
group_size = 8
timeout = 300.0
run = {run}

[optimiser]
learning_rate = 2e-3

[inference]
urls = ["http://127.0.0.1:{vllm}/v1"]

[evaluate]
every = {steps}

[[evaluate.suite]]
tasks = "{home}/held-out.jsonl"
samples = {samples}

[publish]
policy = "{home}/policy.toml"

[prompts]
every = 6
rollouts = 150
"""
POLICY = """\
replayed = "skip"
shadowed = "skip"
margin_absolute = 0.1

[guards]
margin = 0.1
"""
APO = """\
engine = "ours"

[texts]
prompts = ["shop"]

[reflection]
model = "thinker"
"""


def main() -> None:
    """The demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    asked = parser.parse_args()
    if not asked.vllm.exists():
        sys.exit(f"{asked.vllm} does not exist: `make install-vllm` installs vLLM (3.4 GB)")
    with nullcontext(asked.out) if asked.out else tempfile.TemporaryDirectory(prefix="penstock-pairs-") as given:
        home = Path(given).absolute()
        prepare(home, asked.seed)
        asyncio.run(demo(home, asked.vllm, asked.seed, asked.steps))


# -- the model and its tasks -------------------------------------------------------------------------------------------


def prepare(home: Path, seed: int) -> None:
    """The tasks, and the model unless it is there."""
    home.mkdir(parents=True, exist_ok=True)
    draw, found = random.Random(f"orders-{seed}"), dict[str, Json]()
    while len(found) < TRAINED + HELD_OUT:
        one = order(draw)
        found[json.dumps(one)] = one
    lines = [json.dumps(one) + "\n" for one in found.values()]
    (home / "train.jsonl").write_text("".join(lines[:TRAINED]))
    (home / "held-out.jsonl").write_text("".join(lines[TRAINED:]))
    (home / "apo.toml").write_text(APO)
    if not (home / "model").exists():
        warm_up(home, seed)


def warm_up(home: Path, seed: int) -> None:
    """Makes the model: random weights, then what the lessons teach."""
    source = home / "raw"
    source.mkdir(exist_ok=True)
    tokenizer: PreTrainedTokenizerFast = write_tokenizer(source)
    write_model(source, seed)
    for lap, firm in enumerate(LAPS):
        examples, left = tokenise(lessons(LESSONS, seed * len(LAPS) + lap, firm), tokenizer)
        assert not left, left[0]
        made = home / f"lap-{lap}"
        teach(source, made, examples, seed + lap)
        source = made
    source.rename(home / "model")


# -- the run -----------------------------------------------------------------------------------------------------------


async def demo(home: Path, python: Path, seed: int, steps: int) -> None:
    """All of it, below a directory that was prepared."""
    port, vllm = free_ports(2)
    words: dict[str, Any] = {"home": home, "port": port, "vllm": vllm, "steps": steps, "seed": seed}
    async with thinking() as thinker, serving(home, python, vllm):
        (home / "penstock.toml").write_text(GATEWAY.format(**words, thinker=thinker))
        url = f"http://127.0.0.1:{port}"
        gateway = await spawn([*PENSTOCK, "serve", "--config", str(home / "penstock.toml")], os.environ, home / "log")
        try:
            await ready(url)
            async with Client(url) as client:
                await client.add_version("shop", NewVersion(kind="prompt", content={"text": PROMPT, "sent": True}))
                (home / "policy.toml").write_text(POLICY)
                both = ["--prompts", str(home / "apo.toml"), "--release", "canary"]
                for name, more in (("weights", []), ("both", both)):
                    config = home / f"{name}.toml"
                    config.write_text(TRAIN.format(**words, name=name, samples=SAMPLES, run=json.dumps(RUN)))
                    await penstock("train", "grpo", str(config), "--gateway", url, *more)
                await tell(client, url, home, steps)
        finally:
            await gateway.stop()


PENSTOCK: Final = [sys.executable, "-m", "penstock"]


async def penstock(*words: str) -> None:
    """A command, to its end."""
    child = await spawn([*PENSTOCK, *words], os.environ, None)
    try:
        if code := await child.wait():
            sys.exit(code)
    finally:
        await child.stop()


@asynccontextmanager
async def serving(home: Path, python: Path, port: int) -> AsyncGenerator[None]:
    """A vLLM for both runs, with room for the adapters of both."""
    url = f"http://127.0.0.1:{port}/v1"
    flags = ["--dtype=float32", "--enforce-eager", "--max-model-len=512", "--max-num-seqs=32"]
    words = server_arguments(home / "model", "base", url, [*adapter_arguments(16, 10), *flags])
    server = VllmServer(python, words, url, home / "vllm.log", cpu=True)
    try:
        await server.start()
        yield
    finally:
        await server.stop()


# -- the model that reflects -------------------------------------------------------------------------------------------


@asynccontextmanager
async def thinking() -> AsyncGenerator[str]:
    """A server of the scripted model that reflects; its URL."""
    times: Counter[str] = Counter()

    async def complete(request: web.Request) -> web.Response:
        asked = await request.json()
        question = last_text(asked["messages"], "user")
        times[question] += 1
        found = reflect(question, random.Random(f"{question}-{times[question]}"))
        return web.json_response(chat(asked, DemoAnswer(json.dumps({"hypotheses": found}))))

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/v1/chat/completions", complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def reflect(question: str, draw: random.Random) -> list[Json]:
    """Hypotheses: two of what fails, drawn by how often it does; some of them ask for nothing."""
    counts = Counter({one: question.count(f"the answer has no {one}") for one in PARTS})
    found: list[Json] = []
    while len(found) < 2 and sum(counts.values()):
        failing = draw.choices(list(counts), list(counts.values()))[0]
        del counts[failing]
        text = draw.choice(WORDINGS[failing] if draw.random() < UNDERSTOOD else VAGUE)
        failure = f"the answer has no {failing}"
        found.append({"failure": failure, "resource": "shop", "kind": "add", "line": 0, "text": text})
    return found


# -- what came of it ---------------------------------------------------------------------------------------------------


async def tell(client: Client, url: str, home: Path, steps: int) -> None:
    """Held-out rewards of what was found, with intervals over tasks."""
    texts = {one.version: one.content["text"] for one in (await client.resource("shop")).versions}
    (release,) = [one for one in await client.releases("policy", live=True) if one.author == "both"]
    new = release.companions["shop"]
    print(f"the new prompt ({new}):\n{texts[new]}\n", flush=True)
    given = {
        "neither": ("v1", "both.0"),
        "prompts alone": (new, "both.0"),
        "weights alone": ("v1", f"weights.{steps}"),
        "both": (new, f"both.{steps}"),
        "old prompt, weights of both": ("v1", f"both.{steps}"),
    }
    tasks = [json.loads(line) for line in (home / "held-out.jsonl").read_text().splitlines()]
    found = {
        name: await measured(client, url, name.replace(" ", "-").replace(",", ""), tasks, prompt, weights)
        for name, (prompt, weights) in given.items()
    }
    print(f"{'trained':30} held-out reward [95 %]          more than neither")
    for name, rewards in found.items():
        apart = task_difference(rewards, found["neither"])
        assert apart is not None
        print(f"{name:30} {told(task_mean(list(by_task(rewards).values())))}   {told(apart, '+')}")
    for name in ("prompts alone", "weights alone"):
        apart = task_difference(found["both"], found[name])
        assert apart is not None
        print(f"both less {name}: {told(apart, '+')}", flush=True)
    await penstock("release", "status", release.id, "--gateway", url)


async def measured(
    client: Client, url: str, name: str, tasks: Sequence[Mapping[str, Any]], prompt: str, weights: str
) -> Rewards:
    """Rewards by task of rollouts with these versions."""
    pins = RolloutConfig(versions={"shop": prompt, "policy": weights})
    names = {f"{name}-{at}-{number}": at for at in range(len(tasks)) for number in range(SAMPLES)}
    specs = [RolloutSpec(id=one, input=tasks[at], mode="test", config=pins) for one, at in names.items()]
    _ = await client.enqueue(specs)
    await penstock("run", "--mode", "test", "--gateway", url, *RUN)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for one, at in names.items():
        reward = (await client.rollout(one)).reward
        assert reward is not None
        found[str(at)].append(reward)
    return found


if __name__ == "__main__":
    main()
