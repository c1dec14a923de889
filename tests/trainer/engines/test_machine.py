"""Where a run computes, and what that machine can do."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

import torch
from fakes.tiny_model import config, make_model

from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.engines.policy import describe_machine


def test_a_machine_without_a_gpu_says_what_it_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = TrainingEngine(config(make_model(tmp_path))).model
    size = sum(one.numel() for one in model.network.parameters())
    assert f"{size / 1e3:.0f} k" in describe_machine(model)
    assert "no usable GPU here: computes on the CPU (threads: 1); for " in describe_machine(model)
    assert "tokens a second" in describe_machine(model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert describe_machine(model).startswith("computes on the CPU")


def test_a_gpu_is_named_and_float32_is_called_slow_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def name(_: torch.device) -> str:
        return "a GPU"

    monkeypatch.setattr(torch.cuda, "get_device_name", name)
    for dtype, ends in (
        ("float32", 'parameters, in float32: engine.dtype = "bfloat16" is several times faster'),
        ("bfloat16", "parameters"),
    ):
        policy = TrainingEngine(config(model, engine={"dtype": dtype})).model
        policy.device = torch.device("cuda")
        assert describe_machine(policy).startswith("computes on a GPU: ")
        assert describe_machine(policy).endswith(ends)
