"""All weights are trained and served, for real: two vLLMs, a real gateway, a runner, and the trainer that starts them.

Each version's own directory says afterwards what its log-probabilities must have been: weights that are older, or what
a cache has kept of them, would be seen. The questions begin with more text than a block of the cache holds.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, `make test-train`")

import numpy as np
import torch
from fakes.ports import steady_ports
from fakes.process import running, vllms
from fakes.settings import Sections, merged, toml
from fakes.staging import AGENT, address, served, settings, trained, write_tasks
from transformers import AutoModelForCausalLM

from examples.lookup_model import write_model, write_tokenizer
from penstock.adapters.samples import Options, Sample, samples
from penstock.adapters.source import load
from penstock.gateway.client.client import Client

STEPS = 3
"""Each of the two serves two versions."""
LONG = "How many people live in Oslo, and how many bridges does it have? " * 12


@pytest.mark.timeout(1800)
async def test_every_version_is_served_as_it_is_and_by_the_server_whose_turn_it_is(
    tmp_path: Path, vllm_python: Path
) -> None:
    ports = steady_ports(2)
    prepare(tmp_path, vllm_python, ports)
    async with running(tmp_path / "gateway", vllms(*map(address, ports))) as gateway, Client(gateway.url) as client:
        await trained(tmp_path, gateway.url)
        await check_turns(client)
        found = await sampled(client)
        points = [point.values async for point in client.points("run") if point.step]
    # What the trainer has seen itself: its samples are of the weights that it has.
    assert [point["staleness/max"] for point in points] == [0.0] * STEPS
    assert all(float(point["mismatch_max"] or 1) < 1e-3 for point in points)
    check_weights(tmp_path / "run" / "models", found)


def prepare(home: Path, python: Path, ports: list[int]) -> None:
    """A model that knows nothing, and tasks."""
    (home / "model").mkdir()
    write_tokenizer(home / "model")
    write_model(home / "model", seed=0)
    write_tasks(home, *(f"{LONG} {number}" for number in range(4)))
    own: Sections = {
        "model": {"weights": "full"},
        "rollouts": {"groups": 4, "group_size": 4, "run": ["--workers=8", *AGENT]},
        "optimiser": {"learning_rate": 1e-3},
        "inference": {
            "python": python,
            "flags": ["--dtype=float32", "--enforce-eager", "--max-model-len=512", "--max-num-seqs=8"],
        },
        "evaluate": {"suite": [{"tasks": home / "tasks.jsonl"}]},
    }
    (home / "train.toml").write_text(toml(merged(settings(home, home / "model", ports, STEPS), own)))


async def check_turns(client: Client) -> None:
    """One version a step, one server after the other, and nothing of a version on the other server."""
    versions = {one.version: one.content["upstream"] for one in (await client.resource("policy")).versions}
    turns = {f"run.{step}": ("vllm", "vllm-2")[step % 2] for step in range(STEPS + 1)}
    assert versions == {"base": "vllm"} | turns
    seen = await served(client, "kind:llm")
    steps = [("train", step, step - 1) for step in range(1, STEPS + 1)] + [("val", 0, 0), ("val", STEPS, STEPS)]
    assert seen == {(mode, step): {(f"run.{it}", turns[f"run.{it}"])} for mode, step, it in steps}


async def sampled(client: Client) -> dict[str, list[Sample]]:
    """Samples by the version that they are of."""
    found: defaultdict[str, list[Sample]] = defaultdict(list)
    async for episode in load(client, client.rollouts("status:succeeded")):
        made, _ = samples(episode, Options(model="policy"))
        (version,) = {pin.version for pin in await client.pins(episode.rollout.id)}
        found[version] += made
    return found


def check_weights(directory: Path, found: dict[str, list[Sample]]) -> None:
    """Log-probabilities of the servers are those of the weights in the version's directory, and of no other."""
    assert sorted(found) == [f"run.{step}" for step in range(STEPS + 1)]
    models = {name: AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32) for name in found}
    for version, made in found.items():
        apart = {name: max(distance(model, one) for one in made) for name, model in models.items()}
        assert apart.pop(version) < 1e-3
        # Weights of another version would be noticed.
        assert min(apart.values()) > 1e-2, (version, apart)


def distance(model: Any, sample: Sample) -> float:
    """Largest difference between the log-probabilities of a sample and a model's, in nats."""
    ids = torch.from_numpy(np.concatenate([sample.prompt, sample.response])).long()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None]).logits[0], -1)
    places = torch.arange(len(sample.prompt), len(ids))
    chosen = logprobs[places - 1, ids[places]].numpy()
    return float(np.abs(chosen - sample.logprobs)[sample.mask].max())
