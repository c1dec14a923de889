"""`make demo-rl`: an unmodified agent gets better, on two CPU cores, in a quarter of an hour, without a network.

    python -m examples.lookup_rl [--seed 0] [--steps 20] [--out DIRECTORY]

A tiny model is made and warmed up by our own fine-tuning; greedily it calls the wrong tool. Then everything is the real
thing: a gateway, vLLM with versioned LoRA adapters, `penstock run` with the agent of `examples/lookup.py`, and
`penstock train grpo`. It closes with the reward on questions that were never trained on, asked greedily.

All that it makes stays in a new folder below `penstock-data/demo-rl`. With `--out` it goes on with what is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any, Final

from examples.lookup import TOPICS, tasks
from examples.lookup_summary import Results, summary
from penstock.gateway.client.child_process import spawn
from penstock.gateway.client.client import Client, ClientError

ROOT: Final = Path(__file__).parents[1]
KEPT: Final = ROOT / "penstock-data" / "demo-rl"
"""Where results are kept; git ignores it."""
HELD_OUT: Final = 26
"""Cities of each topic that are never asked about in training; 104 questions."""

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
every = 5

[[evaluate.suite]]
tasks = "{home}/held-out.jsonl"
"""


def main() -> None:
    """The demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="go on with this folder, or make it; a new one if not given")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    asked = parser.parse_args()
    if not asked.vllm.exists():
        sys.exit(f"{asked.vllm} does not exist: `make install-vllm` installs vLLM (3.4 GB)")
    home: Path = (asked.out or new_folder(KEPT, asked.seed)).absolute()
    began = time.monotonic()
    say(f"All results go to {home}, where they stay.")
    try:
        prepare(home, asked.seed)
        made = time.monotonic()
        found = asyncio.run(demo(home, asked.vllm, asked.seed, asked.steps))
    except KeyboardInterrupt:
        sys.exit(f"Stopped. `--seed {asked.seed} --out {home}` goes on with it.")
    told = "\n".join(summary(found, home, sys.executable, made - began, time.monotonic() - made))
    (home / "summary.txt").write_text(told + "\n", encoding="utf-8")
    print("\n" + told)


def say(text: str) -> None:
    """Tells a person what comes next."""
    print(text, file=sys.stderr, flush=True)


def new_folder(parent: Path, seed: int) -> Path:
    """The first folder for a seed that is not there yet."""
    names = (f"seed-{seed}" if number == 1 else f"seed-{seed}.{number}" for number in count(1))
    return next(folder for name in names if not (folder := parent / name).exists())


def prepare(home: Path, seed: int) -> None:
    """The tasks, and the model unless it is there."""
    home.mkdir(parents=True, exist_ok=True)
    write_tasks(home, seed)
    if not (home / "model").exists():
        say("A model of a million parameters is made, and taught the form of the answers; some minutes.")
        # It imports torch, which takes seconds: whoever waits has been told of the folder before.
        from examples.lookup_model import warm_up

        warm_up(home, seed)


async def demo(home: Path, python: Path, seed: int, steps: int) -> Results:
    """The training, below a directory that was prepared."""
    port, vllm = free_ports(2)
    words: dict[str, Any] = {"home": home, "python": python, "port": port, "vllm": vllm, "steps": steps, "seed": seed}
    (home / "penstock.toml").write_text(GATEWAY.format(**words))
    (home / "train.toml").write_text(TRAIN.format(**words))
    url = f"http://127.0.0.1:{port}"
    say(f"A gateway is started at {url}, then the trainer, which starts vLLM and {steps} steps.")
    serve = [sys.executable, "-m", "penstock", "serve", "--config", str(home / "penstock.toml")]
    gateway = await spawn(serve, os.environ, home / "gateway.log")
    try:
        await ready(url)
        command = [sys.executable, "-m", "penstock", "train", "grpo", str(home / "train.toml"), "--gateway", url]
        trainer = await spawn(command, os.environ, None)
        try:
            done = await trainer.wait()
        finally:
            await trainer.stop()
        if done:
            sys.exit(f"The training ended with {done}. `--seed {seed} --out {home}` goes on with it.")
        return await results(url, home)
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


async def results(url: str, home: Path) -> Results:
    """What came of it; a plot and all figures beside."""
    async with Client(url) as client:
        (curve,) = await client.curves("lookup", ["evaluation/held-out/reward"])
    runs = [sys.executable, "-m", "penstock", "runs"]
    plot = [*runs, "plot", "lookup", "--gateway", url, "--out", str(home / "run.html")]
    points = [*runs, "export", "lookup", "--to", "jsonl", "--gateway", url, "--output", str(home / "run.jsonl")]
    for command in (plot, points):
        if await (await spawn(command, os.environ, home / "gateway.log")).wait():
            sys.exit(f"`{' '.join(command)}` has failed: see {home / 'gateway.log'}")
    shares = {step: value for step, value in zip(curve.first_step, curve.mean, strict=True) if value is not None}
    questions = (home / "held-out.jsonl").read_text(encoding="utf-8").splitlines()
    return Results(shares, len(questions), url)


if __name__ == "__main__":
    main()
