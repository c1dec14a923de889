"""The engine against the plainest loop there is: one example at a time, no packing, no micro-batches, torch's autograd.

Float32 sums in another order differ in the last bits: gradients are compared to 1e-5 of their largest,
log-probabilities to 1e-5 nats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

import numpy as np
import torch
from fakes.tiny_model import VOCABULARY, config, make_model
from fakes.training import example, random_examples, sample
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import AdvantageSettings, OptimiserSettings, TrainConfig
from penstock.trainer.engines import CheckpointError, EngineError
from penstock.trainer.engines.local import TrainingEngine, schedule
from penstock.trainer.mathematics.advantage import credit
from penstock.trainer.mathematics.batch import TokenExample, micro_batches

LAYOUTS = ("packed", "padded")
FULL: dict[str, Any] = {"weights": "full"}


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), request.param)


def full(path: Path, **sections: Any) -> TrainConfig:
    return config(path, **({"model": FULL} | sections))


def gradients(
    engine: TrainingEngine, examples: Sequence[TokenExample], tokens: int, layout: Any
) -> tuple[dict[str, Tensor], float]:
    """(gradients by name, loss) of the configured policy loss."""
    batches = engine.prepare(micro_batches(examples, tokens, layout))
    engine.optimiser.zero_grad()
    tally = engine.accumulate(batches, engine.policy_objective())
    # What no token reaches has none.
    made = {name: one.grad.clone() for name, one in engine.model.trained.items() if one.grad is not None}
    return made, tally.report()["loss"]


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    largest = max(float(one.abs().max()) for one in expected.values())
    assert largest > 0
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert float((found[name] - one).abs().max()) <= 1e-5 * largest, name


def naive(path: Path, examples: Sequence[TokenExample]) -> tuple[dict[str, Tensor], float]:
    """Gradients and loss of truncated importance sampling with PPO at ratio 1, as a newcomer would write it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    owners = {one.owner for one in examples}
    total = 0.0
    for one in examples:
        ids = torch.tensor([*one.prompt.tolist(), *one.response.tolist()])
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        trained = sum(int(other.mask.sum()) for other in examples if other.owner == one.owner)
        loss = torch.zeros(())
        for place in np.flatnonzero(one.mask).tolist():
            at = len(one.prompt) + place
            now = logprobs[at - 1, ids[at]]
            ratio = (now - now.detach()).exp()
            u = min(float((now.detach() - float(one.behaviour[place])).exp()), 2.0)
            loss = loss - u * ratio * float(one.advantages[place]) / (len(owners) * trained)
        loss.backward()
        total += loss.item()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}, total


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_plain_loop(path: Path, layout: str) -> None:
    examples = random_examples(6, VOCABULARY)
    expected, loss = naive(path, examples)
    engine = TrainingEngine(full(path))
    for tokens in (24, 64, 4096):
        found, value = gradients(engine, examples, tokens, layout)
        assert value == pytest.approx(loss, abs=1e-5)
        close(found, expected)


def test_checkpointed_activations_change_nothing(model: Path) -> None:
    examples = random_examples(6, VOCABULARY)
    kept = gradients(TrainingEngine(config(model)), examples, 64, "packed")
    again = TrainingEngine(config(model, engine={"gradient_checkpointing": True}))
    close(gradients(again, examples, 64, "packed")[0], kept[0])


def test_attention_is_the_same_by_hand(model: Path) -> None:
    (batch,) = micro_batches(random_examples(6, VOCABULARY), 4096, "packed")
    engine = TrainingEngine(config(model))
    chosen = engine.logprobs(batch)
    network: Any = engine.model.network
    network.set_attn_implementation("eager")
    assert torch.allclose(chosen, engine.logprobs(batch), atol=1e-5)


def test_merged_and_unmerged_samples_give_the_same_loss(model: Path) -> None:
    """A rollout of two calls, as one sample and as two: the second's prompt holds all of the first."""
    merged = [sample("a", 1.0, [5, 6], [7, 8, 9], [10], [11])]
    apart = [sample("a", 1.0, [5, 6], [7, 8, 9]), sample("a", 1.0, [5, 6, 7, 8, 9, 10], [11], first=2)]
    other = [sample("b", 0.0, [5, 6], [20, 21])]
    for kind in ("ppo", "gspo", "cispo", "pg"):
        engine = TrainingEngine(config(model, loss={"kind": kind, "correction": "sequence", "kl": 0.1}))
        engine.step(micro_batches(random_examples(4, VOCABULARY), 64, "packed"), engine.policy_objective())
        found = [
            gradients(engine, credit([*samples, *other], AdvantageSettings()).examples, 64, "packed")
            for samples in (merged, apart)
        ]
        assert found[0][1] == pytest.approx(found[1][1], abs=1e-6)
        close(found[1][0], found[0][0])


def test_what_is_masked_has_no_gradient_at_all(model: Path) -> None:
    """Whatever stands there, nan included: bit for bit the same gradients, and none at the logits before it."""
    one = example("a", [1, 2], [3, 4, 5, 6], [1, 0, 0, 1], advantages=[1, 0, 0, 1])
    nan = float("nan")
    odd = replace(
        one, advantages=np.array([1, nan, 1e30, 1], np.float32), behaviour=np.array([-1, nan, 9, -1], np.float32)
    )
    engine = TrainingEngine(full(model))
    first, second = (gradients(engine, [given], 64, "packed")[0] for given in (one, odd))
    assert all(torch.equal(first[name], second[name]) for name in first)
    seen: list[Tensor] = []

    def look(module: Any, inputs: Any, outputs: Any) -> None:
        seen.append(outputs[0])

    network: Any = engine.model.network
    hook = network.get_output_embeddings().register_full_backward_hook(look)
    pair = [one, example("b", [9], [8, 8, 8], [0, 0, 1])]
    (batch,) = micro_batches(pair, 64, "padded")
    engine.accumulate([batch], engine.policy_objective())
    hook.remove()
    # Rows are [a, b]; columns 1, 2 and 4 predict the tokens 0 of a, 2 of b and 3 of a.
    reached = seen[0].abs().sum(-1) > 0
    assert reached.tolist() == [[True, False, True], [False, True, False]]


def test_a_group_that_teaches_nothing_changes_nothing(model: Path) -> None:
    engine = TrainingEngine(config(model))
    before = {name: one.clone() for name, one in engine.model.trained.items()}
    zero = [replace(one, advantages=np.zeros_like(one.advantages)) for one in random_examples(4, VOCABULARY)]
    report = engine.step(micro_batches(zero, 64, "packed"), engine.policy_objective())
    assert report["grad_norm"] == 0
    assert all(torch.equal(before[name], one) for name, one in engine.model.trained.items())


def test_nothing_is_dropped_at_random_whatever_an_adapter_was_trained_with(tmp_path: Path) -> None:
    made, adapter = make_model(tmp_path / "model", attention_dropout=0.5), tmp_path / "adapter"
    first = TrainingEngine(config(made))
    with torch.no_grad():
        for one in first.model.trained.values():
            one.add_(0.1)
    first.save_adapter(adapter)
    about = json.loads((adapter / "adapter_config.json").read_text()) | {"lora_dropout": 0.5}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    engine = TrainingEngine(config(made, model={"adapter": adapter}))
    batches = engine.prepare(micro_batches(random_examples(4, VOCABULARY), 64, "packed"), old=True)
    report = engine.step(batches, engine.policy_objective())
    assert report["ratio"] == pytest.approx(1, abs=1e-5)
    assert report["ratio_max"] == pytest.approx(1, abs=1e-4)


def test_tokens_of_another_model_are_a_sentence(model: Path) -> None:
    engine = TrainingEngine(config(model))
    other = [example("a", [1], [2, VOCABULARY], [1, 1])]
    with pytest.raises(EngineError, match=rf"the token {VOCABULARY}, .* has {VOCABULARY}: .*model\.path"):
        engine.step(micro_batches(other, 64, "packed"), engine.policy_objective())


def test_a_gradient_that_is_not_finite_is_skipped(model: Path) -> None:
    engine = TrainingEngine(config(model))
    before = {name: one.clone() for name, one in engine.model.trained.items()}
    bad = [example("a", [1], [2, 3], [1, 1], advantages=[float("inf"), 1])]
    report = engine.step(micro_batches(bad, 64, "packed"), engine.policy_objective())
    assert (report["skipped"], engine.done) == (1, 1)
    assert all(torch.equal(before[name], one) for name, one in engine.model.trained.items())
    assert (
        engine.step(micro_batches(random_examples(4, VOCABULARY), 64, "packed"), engine.policy_objective())["skipped"]
        == 0
    )


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_the_reference_stays_what_the_model_was(model: Path, weights: str) -> None:
    engine = TrainingEngine(config(model, model={"weights": weights}, loss={"kl": 0.1}))
    (batch,) = micro_batches(random_examples(4, VOCABULARY), 4096, "packed")
    first = engine.logprobs(batch)
    assert torch.equal(engine.model.reference(batch), first)
    reports = [engine.step(engine.prepare([batch]), engine.policy_objective()) for _ in range(2)]
    assert [report["kl"] > 0 for report in reports] == [False, True]
    assert torch.equal(engine.model.reference(batch), first)
    assert not torch.allclose(engine.logprobs(batch), first)


def test_a_later_update_is_against_the_start_of_the_step(model: Path) -> None:
    engine = TrainingEngine(config(model, optimiser={"learning_rate": 0.05, "updates": 2}))
    batches = engine.prepare(micro_batches(random_examples(4, VOCABULARY), 64, "packed"), old=True)
    assert engine.step(batches, engine.policy_objective())["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert engine.step(batches, engine.policy_objective())["ratio_max"] > 1.01


def test_an_adapter_loads_in_peft_with_the_same_logits(model: Path, tmp_path: Path) -> None:
    engine = TrainingEngine(config(model))
    engine.save_adapter(tmp_path / "v0")
    ids = torch.arange(12)[None] + 40
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain = base(ids).logits
    # The first version changes nothing: it is the base under another name.
    assert torch.equal(PeftModel.from_pretrained(base, str(tmp_path / "v0"))(ids).logits, plain)
    engine.step(micro_batches(random_examples(4, VOCABULARY), 64, "packed"), engine.policy_objective())
    engine.save_adapter(tmp_path / "v1")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(tmp_path / "v1"))
    engine.model.network.eval()
    assert torch.equal(again(ids).logits, engine.model.network(ids).logits)
    assert not torch.allclose(again(ids).logits, plain)
    assert sorted(one.name for one in (tmp_path / "v1").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    names = load_file(tmp_path / "v1" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    targets = json.loads((tmp_path / "v1" / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)
    with pytest.raises(CheckpointError, match="exists; what was published never changes"):
        engine.save_adapter(tmp_path / "v1")


def test_training_goes_on_from_an_adapter(model: Path, tmp_path: Path) -> None:
    first = TrainingEngine(config(model))
    (batch,) = micro_batches(random_examples(4, VOCABULARY), 4096, "packed")
    first.step([batch], first.policy_objective())
    first.save_adapter(tmp_path / "v1")
    second = TrainingEngine(config(model, model={"adapter": tmp_path / "v1"}))
    assert torch.equal(second.logprobs(batch), first.logprobs(batch))
    second.step([batch], second.policy_objective())
    assert not torch.equal(second.logprobs(batch), first.logprobs(batch))


@pytest.mark.parametrize("weights", ["lora", "full"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model_loads_with_the_same_logits(tmp_path: Path, weights: str, tied: bool) -> None:
    path = make_model(tmp_path / "base", tie_word_embeddings=tied)
    engine = TrainingEngine(config(path, model={"weights": weights}))
    engine.step(micro_batches(random_examples(4, VOCABULARY), 64, "packed"), engine.policy_objective())
    engine.save_model(tmp_path / "made")
    ids = torch.arange(12)[None] + 40
    engine.model.network.eval()
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert torch.allclose(made(ids).logits, engine.model.network(ids).logits, atol=1e-4)
    if weights == "full":
        with pytest.raises(ValueError, match="there is no adapter"):
            engine.save_adapter(tmp_path / "v1")


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_bfloat16_computes_alike_and_trains_in_float32(model: Path, tmp_path: Path, weights: str) -> None:
    engine = TrainingEngine(config(model, model={"weights": weights}, engine={"dtype": "bfloat16"}))
    (batch,) = micro_batches(random_examples(6, VOCABULARY), 4096, "packed")
    exact = TrainingEngine(config(model)).logprobs(batch)
    assert float((engine.logprobs(batch) - exact).abs().mean()) < 0.1
    assert engine.step([batch], engine.policy_objective())["skipped"] == 0
    assert {one.dtype for one in engine.model.trained.values()} == {torch.float32}
    engine.save_model(tmp_path / "made")
    assert {one.dtype for one in load_file(tmp_path / "made" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_adapter_is_computed_in_the_format_of_the_model(model: Path, tmp_path: Path) -> None:
    """In float32 it would keep a copy of every layer's input, which is most of a step's memory."""
    TrainingEngine(config(model)).save_adapter(tmp_path / "v1")
    (batch,) = micro_batches(random_examples(2, VOCABULARY), 4096, "packed")
    seen: set[Any] = set()

    def look(module: Any, given: Any, made: Any) -> None:
        seen.update((given[0].dtype, made.dtype))

    for chosen in ({"path": model}, {"path": model, "adapter": tmp_path / "v1"}):
        engine = TrainingEngine(config(model, model=chosen, engine={"dtype": "bfloat16"}))
        for name, module in engine.model.network.named_modules():
            if name.endswith("lora_A.default"):
                module.register_forward_hook(look)
        engine.step([batch], engine.policy_objective())
    assert seen == {torch.bfloat16}


def test_a_temperature_is_that_of_the_rollouts(model: Path) -> None:
    (batch,) = micro_batches([example("a", [1, 2], [3], [1])], 64, "packed")
    logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([[1, 2]])).logits[0, -1]
    expected = torch.log_softmax(logits / 0.5, -1)[3].item()
    engine = TrainingEngine(config(model, rollouts={"temperature": 0.5}))
    assert engine.logprobs(batch).item() == pytest.approx(expected, abs=1e-5)


def test_packing_is_refused_where_a_state_leaks_over_the_border(tmp_path: Path) -> None:
    """Linear attention carries a state along the row; positions that begin again mean nothing to it."""
    sizes: dict[str, Any] = dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16)
    sizes |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "hidden_size"), 32)
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_experts", "num_experts_per_tok"), 1)
    sizes |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 1)
    layers = ["linear_attention", "full_attention"]
    made = Qwen3NextConfig(vocab_size=64, intermediate_size=32, num_hidden_layers=2, layer_types=layers, **sizes)
    Qwen3NextForCausalLM(made).save_pretrained(tmp_path)
    chosen: dict[str, Any] = {"path": tmp_path, "targets": ["q_proj"]}
    with pytest.raises(ConfigError, match=r"engine\.layout: in this model packed examples see each other"):
        TrainingEngine(config(tmp_path, model=chosen))
    TrainingEngine(config(tmp_path, model=chosen, engine={"layout": "padded"}))


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .* holds no config\.json"):
        TrainingEngine(config(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.adapter: .* holds no adapter_config\.json"):
        TrainingEngine(config(make_model(tmp_path / "m"), model={"adapter": tmp_path}))


def test_the_learning_rate_follows_its_schedule(model: Path) -> None:
    def rates(kind: Any) -> list[float]:
        return [schedule(OptimiserSettings(schedule=kind, warmup=2), step, 6) for step in range(7)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates("cosine") == pytest.approx([0.5, 1, 1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)
    engine = TrainingEngine(config(model, optimiser={"warmup": 4}))
    batches = micro_batches(random_examples(2, VOCABULARY), 64, "packed")
    found = [engine.step(batches, engine.policy_objective())["learning_rate"] for _ in range(3)]
    assert found == pytest.approx([0.0025, 0.005, 0.0075])


def test_a_policy_gradient_makes_what_was_good_likelier(model: Path) -> None:
    engine = TrainingEngine(config(model))
    samples = [sample("good", 1.0, [5, 6], [7, 8, 9]), sample("bad", 0.0, [5, 6], [20, 21])]
    batches = micro_batches(credit(samples, AdvantageSettings()).examples, 64, "packed")
    before = engine.logprobs(batches[0])
    for _ in range(5):
        engine.step(batches, engine.policy_objective())
    change = engine.logprobs(batches[0]) - before
    assert change[:3].sum() > 0
    assert change[3:].sum() < 0
