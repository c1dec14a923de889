"""`make demo-rl`: an unmodified agent gets better, on two CPU cores, in some minutes, without a network.

    python -m examples.lookup_rl [--seed 0] [--steps 20] [--out DIRECTORY]

A tiny model is made and warmed up by our own fine-tuning; greedily it calls the wrong tool. Then everything is the real
thing: a gateway, vLLM with versioned LoRA adapters, `penstock run` with the agent of `examples/lookup.py`, and
`penstock train grpo`. What it prints is the reward on questions that were never trained on, asked greedily.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerFast

from examples.lookup import TOPICS, tasks
from examples.lookup_model import lessons, write_model, write_tokenizer
from penstock.gateway.client.client import Client, ClientError
from penstock.trainer.config import Config
from penstock.trainer.data.chat_template import tokenise
from penstock.trainer.engines.local import Engine
from penstock.trainer.mathematics.examples import Example
from penstock.trainer.mathematics.sft import train, updates
from penstock.trainer.serving.child_process import spawn

ROOT = Path(__file__).parents[1]
MOST_LAPS, TAUGHT = 3, 0.03
"""How often the model goes through the lessons, and the loss from which it answers in their form: half of that is the
tool, which they do not tell. Some starts take longer."""
HELD_OUT = 3
"""Cities of each topic that are never asked about in training."""

GATEWAY = """\
port = {port}
data = "{home}/tape"

[[upstream]]
name = "vllm"
base_url = "http://127.0.0.1:{vllm}/v1"

[[route]]
model = "policy"
upstream = ["vllm"]
train = true
"""
TRAIN = """\
[run]
name = "lookup"
directory = "{home}/run"
steps = {steps}
seed = {seed}
checkpoint_every = 5

[model]
path = "{home}/model"
name = "policy"
rank = 16

[rollouts]
tasks = "{home}/train.jsonl"
groups = 12
group_size = 8
ahead = true
timeout = 120.0
run = ["--workers=20", "--callable=examples.lookup:agent", "--preload", "--reward=examples.lookup:reward"]

[optimiser]
learning_rate = 2e-3
schedule = "cosine"

[inference]
python = "{python}"
port = {vllm}
flags = [
    "--dtype=float32", "--enforce-eager", "--max-model-len=512", "--max-num-seqs=32",
    "--enable-auto-tool-choice", "--tool-call-parser=hermes",
]

[evaluate]
tasks = "{home}/held-out.jsonl"
every = 5
"""


def main() -> None:
    """The demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    asked = parser.parse_args()
    if not asked.vllm.exists():
        sys.exit(f"{asked.vllm} does not exist: `make install-vllm` installs vLLM (3.4 GB)")
    with nullcontext(asked.out) if asked.out else tempfile.TemporaryDirectory(prefix="penstock-rl-") as given:
        home = Path(given).absolute()
        prepare(home, asked.seed)
        asyncio.run(demo(home, asked.vllm, asked.seed, asked.steps))


def prepare(home: Path, seed: int) -> None:
    """The tasks, and the model unless it is there."""
    home.mkdir(parents=True, exist_ok=True)
    write_tasks(home, seed)
    if not (home / "model").exists():
        warm_up(home, seed)


async def demo(home: Path, python: Path, seed: int, steps: int) -> None:
    """All of it, below a directory that was prepared."""
    port, vllm = free_ports(2)
    words: dict[str, Any] = {"home": home, "python": python, "port": port, "vllm": vllm, "steps": steps, "seed": seed}
    (home / "penstock.toml").write_text(GATEWAY.format(**words))
    (home / "train.toml").write_text(TRAIN.format(**words))
    url = f"http://127.0.0.1:{port}"
    serve = [sys.executable, "-m", "penstock", "serve", "--config", str(home / "penstock.toml")]
    gateway = await spawn(serve, os.environ, home / "gateway.log")
    try:
        await ready(url)
        command = [sys.executable, "-m", "penstock", "train", "grpo", str(home / "train.toml"), "--gateway", url]
        trainer = await spawn(command, os.environ, None)
        try:
            done = await trainer.ended()
        finally:
            await trainer.stop()
        if done:
            sys.exit(done)
        await tell(url, home)
    finally:
        await gateway.stop()


def write_tasks(home: Path, seed: int) -> None:
    """Questions to train on, sampled, and others to be judged by, asked greedily."""
    rng = random.Random(seed)
    held = {(one["topic"], one["city"]) for topic in TOPICS for one in rng.sample(_about(topic), HELD_OUT)}
    parts = {
        "train.jsonl": [one for one in tasks(1.0) if (one["topic"], one["city"]) not in held],
        "held-out.jsonl": [one for one in tasks(0.0) if (one["topic"], one["city"]) in held],
    }
    for name, part in parts.items():
        (home / name).write_text("".join(json.dumps(one) + "\n" for one in part))


def _about(topic: str) -> list[dict[str, Any]]:
    return [one for one in tasks(0.0) if one["topic"] == topic]


def warm_up(home: Path, seed: int) -> None:
    """Makes the model: random weights, then what the lessons teach, as often as it takes."""
    source = home / "raw"
    source.mkdir(exist_ok=True)
    tokenizer: PreTrainedTokenizerFast = write_tokenizer(source)
    write_model(source, seed)
    examples, left = tokenise(lessons(24_000, seed), tokenizer)
    assert not left, left[0]
    for lap in range(MOST_LAPS):
        made = home / f"lap-{lap}"
        shutil.rmtree(made, ignore_errors=True)
        loss = teach(source, made, examples, seed)
        source = made
        if loss < TAUGHT:
            break
    source.rename(home / "model")


def teach(source: Path, made: Path, examples: Sequence[Example], seed: int) -> float:
    """A model that has gone through the lessons once more, and its loss at the end; nats a token."""
    tree = {
        "run": {"seed": seed, "steps": 1},
        "model": {"path": str(source), "weights": "full"},
        "optimiser": {"learning_rate": 3e-3, "warmup": 20, "schedule": "cosine"},
        "engine": {"batch_tokens": 2048},
        "data": {"batch": 64},
    }
    config = Config.model_validate(tree)
    engine = Engine(config, updates=updates(examples, config))
    lately: deque[float] = deque(maxlen=25)
    for number, report in enumerate(train(engine, examples)):
        lately.append(report["loss"])
        if number % 25 == 0:
            print(f"warm-up {number}: loss {report['loss']:.3f}", file=sys.stderr, flush=True)
    engine.save_model(made)
    return fmean(lately)


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


async def ready(url: str) -> None:
    """Until the gateway answers."""
    async with asyncio.timeout(60), Client(url) as client:
        while True:
            try:
                _ = await client.stats(spans=0)
                return
            except ClientError:
                await asyncio.sleep(0.1)


async def tell(url: str, home: Path) -> None:
    """What came of it."""
    async with Client(url) as client:
        (curve,) = await client.curves("lookup", ["evaluation/reward"])
    values = [
        f"{step}: {value:.2f}" for step, value in zip(curve.first_step, curve.mean, strict=True) if value is not None
    ]
    print("held-out questions answered rightly, asked greedily, by step: " + ", ".join(values))
    runs = [sys.executable, "-m", "penstock", "runs"]
    plot = [*runs, "plot", "lookup", "--gateway", url, "--out", str(home / "run.html")]
    points = [*runs, "export", "lookup", "--to", "jsonl", "--gateway", url, "--output", str(home / "run.jsonl")]
    for command in (plot, points):
        _ = await (await spawn(command, os.environ, None)).ended()


if __name__ == "__main__":
    main()
