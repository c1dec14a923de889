"""Log-probabilities made in pieces are those of whole logits, gradients too, and memory does not grow with tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

import torch
from fakes.lives import fork
from fakes.tiny_model import VOCABULARY, config, make_model, peak
from fakes.training import random_examples
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM

from penstock.trainer.engines import policy
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.batch import micro_batches


def learnt(path: Path, layout: Any, **sections: Any) -> tuple[list[Tensor], dict[str, Tensor], dict[str, float]]:
    """(log-probabilities of all batches, gradients by name, metrics) at once and backwards."""
    engine = TrainingEngine(config(path, engine={"layout": layout}, rollouts={"temperature": 0.7}, **sections))
    batches = engine.prepare(micro_batches(random_examples(6, VOCABULARY), 256, layout))
    tally = engine.accumulate(batches, engine.policy_objective())
    gradients = {name: one.grad for name, one in engine.model.trained.items() if one.grad is not None}
    return [engine.logprobs(batch) for batch in batches], gradients, tally.report()


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("weights", ["lora", "full"])
def test_pieces_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, weights: str) -> None:
    path, sections = make_model(tmp_path, tie_word_embeddings=True), {"model": {"weights": weights}}
    whole = learnt(path, layout, **sections)
    monkeypatch.setattr(policy, "LOGITS", 3 * VOCABULARY)
    pieces = learnt(path, layout, **sections)
    for one, other in zip(whole[0], pieces[0], strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=0)
    largest = max(float(one.abs().max()) for one in whole[1].values())
    assert whole[1].keys() == pieces[1].keys()
    for name, one in whole[1].items():
        assert float((pieces[1][name] - one).abs().max()) <= 1e-5 * largest, name
    assert pieces[2] == pytest.approx(whole[2], rel=1e-4, abs=1e-6)


def test_a_model_that_bends_its_logits_is_not_done_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "final_logit_softcapping": 5.0,
    }  # fmt: skip
    torch.manual_seed(1)
    Gemma2ForCausalLM(Gemma2Config(**sizes)).save_pretrained(tmp_path)
    whole = learnt(tmp_path, "padded")
    monkeypatch.setattr(policy, "LOGITS", 3 * VOCABULARY)
    pieces = learnt(tmp_path, "padded")
    for one, other in zip(whole[0], pieces[0], strict=True):
        torch.testing.assert_close(other, one)


def measured(path: Path, tokens: int) -> int:
    with fork(peak, path, tokens) as (_, says):
        return says.recv()


@pytest.mark.timeout(300)
def test_memory_does_not_grow_with_tokens(tmp_path: Path) -> None:
    path = make_model(tmp_path, vocab_size=150_000, hidden_size=8, num_hidden_layers=1)
    few, many = measured(path, 256), measured(path, 1024)
    # Whole, the logits alone would be 440 MiB more, and their gradients as much again.
    assert many - few < 200, (few, many)
