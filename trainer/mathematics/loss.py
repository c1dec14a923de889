"""Losses, as pure functions of the N trained tokens of a micro-batch. GRPO is the advantage `grpo`
(`mathematics.advantage`), the mean `rollout-mean` (`mathematics.batch`) and `ppo` of this file.

Three policies give a token a probability: the inference engine's that sampled it (mu, `behaviour`), the trainer's when
the step began (`old`), and the trainer's now (pi). With r = pi / old, advantage A, and u = old / mu:

    pg      -u' A log pi                                         Williams 1992 (REINFORCE)
    ppo     -u' min(r A, clip(r, 1 - low, 1 + high) A)           Schulman et al. 2017, arXiv:1707.06347; high > low is
                                                                 clip-higher: Yu et al. 2025, arXiv:2503.14476 (DAPO)
    gspo    as ppo, r the geometric mean over the tokens of a    Zheng et al. 2025, arXiv:2507.18071: token form, with
            call, each with the gradient of its own token        the gradient of the sequence form where the tokens of
                                                                 a call have the same advantage
    cispo   -u' sg[clip(r, 1 - low, 1 + high)] A log pi          MiniMax 2025, arXiv:2506.13585

u' corrects for the difference between the probabilities of engine and trainer, and for stale rollouts (decoupled from
the clip: Hilton et al. 2022, arXiv:2110.00641; truncated by token: Yao et al. 2025, "Your efficient RL framework
secretly brings you off-policy RL training"):

    token     min(u, high)
    sequence  min(product of u over a call, high)
    icepop    u where low <= u <= high, else 0                   Ling team 2025, arXiv:2510.18855

A call is the sequence, not the conversation: merging calls into one sample changes no loss. If the engine gave no
log-probability, u is 1, and `unscored` counts the token. With `gspo`, which has one ratio for a whole call, u' is also
one for a whole call: corrections by token are refused. Every loss is sum(weight x value), with the weights of
`trainer.mathematics.batch`; means among the metrics are sums divided by the sum of weights, whatever the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.trainer.config import CLIPS, LossSettings

T = TypeVar("T")
LEAST_WEIGHT, MOST_WEIGHT = 0.5, 2.0
"""Bounds of importance weights: `icepop` drops tokens beyond either, the others cut at the upper one."""
FAR = 20.0
"""Differences of log-probabilities are clamped to this before `exp`, which would overflow: 2 is a lot already."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of a loss for N trained tokens, except the policy's log-probabilities; each field is [N]."""

    weights: Tensor
    """float: share in the loss."""
    advantages: Tensor
    """float: advantage of each."""
    behaviour: Tensor
    """float: log mu; nan where the engine gave none."""
    sequences: Tensor
    """int64: number of the call in which each was sampled."""
    old: Tensor | None = None
    """float: log-probabilities when the step began; None: the present ones."""
    reference: Tensor | None = None
    """float: log-probabilities of the reference; None if not needed."""


MEANS = (
    "clip_fraction", "ratio", "policy_kl", "kl", "entropy", "mismatch_k1", "mismatch_k3", "correction",
    "correction_cut",
)  # fmt: skip
"""Metrics that are means, weighted like the loss."""


@dataclass(slots=True)
class StepMetrics:
    """Metrics of a step, summed over its micro-batches: `add` each, then `report`."""

    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Values that are summed over micro-batches: weighted means and counts."""
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Values of which the largest counts."""
    values: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    """Values of each token, [N] of a micro-batch, for quantiles."""

    def add(self, other: StepMetrics) -> None:
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value
        for name, parts in other.values.items():
            self.values[name] = self.values.get(name, []) + parts

    def report(self) -> dict[str, float]:
        """Return values by name. `ess` is Kish's effective sample size of the corrections, as a share of the tokens;
        `_p50` and `_p99` are quantiles over tokens, all with the same weight."""
        found = {name: float(value) for name, value in (self.sums | self.maxima).items()}
        weight = found.pop("weight", 1.0)
        found |= {name: found[name] / weight for name in MEANS if name in found}
        first, second = found.pop("u", 0.0), found.pop("u^2", 0.0)
        if second:
            found["ess"] = first**2 / (second * found["tokens"])
        for name, parts in self.values.items():
            every = torch.cat(parts)
            for percent in (50, 99) if len(every) else ():
                found[f"{name}_p{percent}"] = quantile(every, percent)
        return found


def quantile(values: Tensor, percent: int) -> float:
    """Return the smallest of [N] values that at least `percent` percent of them do not exceed."""
    return float(values.kthvalue(max(1, -(-len(values) * percent // 100))).values)


def policy_loss(logprobs: Tensor, tokens: LossInputs, config: LossSettings) -> tuple[Tensor, StepMetrics]:
    """Return the loss of a policy gradient step, a scalar, and its metrics. `logprobs`: [N] log pi, with gradients."""
    surrogate = _named("kind", config.kind, SURROGATES)
    old = logprobs.detach() if tokens.old is None else tokens.old
    correction, tally = correct(old, tokens, config)
    value, ratio, clipped = surrogate(logprobs, old, tokens, config)
    weights = tokens.weights
    loss = (weights * correction * value).sum()
    gap = _apart(logprobs.detach() - old)
    sums = {
        "weight": weights.sum(),
        "loss": loss.detach(),
        "clip_fraction": (weights * clipped).sum(),
        "ratio": (weights * ratio).sum(),
    }
    sums["policy_kl"] = (weights * _k3(-gap)).sum()
    if tokens.reference is not None:
        kl = kl_to_reference(logprobs, tokens.reference)
        sums["kl"] = (weights * kl.detach()).sum()
        loss = loss + config.kl * (weights * kl).sum()
    tally.add(StepMetrics(sums, {"ratio_max": ratio.max()}))
    return loss, tally


# -- surrogates --------------------------------------------------------------------------------------------------------


class Surrogates(NamedTuple):
    """Results of a surrogate loss for each token; each field is [N]."""

    value: Tensor
    """The token's loss, with gradients."""
    ratio: Tensor
    """pi / old as the surrogate uses it, without gradients."""
    clipped: Tensor
    """1 where a clip removed the token's gradient or cut its weight."""


def _policy_gradient(logprobs: Tensor, old: Tensor, tokens: LossInputs, config: LossSettings) -> Surrogates:
    ratio = _apart(logprobs.detach() - old).exp()
    return Surrogates(-tokens.advantages * logprobs, ratio, torch.zeros_like(ratio))


def _ppo(logprobs: Tensor, old: Tensor, tokens: LossInputs, config: LossSettings) -> Surrogates:
    return _clipped(_apart(logprobs - old).exp(), tokens.advantages, config)


def _gspo(logprobs: Tensor, old: Tensor, tokens: LossInputs, config: LossSettings) -> Surrogates:
    # The value is that of the sequence, the gradient that of the token.
    whole = _per_sequence(logprobs.detach() - old, tokens.sequences, mean=True)
    return _clipped(_apart(whole + logprobs - logprobs.detach()).exp(), tokens.advantages, config)


def _cispo(logprobs: Tensor, old: Tensor, tokens: LossInputs, config: LossSettings) -> Surrogates:
    ratio = _apart(logprobs.detach() - old).exp()
    bounded = _bounded(ratio, config)
    return Surrogates(-bounded * tokens.advantages * logprobs, ratio, (bounded != ratio).float())


def _clipped(ratio: Tensor, advantages: Tensor, config: LossSettings) -> Surrogates:
    """Return the smaller of the gains by the ratio and by the bounded ratio."""
    plain, cut = ratio * advantages, _bounded(ratio, config) * advantages
    return Surrogates(-torch.minimum(plain, cut), ratio.detach(), (cut < plain).float())


def _bounded(ratio: Tensor, config: LossSettings) -> Tensor:
    low, high = CLIPS[config.kind]
    return ratio.clamp(1 - low, 1 + high)


SURROGATES: dict[str, Callable[[Tensor, Tensor, LossInputs, LossSettings], Surrogates]] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
    "pg": _policy_gradient,
}
"""Functions of log pi, log old, the other inputs and the configuration, by `loss.kind`."""


# -- the engine's probabilities, and the reference's -------------------------------------------------------------------


def correct(old: Tensor, tokens: LossInputs, config: LossSettings) -> tuple[Tensor, StepMetrics]:
    """Return [N] weights u' that bring the engine's tokens to the trainer's policy, and metrics of the distance between
    the two.

    `mismatch_k1` and `mismatch_k3` estimate KL(mu || old), from samples of mu (Schulman 2020, "Approximating KL
    divergence"); `mismatch_p50`, `mismatch_p99` and `mismatch_max` describe the distribution of the absolute
    differences of log-probabilities.
    """
    weigh = _named("correction", config.effective_correction, CORRECTIONS)
    known = torch.isfinite(tokens.behaviour)
    gap = torch.where(known, old.detach() - tokens.behaviour, 0.0)
    u = _apart(_per_sequence(gap, tokens.sequences) if config.effective_correction == "sequence" else gap).exp()
    made = weigh(u)
    weights = tokens.weights
    sums = {
        "tokens": torch.full((), float(len(u)), dtype=torch.float64),
        "unscored": (~known).sum(),
        "mismatch_k1": -(weights * gap).sum(),
        "mismatch_k3": (weights * _k3(gap)).sum(),
        "correction": (weights * made).sum(),
        "correction_cut": (weights * (made != u)).sum() if config.effective_correction != "none" else weights.sum() * 0,
        "u": u.double().sum(),
        "u^2": u.double().square().sum(),
    }
    return made, StepMetrics(sums, {"mismatch_max": gap.abs().max()}, {"mismatch": [gap[known].abs()]})


def _uncorrected(u: Tensor) -> Tensor:
    return torch.ones_like(u)


def _truncated(u: Tensor) -> Tensor:
    return u.clamp(max=MOST_WEIGHT)


def _masked(u: Tensor) -> Tensor:
    return torch.where((u >= LEAST_WEIGHT) & (u <= MOST_WEIGHT), u, 0.0)


CORRECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "token": _truncated,
    "sequence": _truncated,
    "icepop": _masked,
    "none": _uncorrected,
}
"""Functions of u that return u', by `loss.correction`. With `sequence` u is the product over a call."""


def kl_to_reference(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return [N] estimates of KL(pi || reference), from samples of pi.

    This is `k3`, (ref / pi) - 1 - log(ref / pi): unbiased and never negative.
    """
    return _k3(_apart(reference - logprobs))


def _k3(gap: Tensor) -> Tensor:
    """exp(x) - 1 - x, exact for small x too."""
    cut = _apart(gap)
    return torch.expm1(cut) - cut


# -- without rewards ---------------------------------------------------------------------------------------------------


def cross_entropy(logprobs: Tensor, tokens: LossInputs) -> tuple[Tensor, StepMetrics]:
    """Return the supervised loss and its metrics: the mean over rollouts of the mean negative log-probability of their
    trained tokens, in nats."""
    loss = -(tokens.weights * logprobs).sum()
    count = torch.full((), float(len(logprobs)), dtype=torch.float64)
    return loss, StepMetrics({"loss": loss.detach(), "tokens": count})


def preference_loss(
    policy: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor], beta: float
) -> tuple[Tensor, StepMetrics]:
    """Return DPO's loss and metrics: the mean of -log sigmoid(beta (gap of the chosen - gap of the rejected)), gap =
    log pi - log reference.

    Each pair of tensors is (chosen, rejected), [M] log-probabilities of whole sides, or their means over tokens
    (Rafailov et al. 2023, arXiv:2305.18290; with means it is not SimPO, which has no reference, but the
    length-normalised DPO that Meng et al. 2024, arXiv:2405.14734, compare SimPO with).
    """
    chosen, rejected = (beta * (now - then) for now, then in zip(policy, reference, strict=True))
    loss = -logsigmoid(chosen - rejected).mean()
    sums = {
        "loss": loss.detach(),
        "accuracy": (chosen > rejected).float().mean(),
        "margin": (chosen - rejected).detach().mean(),
        "chosen": chosen.detach().mean(),
        "rejected": rejected.detach().mean(),
    }
    return loss, StepMetrics(sums)


def _apart(gap: Tensor) -> Tensor:
    return gap.clamp(-FAR, FAR)


def _per_sequence(values: Tensor, sequences: Tensor, mean: bool = False) -> Tensor:
    """Return [N] for each token the sum, or mean, over its sequence."""
    size = int(sequences.max()) + 1
    sums = torch.zeros(size, dtype=values.dtype, device=values.device).index_add_(0, sequences, values)
    if mean:
        sums = sums / torch.bincount(sequences, minlength=size).clamp(min=1)
    return sums[sequences]


def _named(field: str, name: str, table: Mapping[str, T]) -> T:
    """Return the entry of a table. The configuration has no other names, but callers may pass a loss without it."""
    if name not in table:
        raise ValueError(f"loss.{field}: {name!r} is not one of {', '.join(table)}")
    return table[name]
