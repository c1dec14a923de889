"""How tokens become one loss, and what length costs, each against a few lines of numpy that follow the paper."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

import torch
from fakes.training import example, random_examples, sample
from pydantic import ValidationError
from torch import Tensor

from penstock.adapters.samples import Sample
from penstock.trainer.config import CLIPS, AdvantageSettings, Aggregate, LossSettings
from penstock.trainer.mathematics.advantage import credit
from penstock.trainer.mathematics.batch import Layout, MicroBatch, TokenExample, micro_batches
from penstock.trainer.mathematics.loss import LossInputs, StepMetrics, policy_loss

Floats = npt.NDArray[np.float64]
LENGTH = 37
"""The constant."""


def of_rollouts(examples: Sequence[TokenExample]) -> list[Floats]:
    """The REINFORCE loss of every trained token, by rollout; engine and policy give the same log-probabilities."""
    owners = dict.fromkeys(one.owner for one in examples)
    losses = {owner: [-one.advantages[one.mask] * one.behaviour[one.mask] for one in examples if one.owner == owner]
              for owner in owners}  # fmt: skip
    return [np.concatenate(parts).astype(np.float64) for parts in losses.values()]


def grpo(tokens: list[Floats]) -> float:
    """1/G sum_i 1/|o_i| sum_t: DeepSeekMath, equation 3."""
    return float(np.mean([one.mean() for one in tokens]))


def dapo(tokens: list[Floats]) -> float:
    """1/(sum_i |o_i|) sum_i sum_t: DAPO, equation 8."""
    return float(sum(one.sum() for one in tokens) / sum(len(one) for one in tokens))


def dr_grpo(tokens: list[Floats]) -> float:
    """1/G sum_i 1/L sum_t, L the same for all: Dr. GRPO, `masked_mean` with a constant in its listing 1."""
    return float(np.mean([one.sum() / LENGTH for one in tokens]))


FORMULAS: dict[Aggregate, Callable[[list[Floats]], float]] = {
    "rollout-mean": grpo,
    "token-mean": dapo,
    LENGTH: dr_grpo,
}


def known(batch: MicroBatch) -> tuple[Tensor, LossInputs]:
    """(log-probabilities of the policy, which are the engine's; what else is known)."""
    sequences, weights = torch.from_numpy(batch.sequences), torch.from_numpy(batch.weights).double()
    advantages, behaviour = (torch.from_numpy(one).double() for one in (batch.advantages, batch.behaviour))
    return behaviour, LossInputs(weights, advantages, behaviour, sequences)


def total(batches: Sequence[MicroBatch], config: LossSettings) -> dict[str, float]:
    whole = StepMetrics()
    for batch in batches:
        whole.add(policy_loss(*known(batch), config)[1])
    return whole.report()


@pytest.mark.parametrize("aggregate", FORMULAS)
@pytest.mark.parametrize(("tokens", "layout"), [(10_000, "packed"), (30, "packed"), (30, "padded")])
def test_the_loss_is_that_of_the_paper(aggregate: Aggregate, tokens: int, layout: Layout) -> None:
    examples = random_examples(17, 300)
    config = LossSettings(kind="pg", aggregate=aggregate)
    found = total(micro_batches(examples, tokens, layout, config.aggregate), config)
    assert found["loss"] == pytest.approx(FORMULAS[aggregate](of_rollouts(examples)), rel=1e-5)
    # Means stay means, whatever the weights sum up to.
    assert (found["ratio"], found["correction"], found["mismatch_k3"]) == pytest.approx((1, 1, 0))


def test_a_constant_does_not_reward_long_failures() -> None:
    """Two failures, one of 1 token and one of 9: divided by its own length, each token of the long one is pushed away
    a ninth as hard. That is the bias."""
    two = [example("short", [1], [2], [1], advantages=[-1]), example("long", [1], [2] * 9, [1] * 9,
           advantages=[-1] * 9)]  # fmt: skip
    weights: dict[Aggregate, set[float]] = {}
    for aggregate in ("rollout-mean", "token-mean", 10):
        (batch,) = micro_batches(two, 100, "packed", aggregate)
        weights[aggregate] = {round(float(one), 6) for one in batch.weights}
    assert weights == {"rollout-mean": {0.5, round(1 / 18, 6)}, "token-mean": {0.1}, 10: {0.05}}


def test_gspo_is_the_mean_of_clipped_ratios_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its equation 5 and 7: s = (pi / old)^(1/|y|), and mean over calls of min(s A, clip(s) A); times the engine's."""
    random = np.random.default_rng(0)
    calls = [example(f"r{n}", [1], [2] * size, [1] * size, behaviour=-1 - random.random(size),
             advantages=np.full(size, random.normal())) for n, size in enumerate((3, 7, 2))]  # fmt: skip
    monkeypatch.setitem(CLIPS, "gspo", (0.05, 0.1))
    config = LossSettings(kind="gspo")
    (batch,) = micro_batches(calls, 100, "padded")
    _, tokens = known(batch)
    old, now = (torch.tensor(-1 - random.random(12)) for _ in range(2))
    found = policy_loss(now, replace(tokens, old=old), config)[0]
    value = 0.0
    for call in np.unique(batch.sequences):
        at = batch.sequences == call
        s, a = np.exp((now - old).numpy()[at].mean()), batch.advantages[at][0]
        u = min(2.0, np.exp((old.numpy() - batch.behaviour)[at].sum()))
        value -= u * min(s * a, np.clip(s, 0.95, 1.1) * a) / 3
    assert found.item() == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("correction", ["token", "icepop"])
def test_gspo_with_a_correction_by_token_is_refused(correction: Any) -> None:
    problem = f'correction: "{correction}" weighs tokens, and in kind = "gspo" all tokens of a call have one ratio'
    with pytest.raises(ValidationError, match=re.escape(problem)):
        LossSettings(kind="gspo", correction=correction)
    assert (LossSettings(kind="gspo").effective_correction, LossSettings().effective_correction) == (
        "sequence",
        "token",
    )


# -- what length costs -------------------------------------------------------------------------------------------------


def rollout(name: str, reward: float, sizes: Sequence[int], cut: bool = False) -> Sample:
    """A rollout with answers of these lengths, the last of which may be cut off."""
    parts = [[7] * size for size in sizes]
    made = sample(name, reward, [1], *[part for size in parts for part in (size, [9])][:-1])
    last = replace(made.segments[-1], truncated=cut)
    return replace(made, segments=(*made.segments[:-1], last))


def soft_punishment(longest: int, begins: int, whole: int) -> float:
    """DAPO, equation 13, with L_max = `whole` and L_cache = `whole` - `begins`."""
    if longest <= begins:
        return 0
    return (begins - longest) / (whole - begins) if longest <= whole else -1


def test_the_soft_overlong_punishment_is_dapo_s() -> None:
    config = AdvantageSettings(overlong=(4, 8))
    rewards, sizes = [1.0, 1.0, 0.0, 1.0], [[2, 3], [6, 1], [8], [9]]
    shaped = np.array([r + soft_punishment(max(s), 4, 8) for r, s in zip(rewards, sizes, strict=True)])
    assert shaped.tolist() == [1, 0.5, -1, 0]
    made = credit([rollout(f"r{n}", r, s) for n, (r, s) in enumerate(zip(rewards, sizes, strict=True))], config)
    assert [float(one.advantages[0]) for one in made.examples] == pytest.approx((shaped - shaped.mean()).tolist())


def test_an_answer_that_was_cut_off_is_punished_whole() -> None:
    config = AdvantageSettings(overlong=(4, 8))
    made = credit([rollout("a", 1.0, [2], cut=True), rollout("b", 1.0, [2])], config)
    assert [float(one.advantages[0]) for one in made.examples] == [-0.5, 0.5]


def test_by_turns_each_call_pays_for_its_own_answer() -> None:
    config = AdvantageSettings(overlong=(4, 8), credit="turn")
    made = credit([rollout("a", 1.0, [6, 2]), rollout("b", 1.0, [2, 2])], config).examples
    mean = (0.5 + 1 + 1 + 1) / 4
    assert [float(made[0].advantages[0]), float(made[0].advantages[-1])] == pytest.approx([0.5 - mean, 1 - mean])


def test_what_was_cut_off_is_masked_and_still_compared() -> None:
    samples = [rollout("a", 0.0, [2], cut=True), rollout("b", 1.0, [2]), rollout("c", 2.0, [2])]
    made = credit(samples, AdvantageSettings(overlong="mask"))
    assert made.dropped == {("a", "a1"): "truncated"}
    assert [(one.owner[0], float(one.advantages[0])) for one in made.examples] == [("b", 0), ("c", 1)]
    kept = credit(samples, AdvantageSettings())
    assert [float(one.advantages[0]) for one in kept.examples] == [-1, 0, 1]


def test_the_bounds_of_a_punishment_rise() -> None:
    with pytest.raises(ValidationError, match=re.escape("[8, 8] do not rise from 0 or more, such as [3072, 4096]")):
        AdvantageSettings(overlong=(8, 8))
