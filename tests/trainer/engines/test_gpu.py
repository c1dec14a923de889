"""On a GPU the engine computes what it computes on a CPU. Skipped where there is none: CI has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

import torch
from fakes.tiny_model import VOCABULARY, config
from fakes.training import random_examples
from torch import Tensor

from penstock.trainer.engines.checkpoint import Checkpoints
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.engines.policy import describe_machine
from penstock.trainer.mathematics.batch import micro_batches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture
def no_gpu() -> None:
    """There is one, other than in other tests."""


def learnt(path: Path, layout: Any, **sections: Any) -> tuple[TrainingEngine, dict[str, Tensor], dict[str, float]]:
    """(the engine, its gradients by name, metrics)."""
    engine = TrainingEngine(config(path, **sections))
    batches = engine.prepare(micro_batches(random_examples(6, VOCABULARY), 64, layout))
    report = engine.accumulate(batches, engine.policy_objective()).report()
    return engine, {name: one.grad for name, one in engine.model.trained.items() if one.grad is not None}, report


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("weights", ["lora", "full"])
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "pg"])
def test_gradients_are_those_of_a_cpu(
    model: Path, monkeypatch: pytest.MonkeyPatch, kind: str, weights: str, layout: str
) -> None:
    sections: dict[str, Any] = {"model": {"weights": weights}, "loss": {"kind": kind, "kl": 0.1}}
    engine, found, said = learnt(model, layout, **sections)
    assert engine.model.device.type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, expected, wanted = learnt(model, layout, **sections)
    largest = max(float(one.abs().max()) for one in expected.values())
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert float((found[name].cpu() - one).abs().max()) <= 1e-5 * largest, name
    assert said == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_leads_to_an_adapter_and_a_checkpoint_that_load_again(model: Path, tmp_path: Path, dtype: str) -> None:
    engine = TrainingEngine(config(model, engine={"dtype": dtype}))
    assert torch.cuda.get_device_name() in describe_machine(engine.model)
    batches = micro_batches(random_examples(4, VOCABULARY), 64, "packed")
    assert engine.step(batches, engine.policy_objective())["skipped"] == 0
    engine.save_adapter(tmp_path / "v1")
    again = TrainingEngine(config(model, model={"adapter": tmp_path / "v1"}, engine={"dtype": dtype}))
    assert torch.equal(again.logprobs(batches[0]), engine.logprobs(batches[0]))
    kept = Checkpoints(tmp_path / "checkpoints")
    kept.save(1, engine.state())
    found = kept.latest()
    assert found is not None
    again.restore(found[1])
    for one in (engine, again):
        one.step(batches, one.policy_objective())
    assert torch.allclose(
        again.logprobs(batches[0]), engine.logprobs(batches[0]), atol=1e-4 if dtype == "float32" else 0.1
    )
