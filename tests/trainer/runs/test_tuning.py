"""Supervised fine-tuning and preferences: they learn, and preferences have the gradient of their whole loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

import torch
from fakes.tiny_model import VOCABULARY, config
from fakes.training import example, random_examples
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics import update
from penstock.trainer.mathematics.batch import TokenExample, micro_batches

SMALL = {"batch_tokens": 40}


def test_supervised_fine_tuning_learns_what_is_marked(model: Path) -> None:
    chosen = config(model, data={"batch": 2, "epochs": 12})
    examples = [
        example("a", [1, 2], [3, 4, 5], [1, 0, 1]),
        example("b", [6], [7, 8], [1, 1]),
        example("c", [9], [10], [1]),
    ]
    engine = TrainingEngine(chosen, updates=update.sft_updates(examples, chosen))
    before = engine.logprobs(micro_batches(examples, 64, "packed")[0])
    reports = list(update.train_sft(engine, examples))
    assert len(reports) == engine.updates == 24
    after = engine.logprobs(micro_batches(examples, 64, "packed")[0])
    assert after.mean() > 0.5 * before.mean()
    assert reports[-1]["loss"] < 0.5 * reports[0]["loss"]


def test_tuning_goes_on_where_it_was(model: Path) -> None:
    chosen = config(model, data={"batch": 2, "epochs": 2})
    examples = random_examples(5, VOCABULARY)
    whole = TrainingEngine(chosen, updates=6)
    reports = list(update.train_sft(whole, examples))
    first = TrainingEngine(chosen, updates=6)
    begun = update.train_sft(first, examples)
    assert [next(begun) for _ in range(4)] == reports[:4]
    second = TrainingEngine(chosen, updates=6)
    second.restore(first.state())
    assert list(update.train_sft(second, examples)) == reports[4:]


def pairs() -> list[update.PairSides]:
    """Two pairs; the first chosen rollout is in two pieces, the second pair shares a rollout with the first."""
    pieces = [example("a", [1, 2], [3, 4], [1, 1]), example("a", [1, 2, 3], [5], [1])]
    worse, other = [example("b", [1, 2], [6, 7, 8], [1, 0, 1])], [example("c", [9], [10, 11], [1, 1])]
    return [(pieces, worse), (other, worse)]


def naive(model: Path, given: Sequence[update.PairSides], beta: float) -> tuple[dict[str, Tensor], float]:
    """Gradients and loss of the whole at once, where the reference is the model itself."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def total(side: Sequence[TokenExample]) -> Tensor:
        found: list[Tensor] = []
        for one in side:
            ids = torch.tensor([*one.prompt.tolist(), *one.response.tolist()])
            logprobs = torch.log_softmax(network(input_ids=ids[None]).logits[0, :-1], -1)
            found.append(logprobs.gather(1, ids[1:, None])[len(one.prompt) - 1 :, 0][torch.from_numpy(one.mask)])
        return torch.cat(found).sum()

    losses: list[Tensor] = []
    for chosen, rejected in given:
        gaps = [now - now.detach() for now in (total(chosen), total(rejected))]
        losses.append(-logsigmoid(beta * (gaps[0] - gaps[1])))
    loss = torch.stack(losses).mean()
    loss.backward()
    return {name: one.grad for name, one in network.named_parameters() if one.grad is not None}, loss.item()


def test_preferences_have_the_gradient_of_the_whole_loss(model: Path) -> None:
    """Though the micro-batches hold one example each."""
    expected, loss = naive(model, pairs(), 0.3)
    engine = TrainingEngine(config(model, model={"weights": "full"}, dpo={"beta": 0.3}, engine={"batch_tokens": 6}))
    found: dict[str, Tensor] = {}
    real = engine._update

    def kept() -> dict[str, float]:
        found.update({name: one.grad.clone() for name, one in engine.model.trained.items() if one.grad is not None})
        return real()

    engine._update = kept
    report = update.dpo_step(engine, pairs(), update.dpo_reference(engine, pairs()))
    assert report["loss"] == pytest.approx(loss, abs=1e-6)
    assert report["accuracy"] == 0
    largest = max(float(one.abs().max()) for one in expected.values())
    for name, one in expected.items():
        assert float((found[name] - one).abs().max()) <= 1e-5 * largest, name


def test_preferences_are_learnt(model: Path) -> None:
    chosen = config(model, data={"batch": 1, "epochs": 8}, engine=SMALL)
    engine = TrainingEngine(chosen, updates=update.dpo_updates(pairs(), chosen))
    before = update.dpo_reference(engine, pairs())
    assert update.evaluate_dpo(engine, pairs(), before)["loss"] == pytest.approx(0.693147, abs=1e-6)
    reports = list(update.train_dpo(engine, pairs(), before))
    assert len(reports) == 16
    assert reports[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    # An engine that has done fifteen of them has one to go.
    engine.done = 15
    assert len(list(update.train_dpo(engine, pairs(), before))) == 1
    assert reports[-1]["loss"] < 0.4
    assert reports[-1]["accuracy"] == 1


def test_the_reference_is_the_policy_that_the_run_finds(model: Path, tmp_path: Path) -> None:
    """An adapter that it begins with is part of it."""
    learnt = TrainingEngine(config(model, data={"batch": 2}))
    for _ in range(3):
        update.dpo_step(learnt, pairs(), update.dpo_reference(learnt, pairs()))
    learnt.save_adapter(tmp_path / "adapter")
    base = update.dpo_reference(TrainingEngine(config(model)), pairs())
    later = TrainingEngine(config(model, model={"adapter": tmp_path / "adapter"}, data={"batch": 2}))
    before = update.dpo_reference(later, pairs())
    assert not torch.allclose(before, base, atol=1e-2)
    assert update.dpo_step(later, pairs(), before)["loss"] == pytest.approx(0.693147, abs=1e-6)


def test_what_preferences_cannot_use_is_said(model: Path) -> None:
    engine = TrainingEngine(config(model))
    with pytest.raises(ValueError, match="no examples on one of its sides"):
        update.dpo_reference(engine, [(pairs()[0][0], [])])


def test_what_is_held_out_is_only_looked_at(model: Path) -> None:
    engine = TrainingEngine(config(model))
    examples = random_examples(5, VOCABULARY)
    before = engine.state()["weights"]
    (batch,) = micro_batches(examples, 1000, "packed")
    expected = -float((torch.from_numpy(batch.weights) * engine.logprobs(batch)).sum())
    assert update.evaluate_sft(engine, examples)["loss"] == pytest.approx(expected, rel=1e-5)
    assert engine.done == 0
    assert all(torch.equal(one, before[name]) for name, one in engine.model.trained.items())
