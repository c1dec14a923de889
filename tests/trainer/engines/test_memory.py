"""A GPU whose memory does not suffice, and what a checkpoint of a larger machine leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

import torch
from fakes.tiny_model import VOCABULARY, config
from fakes.training import random_examples

from penstock.trainer.engines import EngineError, policy
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.batch import micro_batches


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_too_little_memory_is_a_sentence_that_says_what_to_change(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TrainingEngine(config(model, loss={"kl": 0.1}))
    batches = micro_batches(random_examples(2, VOCABULARY), 64, "packed")
    prepared = engine.prepare(batches)
    monkeypatch.setattr(engine.model, "_scored", full)
    wanted = r"lower engine\.batch_tokens \(now 64\), or set .*checkpointing = true, or set .*dtype = .* 2\.00 GiB"
    with pytest.raises(EngineError, match=wanted):
        engine.step(prepared, engine.policy_objective())
    with pytest.raises(EngineError, match=wanted):
        engine.prepare(batches)
    with pytest.raises(EngineError, match=wanted):
        engine.logprobs(batches[0])


def test_what_is_done_already_is_not_advised(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_pretrained", full)
    with pytest.raises(EngineError, match=r"\(now 64\), and see what else is on the GPU"):
        TrainingEngine(config(model, engine={"dtype": "bfloat16", "gradient_checkpointing": True}))


def test_random_states_of_more_gpus_than_there_are_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.extend)
    policy.restore(policy.state() | {"cuda": ["first", "second"]})
    assert given == ["first"]
