"""Losses of three tokens, computed by hand; gradients too.

Three tokens, of which two were sampled in one call and one in another, with weights 1/4, 1/4 and 1/2.
"""

from __future__ import annotations

import math
import re
from typing import Any, get_args

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

import torch
from torch import Tensor

from penstock.trainer.config import CLIPS, Correction, LossSettings, Surrogate
from penstock.trainer.mathematics.loss import (
    CORRECTIONS,
    SURROGATES,
    LossInputs,
    StepMetrics,
    correct,
    cross_entropy,
    kl_to_reference,
    policy_loss,
    preference_loss,
)

LOG = [math.log(value) for value in (0.3, 0.2, 0.9)]
"""Log-probabilities now; when the step began all were log 0.2, log 0.2 and log 0.6: ratios 1.5, 1 and 1.5."""
OLD = [math.log(value) for value in (0.2, 0.2, 0.6)]
WEIGHTS, ADVANTAGES = [0.25, 0.25, 0.5], [1.0, -2.0, -1.0]


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(**more: Any) -> LossInputs:
    given: dict[str, Any] = {
        "weights": tensor(WEIGHTS),
        "advantages": tensor(ADVANTAGES),
        "behaviour": tensor(OLD),
        "sequences": torch.tensor([1, 1, 2]),
        "old": tensor(OLD),
    }
    return LossInputs(**(given | more))


def result(config: LossSettings, **more: Any) -> tuple[float, list[float], dict[str, float]]:
    """(loss, its gradient by each log-probability, metrics)."""
    now = tensor(LOG).requires_grad_()
    loss, tally = policy_loss(now, tokens(**more), config)
    loss.backward()
    assert now.grad is not None
    return loss.item(), now.grad.tolist(), tally.report()


def test_plain_policy_gradient() -> None:
    loss, gradient, _ = result(LossSettings(kind="pg"))
    assert loss == pytest.approx(-sum(w * a * x for w, a, x in zip(WEIGHTS, ADVANTAGES, LOG, strict=True)))
    assert gradient == pytest.approx([-0.25, 0.5, 0.5])


def test_ppo_clips_what_went_far_enough() -> None:
    """The first gained 1.5 > 1.28 with a positive advantage: clipped. The third too, but it should have fallen."""
    loss, gradient, metrics = result(LossSettings(kind="ppo"))
    assert loss == pytest.approx(0.25 * -1.28 + 0.25 * 2.0 + 0.5 * 1.5)
    assert gradient == pytest.approx([0, 0.25 * 2.0, 0.5 * 1.5])
    assert metrics["clip_fraction"] == 0.25
    assert metrics["ratio"] == pytest.approx(0.25 * 1.5 + 0.25 + 0.5 * 1.5)
    assert metrics["ratio_max"] == pytest.approx(1.5)


def test_ppo_clips_below_for_what_was_bad() -> None:
    low = tensor([math.log(0.1), *OLD[1:]])
    loss, tally = policy_loss(low, tokens(advantages=tensor([-1.0, 0.0, 0.0])), LossSettings(kind="ppo"))
    assert loss.item() == pytest.approx(0.25 * 0.8)
    assert tally.report()["clip_fraction"] == 0.25


def test_a_first_update_is_the_policy_gradient() -> None:
    """Without `old` every ratio is 1 with a gradient."""
    for kind in ("ppo", "gspo", "cispo", "pg"):
        _, gradient, metrics = result(LossSettings(kind=kind), old=None, behaviour=tensor(LOG))
        assert gradient == pytest.approx([-0.25, 0.5, 0.5]), kind
        assert metrics["ratio"] == pytest.approx(1)
        assert metrics["clip_fraction"] == 0


def test_every_kind_of_the_configuration_has_a_surrogate() -> None:
    assert set(SURROGATES) == set(get_args(Surrogate))
    assert set(CORRECTIONS) == set(get_args(Correction))


@pytest.mark.parametrize(
    ("unknown", "message"),
    [
        ({"kind": "dapo"}, "loss.kind: 'dapo' is not one of ppo, gspo, cispo, pg"),
        ({"correction": "tokens"}, "loss.correction: 'tokens' is not one of token, sequence, icepop, none"),
    ],
)
def test_an_unknown_name_is_an_error_and_never_another_loss(unknown: dict[str, Any], message: str) -> None:
    """However it came there: the configuration refuses it already."""
    config = LossSettings().model_copy(update=unknown)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        result(config, reference=tensor(OLD))


def test_gspo_clips_whole_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Geometric means: sqrt(1.5 x 1) for the first two tokens, 1.5 for the third."""
    mean = math.sqrt(1.5)
    with monkeypatch.context() as wide:
        wide.setitem(CLIPS, "gspo", (0.9, 9.0))
        loss, gradient, _ = result(LossSettings(kind="gspo"))
    assert loss == pytest.approx(-0.25 * mean + 0.5 * mean + 0.5 * 1.5)
    assert gradient == pytest.approx([-0.25 * mean, 0.5 * mean, 0.75])
    # Its own clip is narrow: nothing that gained stays, what should have fallen does.
    loss, gradient, metrics = result(LossSettings(kind="gspo"), advantages=tensor([1.0, 1.0, -1.0]))
    assert loss == pytest.approx(-0.5 * 1.0004 + 0.75)
    assert gradient == pytest.approx([0, 0, 0.75])
    assert metrics["clip_fraction"] == 0.5


def test_gspo_has_the_gradient_of_the_sequence_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLIPS, "gspo", (1, 9))
    now = tensor(LOG).requires_grad_()
    sequence = ((now - tensor(OLD))[:2].mean()).exp() * 0.5
    (expected,) = torch.autograd.grad(sequence, now)
    _, gradient, _ = result(LossSettings(kind="gspo"), advantages=tensor([-1.0, -1.0, 0.0]))
    assert gradient == pytest.approx(expected.tolist())


def test_cispo_cuts_weights_and_keeps_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLIPS, "cispo", (1, 0.2))
    loss, gradient, metrics = result(LossSettings(kind="cispo"))
    assert loss == pytest.approx(-0.25 * 1.2 * LOG[0] + 0.5 * LOG[1] + 0.5 * 1.2 * LOG[2])
    assert gradient == pytest.approx([-0.25 * 1.2, 0.5, 0.5 * 1.2])
    assert metrics["clip_fraction"] == 0.75


ENGINE = [math.log(value) for value in (0.05, 0.25, 0.4)]
"""What the engine thought: old / engine is 4, 0.8 and 1.5."""


@pytest.mark.parametrize(
    ("correction", "expected", "cut"),
    [
        ("none", [1, 1, 1], 0),
        ("token", [2, 0.8, 1.5], 0.25),
        # Products over the calls: 3.2 and 1.5.
        ("sequence", [2, 2, 1.5], 0.5),
        ("icepop", [0, 0.8, 1.5], 0.25),
    ],
)
def test_the_engine_is_corrected_for(correction: Any, expected: list[float], cut: float) -> None:
    made, tally = correct(tensor(OLD), tokens(behaviour=tensor(ENGINE)), LossSettings(correction=correction))
    assert made.tolist() == pytest.approx(expected)
    assert tally.report()["correction_cut"] == pytest.approx(cut)
    _, gradient, _ = result(LossSettings(kind="pg", correction=correction), behaviour=tensor(ENGINE))
    plain = [-0.25, 0.5, 0.5]
    assert gradient == pytest.approx([g * u for g, u in zip(plain, expected, strict=True)])


def test_the_mismatch_is_reported() -> None:
    metrics = correct(tensor(OLD), tokens(behaviour=tensor(ENGINE)), LossSettings())[1].report()
    gaps = [math.log(4), math.log(0.8), math.log(1.5)]
    assert metrics["mismatch_k1"] == pytest.approx(-sum(w * g for w, g in zip(WEIGHTS, gaps, strict=True)))
    k3 = sum(w * (math.exp(g) - 1 - g) for w, g in zip(WEIGHTS, gaps, strict=True))
    assert metrics["mismatch_k3"] == pytest.approx(k3)
    assert metrics["mismatch_max"] == pytest.approx(math.log(4))
    assert metrics["mismatch_p50"] == pytest.approx(math.log(1.5))
    assert metrics["mismatch_p99"] == pytest.approx(math.log(4))
    assert metrics["ess"] == pytest.approx((4 + 0.8 + 1.5) ** 2 / (3 * (16 + 0.64 + 2.25)))


def test_the_mismatch_of_all_micro_batches_is_one_distribution() -> None:
    """And what the engine did not score is not in it."""
    step = StepMetrics()
    for start in range(0, 200, 10):
        gaps = [(start + place + 1) / 1000 for place in range(10)]
        many: dict[str, Any] = {"weights": tensor([0.1] * 12), "sequences": torch.arange(12)}
        many["behaviour"] = tensor([-1 - gap for gap in gaps] + [float("nan")] * 2)
        step.add(correct(tensor([-1.0] * 12), tokens(**many), LossSettings())[1])
    metrics = step.report()
    assert metrics["unscored"] == 40
    assert [metrics[f"mismatch_{which}"] for which in ("p50", "p99", "max")] == pytest.approx([0.1, 0.198, 0.2])
    nothing = tokens(behaviour=tensor([float("nan")] * 3))
    assert "mismatch_p50" not in correct(tensor(OLD), nothing, LossSettings())[1].report()


def test_what_the_engine_did_not_score_is_not_corrected_and_counted() -> None:
    behaviour = tensor([float("nan"), *ENGINE[1:]])
    loss, gradient, metrics = result(LossSettings(kind="pg"), behaviour=behaviour)
    assert math.isfinite(loss)
    assert gradient == pytest.approx([-0.25, 0.5 * 0.8, 0.5 * 1.5])
    assert metrics["unscored"] == 1
    assert all(math.isfinite(value) for value in metrics.values())


def test_probabilities_that_are_far_apart_stay_finite() -> None:
    for correction in ("token", "sequence", "icepop"):
        loss, gradient, metrics = result(LossSettings(correction=correction), behaviour=tensor([-500.0, -1e-9, -300.0]))
        assert all(math.isfinite(value) for value in [loss, *gradient, *metrics.values()])


def test_kl_is_estimated_and_pulls_back() -> None:
    reference = tensor([math.log(0.6), math.log(0.2), math.log(0.45)])
    gaps = [math.log(2), 0.0, -math.log(2)]
    values = [math.exp(gap) - 1 - gap for gap in gaps]
    assert kl_to_reference(tensor(LOG), reference).tolist() == pytest.approx(values)
    loss, gradient, metrics = result(LossSettings(kl=0.1, kind="pg"), reference=reference, advantages=torch.zeros(3))
    assert metrics["kl"] == pytest.approx(sum(w * v for w, v in zip(WEIGHTS, values, strict=True)))
    assert loss == pytest.approx(0.1 * metrics["kl"])
    slope = [1 - math.exp(gap) for gap in gaps]
    assert gradient == pytest.approx([0.1 * w * s for w, s in zip(WEIGHTS, slope, strict=True)])


def test_cross_entropy() -> None:
    loss, tally = cross_entropy(tensor(LOG), tokens())
    assert loss.item() == pytest.approx(-(0.25 * LOG[0] + 0.25 * LOG[1] + 0.5 * LOG[2]))
    assert tally.report()["tokens"] == 3


def test_preferences_by_hand() -> None:
    """Gaps 0.5 x (2, -1) and 0.5 x (0, 1): margins 1 and -1."""
    chosen = tensor([-1.0, -5.0]).requires_grad_()
    loss, tally = preference_loss((chosen, tensor([-4.0, -2.0])), (tensor([-3.0, -4.0]), tensor([-4.0, -3.0])), 0.5)
    expected = [math.log1p(math.exp(-margin)) for margin in (1.0, -1.0)]
    assert loss.item() == pytest.approx(sum(expected) / 2)
    (gradient,) = torch.autograd.grad(loss, chosen)
    assert gradient.tolist() == pytest.approx([-0.25 / (1 + math.exp(1)), -0.25 / (1 + math.exp(-1))])
    metrics = tally.report()
    assert metrics["accuracy"] == 0.5
    assert metrics["margin"] == pytest.approx(0)


def test_tallies_add_up_to_the_whole() -> None:
    """Metrics of one batch are those of its tokens spread over two."""
    _, _, whole = result(LossSettings(), behaviour=tensor(ENGINE))
    tally = StepMetrics()
    for part in (slice(0, 2), slice(2, 3)):
        cut = tokens(
            weights=tensor(WEIGHTS)[part], advantages=tensor(ADVANTAGES)[part], behaviour=tensor(ENGINE)[part],
            sequences=torch.tensor([1, 1, 2])[part], old=tensor(OLD)[part],
        )  # fmt: skip
        tally.add(policy_loss(tensor(LOG)[part], cut, LossSettings())[1])
    assert tally.report() == pytest.approx(whole)
