"""`penstock train grpo` with `engine.kind = "verl"`: the same rollouts, and the metrics of the local engine.

Real are the trainer, its two ranks, the gateway, the runner and its agents, each a process of its own. The vLLM is
scripted: what it answers follows from the version and the question, so both runs learn from the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-verl`, then `make test-verl`")
pytest.importorskip("tensordict", reason="there is no verl here: `make install-verl`, then `make test-verl`")

from fakes.ports import steady_ports
from fakes.process import running
from fakes.tiny_model import make_model
from fakes.vllm_process import install

from penstock.gateway.client.client import Client

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
STEPS, GROUPS, SIZE = 2, 2, 3
RUNNER = ["--workers=6", "--callable=fakes.asking:agent", "--preload", "--reward=fakes.asking:reward"]
LEARNT = ("reward", "loss", "entropy", "grad_norm", "tokens", "samples", "ratio", "mismatch_k1", "mismatch_max")
"""Metrics that follow from what the rollouts said and from the weights, and from nothing else."""
GATEWAY = """
[[upstream]]
name = "vllm"
base_url = "http://127.0.0.1:{port}/v1"

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

[model]
path = "{model}"
rank = 4

[rollouts]
tasks = "{home}/tasks.jsonl"
groups = {groups}
group_size = {size}
run = {run}

[optimiser]
learning_rate = 0.01

[engine]
batch_tokens = 64
{engine}

[inference]
python = "{python}"
port = {port}
flags = ["--hold={home}/hold"]
"""


def staged(home: Path, model: Path, engine: str) -> int:
    """Everything that a run needs in its directory; the port of its vLLM. `engine`: more lines for `[engine]`."""
    home.mkdir()
    (port,) = steady_ports(1)
    (home / "tasks.jsonl").write_text("".join(json.dumps({"question": f"q{n}"}) + "\n" for n in range(4)))
    words: dict[str, Any] = {"home": home, "model": model, "python": install(home), "port": port, "engine": engine}
    words |= {"run": RUNNER, "steps": STEPS, "groups": GROUPS, "size": SIZE}
    (home / "train.toml").write_text(TRAIN.format(**words))
    return port


async def trained(home: Path, model: Path, engine: str) -> list[dict[str, float | None]]:
    """A whole run; what every step of it came to."""
    port = staged(home, model, engine)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    # One thread, as ranks have; Ray's workers do not stand back behind everybody.
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    async with running(home / "gateway", GATEWAY.format(port=port)) as gateway:
        command = (
            sys.executable,
            "-m",
            "penstock",
            "train",
            "grpo",
            str(home / "train.toml"),
            "--gateway",
            gateway.url,
        )
        process = await asyncio.create_subprocess_exec(
            *command, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        assert process.returncode == 0, said.decode()
        async with Client(gateway.url) as client:
            return [{name: point.values[name] for name in LEARNT} async for point in client.points("run") if point.step]


async def test_a_run_is_that_of_the_local_engine(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    async with asyncio.TaskGroup() as both:
        local = both.create_task(trained(tmp_path / "local", model, ""))
        verl = both.create_task(trained(tmp_path / "verl", model, 'kind = "verl"\nranks = 2'))
    expected = local.result()
    assert len(expected) == STEPS
    for one, other in zip(verl.result(), expected, strict=True):
        assert other["loss"]
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    adapters = [
        sorted(path.name for path in (tmp_path / name / "run" / "adapters").iterdir()) for name in ("local", "verl")
    ]
    assert adapters[0] == adapters[1] == [f"run.{step}" for step in range(STEPS + 1)]
