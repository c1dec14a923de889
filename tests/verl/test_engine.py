"""The engine on verl's ranks against the local one: same batches, same losses, same gradients, same state.

Ranks are real: verl's workers on Ray, FSDP2 over gloo. Float32 sums in another order differ in the last bits: gradients
are compared to 1e-5 of their largest, log-probabilities to 1e-5 nats, metrics to 1e-5 of themselves. The gradient of a
step is Adam's first moment after it, when there was none before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-verl`, then `make test-verl`")
pytest.importorskip("tensordict", reason="there is no verl here: `make install-verl`, then `make test-verl`")

import numpy as np
import torch
from fakes.tiny_model import VOCABULARY, config, make_model
from fakes.training import example, random_examples, sample
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import LossSettings, TrainConfig
from penstock.trainer.engines import EngineError, remote
from penstock.trainer.engines.checkpoint import Checkpoints, State
from penstock.trainer.engines.local import Objective, TrainingEngine
from penstock.trainer.engines.remote import make_engine
from penstock.trainer.mathematics import update
from penstock.trainer.mathematics.batch import MicroBatch, TokenExample, micro_batches
from penstock.trainer.mathematics.loss import cross_entropy, policy_loss
from penstock.trainer.mathematics.update import learn

# What others say of each other's versions when they are imported.
pytestmark = [
    pytest.mark.timeout(900),
    *(pytest.mark.filterwarnings(f"ignore::{name}") for name in ("DeprecationWarning", "FutureWarning", "UserWarning")),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SECTIONS: dict[str, dict[str, Any]] = {
    "loss": {"kl": 0.1, "correction": "sequence"},
    "optimiser": {"learning_rate": 0.001, "schedule": "cosine", "warmup": 2},
    "run": {"steps": 8},
}
FULL: dict[str, dict[str, Any]] = {**SECTIONS, "loss": {"correction": "sequence"}, "model": {"weights": "full"}}
Made = tuple[dict[str, float], dict[str, Tensor]]
"""What a step reports, and the gradients by name."""


def settings(path: Path, ranks: int = 0, **more: dict[str, Any]) -> TrainConfig:
    """Of the local engine where there are no ranks."""
    engine = {"kind": "verl", "ranks": ranks} if ranks else {}
    return config(path, **(SECTIONS | more | {"engine": engine | more.get("engine", {})}))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def local(path: Path) -> TrainingEngine:
    return TrainingEngine(settings(path))


@pytest.fixture(scope="module")
def start(local: TrainingEngine) -> State:
    """Where every comparison begins: an adapter that does something, and no moments."""
    local.step(batched(random_examples(4, VOCABULARY, seed=9)), cross_entropy)
    state = copy.deepcopy(local.state())
    state["optimiser"]["state"] = {}
    return state


@pytest.fixture(scope="module")
def one(cluster: int, path: Path) -> Iterator[TrainingEngine]:
    yield from opened(settings(path, 1))


@pytest.fixture(scope="module")
def two(cluster: int, path: Path) -> Iterator[TrainingEngine]:
    yield from opened(settings(path, 2))


@pytest.fixture(params=["one", "two"])
def spread(request: pytest.FixtureRequest) -> TrainingEngine:
    return request.getfixturevalue(request.param)


def opened(wanted: TrainConfig) -> Iterator[TrainingEngine]:
    made: Any = make_engine(wanted)
    yield made
    made.close()


def batched(examples: Sequence[TokenExample], tokens: int = 64) -> list[MicroBatch]:
    return micro_batches(examples, tokens, "packed")


def stepped(engine: TrainingEngine, start: State, batches: Sequence[MicroBatch], objective: Objective) -> Made:
    """One step from there."""
    engine.restore(copy.deepcopy(start))
    report = engine.step(engine.prepare(batches, old=True), objective)
    state = engine.state()
    moments = state["optimiser"]["state"]
    return report, {name: moments[number]["exp_avg"].clone() for number, name in enumerate(state["weights"])}


def close(found: Made, expected: Made) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    largest = max(float(one.abs().max()) for one in expected[1].values())
    assert largest > 0
    assert list(found[1]) == list(expected[1])
    for name, one in expected[1].items():
        assert float((found[1][name] - one).abs().max()) <= 1e-5 * largest, name


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "pg"])
def test_a_step_is_that_of_the_local_engine(
    spread: TrainingEngine, local: TrainingEngine, start: State, kind: Any
) -> None:
    objective = partial(policy_loss, config=LossSettings(kind=kind, kl=0.1, correction="sequence"))
    batches = batched(random_examples(6, VOCABULARY))
    expected = stepped(local, start, batches, objective)
    assert expected[0]["kl"] > 0
    close(stepped(spread, start, batches, objective), expected)


@pytest.mark.parametrize(("count", "tokens"), [(6, 24), (5, 64), (6, 4096), (1, 64)])
def test_however_the_micro_batches_are_dealt(
    two: TrainingEngine, local: TrainingEngine, start: State, count: int, tokens: int
) -> None:
    """As many as ranks, one left over whose rows are split, and fewer rows than ranks."""
    batches = batched(random_examples(count, VOCABULARY), tokens)
    close(
        stepped(two, start, batches, two.policy_objective()), stepped(local, start, batches, local.policy_objective())
    )


def test_supervised_and_preference_losses_too(two: TrainingEngine, local: TrainingEngine, start: State) -> None:
    batches = batched(random_examples(6, VOCABULARY))
    close(stepped(two, start, batches, cross_entropy), stepped(local, start, batches, cross_entropy))
    sides = [([one], [other]) for one, other in zip(*[iter(random_examples(4, VOCABULARY))] * 2, strict=False)]
    found: list[dict[str, float]] = []
    for engine in (two, local):
        engine.restore(copy.deepcopy(start))
        before = update.dpo_reference(engine, sides)
        engine.step(batches, cross_entropy)
        found.append(update.dpo_step(engine, sides, before))
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-5)


def test_what_is_masked_has_no_gradient_at_all(two: TrainingEngine, start: State) -> None:
    """Whatever stands there, nan included: bit for bit the same gradients."""
    nan = float("nan")
    one = example("a", [1, 2], [3, 4, 5, 6], [1, 0, 0, 1], advantages=[1, 0, 0, 1])
    odd = replace(
        one, advantages=np.array([1, nan, 1e30, 1], np.float32), behaviour=np.array([-1, nan, 9, -1], np.float32)
    )
    other = example("b", [9, 8], [7, 6], [1, 1], advantages=[-1, -1])
    first, second = (stepped(two, start, batched([given, other]), two.policy_objective()) for given in (one, odd))
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    assert any(bool(gradient.any()) for gradient in first[1].values())


def test_all_that_a_step_of_learning_does(two: TrainingEngine, local: TrainingEngine, start: State, path: Path) -> None:
    """From samples to metrics, in two updates, of which the second compares with the policy as the step began."""
    samples = [
        sample(f"{group}{number}", float(number), [5, 6 + group], [7, 8, 9 + number], [10], [11], group=str(group))
        for group in range(4)
        for number in range(2)
    ]
    both = settings(path, optimiser=SECTIONS["optimiser"] | {"updates": 2})
    found: list[dict[str, float]] = []
    for engine in (two, local):
        engine.restore(copy.deepcopy(start))
        found.append(learn(engine, samples, lambda _: 0, both))
        assert engine.done == start["done"] + 2
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-5)
    assert found[0]["updates"] == 2
    (batch,) = batched(random_examples(2, VOCABULARY), 4096)
    assert torch.allclose(two.logprobs(batch), local.logprobs(batch), atol=1e-4)


def test_it_goes_on_where_it_was_bit_for_bit(two: TrainingEngine, start: State, tmp_path: Path) -> None:
    two.restore(copy.deepcopy(start))
    two.step(batched(random_examples(4, VOCABULARY, seed=1)), two.policy_objective())
    Checkpoints(tmp_path, 2).save(1, {"engine": two.state()})
    reports = [two.step(batched(random_examples(4, VOCABULARY, seed=2)), two.policy_objective())]
    expected = two.state()
    two.step(batched(random_examples(4, VOCABULARY, seed=3)), two.policy_objective())
    found = Checkpoints(tmp_path, 2).latest()
    assert found is not None
    two.restore(found[1]["engine"])
    reports.append(two.step(batched(random_examples(4, VOCABULARY, seed=2)), two.policy_objective()))
    assert reports[0] == reports[1]
    same(two.state(), expected)


def test_a_checkpoint_may_change_its_engine(spread: TrainingEngine, local: TrainingEngine, start: State) -> None:
    """Made on any number of ranks, it is the local engine's, and the other way round."""
    local.restore(copy.deepcopy(start))
    local.step(batched(random_examples(4, VOCABULARY, seed=1)), local.policy_objective())
    made = copy.deepcopy(local.state())
    spread.restore(made)
    given = spread.state()
    same({key: given[key] for key in ("weights", "done")}, {key: made[key] for key in ("weights", "done")})
    same(given["optimiser"]["state"], made["optimiser"]["state"])
    reports: list[dict[str, float]] = []
    for engine in (local, spread):
        engine.restore(given)
        reports.append(engine.step(batched(random_examples(4, VOCABULARY, seed=2)), engine.policy_objective()))
    assert reports[0] == pytest.approx(reports[1], rel=1e-4, abs=1e-5)


def same(found: Any, expected: Any) -> None:
    """Bit for bit."""
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected


def test_the_adapter_is_what_the_local_engine_writes(
    two: TrainingEngine, local: TrainingEngine, start: State, path: Path, tmp_path: Path
) -> None:
    for engine, name in ((two, "two"), (local, "local")):
        engine.restore(copy.deepcopy(start))
        engine.save_adapter(tmp_path / name)
    files = {name: sorted(file.name for file in (tmp_path / name).iterdir()) for name in ("two", "local")}
    assert files["two"] == files["local"] == ["adapter_config.json", "adapter_model.safetensors"]
    for name in files["two"]:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    agrees(two, PeftModel.from_pretrained(base, str(tmp_path / "two")))


def test_the_model_can_be_written_with_its_adapter(two: TrainingEngine, start: State, tmp_path: Path) -> None:
    two.restore(copy.deepcopy(start))
    two.save_model(tmp_path / "model")
    agrees(two, AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32))


def agrees(engine: TrainingEngine, model: Any) -> None:
    """Log-probabilities of one example, token by token."""
    one = example("a", [1, 2, 3], [4, 5, 6, 7], [1, 1, 1, 1])
    (batch,) = batched([one])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6, 7]])).logits[0, 2:-1]
    expected = torch.log_softmax(logits, -1)[range(4), [4, 5, 6, 7]]
    assert torch.allclose(engine.logprobs(batch), expected, atol=1e-5)


def test_all_weights_may_be_trained(cluster: int, path: Path) -> None:
    one = TrainingEngine(settings(path, 0, **FULL))
    begun = copy.deepcopy(one.state())
    batches = batched(random_examples(6, VOCABULARY))
    expected = stepped(one, begun, batches, one.policy_objective())
    for two in opened(settings(path, 2, **FULL)):
        close(stepped(two, begun, batches, two.policy_objective()), expected)
        assert torch.allclose(two.logprobs(batches[0]), one.logprobs(batches[0]), atol=1e-4)
        with pytest.raises(ValueError, match="there is no adapter, save the model"):
            two.save_adapter(path / "never")


def test_in_bfloat16_what_is_trained_stays_in_float32(
    cluster: int, local: TrainingEngine, start: State, path: Path
) -> None:
    """With activations computed again: the settings of the documented recipe."""
    batches = batched(random_examples(6, VOCABULARY))
    expected, _ = stepped(local, start, batches, local.policy_objective())
    engine = {"dtype": "bfloat16", "gradient_checkpointing": True}
    for two in opened(settings(path, 2, engine=engine)):
        report, gradients = stepped(two, start, batches, two.policy_objective())
        assert report["entropy"] == pytest.approx(expected["entropy"], rel=0.01)
        assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.2)
        kept = [*gradients.values(), *two.state()["weights"].values()]
        assert {one.dtype for one in kept} == {torch.float32}


def test_it_may_begin_with_an_adapter(
    cluster: int, local: TrainingEngine, start: State, path: Path, tmp_path: Path
) -> None:
    local.restore(copy.deepcopy(start))
    local.save_adapter(tmp_path / "adapter")
    (batch,) = batched(random_examples(2, VOCABULARY), 4096)
    given = {"adapter": tmp_path / "adapter", "rank": 4}
    for one in opened(settings(path, 1, model=given)):
        assert torch.allclose(one.logprobs(batch), local.logprobs(batch), atol=1e-5)
        assert torch.allclose(one.model.reference(batch), local.model.reference(batch), atol=1e-5)
        same(one.state()["weights"], start["weights"])


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_adapter_is_refused(two: TrainingEngine, start: State, path: Path) -> None:
    state = TrainingEngine(settings(path, model={"rank": 2})).state()
    with pytest.raises(ConfigError, match=r"^model: the checkpoint is of another model, adapter or rank: .*lora_A"):
        two.restore(state)
    # Nothing has changed, and it goes on.
    two.restore(copy.deepcopy(start))


def test_it_begins_as_the_local_engine_and_says_when_a_rank_dies(cluster: int, path: Path) -> None:
    import ray

    batches = batched(random_examples(2, VOCABULARY))
    for two in opened(settings(path, 2)):
        same(two.state()["weights"], TrainingEngine(settings(path)).state()["weights"])
        ranks: Any = two
        ray.kill(ranks._ranks._group.workers[1])
        with pytest.raises(EngineError, match=r"a rank (has died|failed): "):
            two.step(batches, two.policy_objective())


@pytest.mark.parametrize(
    ("ranks", "sections", "problem"),
    [
        (64, {}, "engine.ranks: 64 ranks need a CPU each, and the Ray cluster has 8"),
        (2, {"model": {"path": Path("/nowhere")}}, r"model.path: /nowhere holds no config\.json"),
        (2, {"model": {"adapter": Path("/nowhere")}}, r"model.adapter: /nowhere holds no adapter_config\.json"),
    ],
)
def test_what_cannot_be_started_is_named(cluster: int, path: Path, ranks: int, sections: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_engine(settings(path, ranks, **sections))


def test_all_weights_have_no_reference(path: Path) -> None:
    with pytest.raises(ConfigError, match=r'model\.weights: with engine\.kind = "verl" only adapters have'):
        make_engine(settings(path, 2, **FULL), reference=True)


def test_where_verl_is_not_installed_it_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Callable[[str], object] = remote.distribution

    def without(name: str) -> object:
        return found("no-such-thing" if name == "verl" else name)

    monkeypatch.setattr(remote, "distribution", without)
    with pytest.raises(ConfigError, match=r"engine.kind: \"verl\" needs verl here: pip install '\.\[verl\]'"):
        make_engine(settings(path, 2))
