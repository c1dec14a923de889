"""Where a run computes, and what that machine can do."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

import torch
from fakes.tiny_model import config, make_model

from penstock.trainer.engines.local import Engine
from penstock.trainer.engines.machine import described


def test_a_machine_without_a_gpu_says_what_it_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = Engine(config(make_model(tmp_path))).model
    size = sum(one.numel() for one in model.network.parameters())
    assert f"{size / 1e3:.0f} k" in described(model)
    assert described(model).startswith("there is no usable GPU here: computes on the CPU (threads: 1); for ")
    assert "tokens a second" in described(model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert described(model).startswith("computes on the CPU")
