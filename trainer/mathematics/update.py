"""Updates of the weights: by the credit of one step's samples (`learn`), towards the answers in examples (`train_sft`),
and towards the better of two rollouts (`train_dpo`). No I/O; they run on a thread.

    engine = TrainingEngine(config, updates=sft_updates(examples, config))
    for metrics in train_sft(engine, examples): ...         # one optimiser update each
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from penstock.adapters.samples import Sample
from penstock.trainer.config import TrainConfig
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.advantage import NO_REWARDS, credit
from penstock.trainer.mathematics.batch import MicroBatch, Owner, TokenExample, admit, micro_batches, passes, split
from penstock.trainer.mathematics.loss import LossInputs, StepMetrics, cross_entropy, preference_loss

Metrics = dict[str, float]
NOT_FINITE: Final = (
    "see whether a reward is far too large and whether metrics such as loss were finite before; lower "
    'optimiser.learning_rate, or set engine.dtype = "float32"'
)
"""Advice for gradients that are not finite."""


def learn(
    engine: TrainingEngine,
    samples: Sequence[Sample],
    staleness: Callable[[str | None], int],
    config: TrainConfig,
    beside: Mapping[str, Sequence[float]] = NO_REWARDS,
) -> Metrics:
    """Update the weights; return the metrics. Everything that is left out is counted below `dropped/`. `beside`: as for
    `credit`."""
    fresh, ages, stale = by_age(samples, staleness, config.rollouts.staleness)
    credited = credit(fresh, config.advantage, beside)
    examples, refused = admit(credited.examples, config.engine.batch_tokens)
    dropped = Counter(f"rollouts_{reason}" for reason in credited.dropped.values())
    dropped.update(f"samples_{one.reason}" for one in refused)
    found: Metrics = {f"dropped/{name}": float(count) for name, count in dropped.items()}
    found |= {"dropped/rollouts_stale": float(stale), "samples": float(len(examples)), "updates": 0.0}
    found["tokens"] = float(sum(np.count_nonzero(one.mask) for one in examples))
    if ages:
        found |= {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages))}
    if not examples:
        return found
    owners = len({one.owner for one in examples})
    groups = {one.group for one in fresh if (one.rollout, one.attempt) not in credited.dropped}
    found["groups/used"] = float(len(groups))
    found |= {"tokens_per_rollout": found["tokens"] / owners}
    parts = split(examples, config.optimiser.updates)
    engines, loss = config.engine, config.loss
    batched = [micro_batches(part, engines.batch_tokens, engines.layout, loss.aggregate) for part in parts]
    # Before the first update: later ones compare with the policy at the beginning of the step.
    prepared = [engine.prepare(batches, old=len(parts) > 1) for batches in batched]
    steps = [engine.step(batches, engine.policy_objective()) for batches in prepared]
    done = [not one["skipped"] for one in steps]
    found["updates"] = float(sum(done))
    if not all(done):
        left = {one.owner for part, well in zip(parts, done, strict=True) if not well for one in part}
        found["dropped/rollouts_not_finite"] = float(len(left))
    return found | {name: _over(name, [one[name] for one in steps]) for name in steps[0]}


def _over(name: str, values: Sequence[float]) -> float:
    """Return a metric of several updates: the largest value of a maximum, the mean of any other."""
    return float(max(values) if name.endswith("_max") else np.mean(values))


def by_age(
    samples: Sequence[Sample], staleness: Callable[[str | None], int], limit: int
) -> tuple[list[Sample], list[int], int]:
    """Return (samples of groups in which none is too old, their ages in versions, number of rollouts left out). The age
    of a sample is that of the weights of its first token. Groups are left out whole: without its oldest rollouts a
    group would be compared with another mean."""
    ages = [staleness(sample.segments[0].version) for sample in samples]
    old = {sample.group for sample, age in zip(samples, ages, strict=True) if age > limit}
    kept = [(sample, age) for sample, age in zip(samples, ages, strict=True) if sample.group not in old]
    stale = {(sample.rollout, sample.attempt) for sample in samples if sample.group in old}
    return [sample for sample, _ in kept], [age for _, age in kept], len(stale)


# Supervised fine-tuning: the policy learns the answers in the examples, made of samples or of chats.
#
# The loss is the mean over rollouts of the mean cross-entropy of their marked tokens. The order follows from the
# seed, and the place in it from the number of updates done: a restored engine goes on where it was.


def sft_updates(examples: Sequence[TokenExample], config: TrainConfig) -> int:
    """Return the number of optimiser updates that `train_sft` will do."""
    return len(_order(len({example.owner for example in examples}), config))


def train_sft(engine: TrainingEngine, examples: Sequence[TokenExample]) -> Iterator[dict[str, float]]:
    """Train on examples that `batch.admit` has let pass; yield the metrics of each update."""
    config = engine.config
    owned: dict[Owner, list[TokenExample]] = {}
    for example in examples:
        owned.setdefault(example.owner, []).append(example)
    groups = list(owned.values())
    for places in _order(len(groups), config)[engine.done :]:
        chosen = [example for place in places for example in groups[place]]
        batches = micro_batches(chosen, config.engine.batch_tokens, config.engine.layout)
        yield engine.step(batches, cross_entropy)


def evaluate_sft(engine: TrainingEngine, examples: Sequence[TokenExample]) -> dict[str, float]:
    """Return the loss on examples that are not trained on."""
    config = engine.config.engine
    batches = micro_batches(examples, config.batch_tokens, config.layout)
    return {"loss": -sum(float(batch.weights @ engine.logprobs(batch).cpu().numpy()) for batch in batches)}


def _order(count: int, config: TrainConfig) -> list[list[int]]:
    return passes(count, config.data.batch, config.data.epochs, config.run.seed)


# Direct preference optimisation: the policy learns to prefer the better of two rollouts of one task.
#
# The reference is the policy as the run finds it, with the adapter that it begins with. Its log-probabilities are
# computed once, so no second model is kept. The loss joins the log-probabilities of two whole rollouts, which
# together may be longer than a forward pass can hold. So a step goes twice over its micro-batches: first for the
# log-probabilities alone, then, with the derivative of the loss by the log-probability of each side, for the
# gradients. That is exact as long as there is no dropout, and adapters here have none; no pair has to fit into one
# micro-batch.

PairSides = tuple[Sequence[TokenExample], Sequence[TokenExample]]
"""All examples of the chosen rollout and all of the rejected one."""


def dpo_updates(pairs: Sequence[PairSides], config: TrainConfig) -> int:
    """Return the number of optimiser updates that `train_dpo` will do."""
    return len(_order(len(pairs), config))


def dpo_reference(engine: TrainingEngine, pairs: Sequence[PairSides]) -> Tensor:
    """Return [P, 2] log-probabilities of both sides of each pair under the present policy, in nats. Raises `ValueError`
    for a pair with an empty side."""
    if any(not side for pair in pairs for side in pair):
        raise ValueError("a pair has no examples on one of its sides")
    size = engine.config.data.batch
    parts = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    found = [_totals(batches, engine.logprobs) for batches in _batched(parts, engine)]
    return torch.cat([torch.zeros(0, 2), *(one.reshape(-1, 2) for one in found)])


def train_dpo(engine: TrainingEngine, pairs: Sequence[PairSides], before: Tensor) -> Iterator[dict[str, float]]:
    """Train on pairs whose examples `batch.admit` has let pass; yield the metrics of each update. `before`: their
    `dpo_reference`."""
    for places in _order(len(pairs), engine.config)[engine.done :]:
        yield dpo_step(engine, [pairs[place] for place in places], before[places])


def dpo_step(engine: TrainingEngine, pairs: Sequence[PairSides], before: Tensor) -> dict[str, float]:
    """Do one update on all of `pairs`; return its metrics. `before` [P, 2]: their `dpo_reference`."""
    (batches,) = _batched([pairs], engine)
    policy = _totals(batches, engine.logprobs).requires_grad_()
    loss, tally = _loss(policy.reshape(-1, 2), before, engine)
    (worth,) = torch.autograd.grad(loss, policy)
    weighted = [replace(batch, advantages=worth.numpy()[batch.owners]) for batch in batches]
    tokens = float(sum(len(batch.owners) for batch in batches))
    return engine.step(weighted, _by_worth) | tally.report() | {"tokens": tokens}


def evaluate_dpo(engine: TrainingEngine, pairs: Sequence[PairSides], before: Tensor) -> dict[str, float]:
    """Return loss, accuracy, margin and the gaps of both sides, of pairs that are not trained on."""
    return _loss(dpo_reference(engine, pairs), before, engine)[1].report()


def _loss(policy: Tensor, before: Tensor, engine: TrainingEngine) -> tuple[Tensor, StepMetrics]:
    chosen, rejected = policy.unbind(1)
    return preference_loss((chosen, rejected), (before[:, 0], before[:, 1]), engine.config.dpo.beta)


def _batched(parts: Sequence[Sequence[PairSides]], engine: TrainingEngine) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of each part, in which every side of every pair is an owner: chosen, rejected, chosen
    …"""
    for pairs in parts:
        # A rollout may be in several pairs: here each side of each pair is an owner of its own.
        named = [
            replace(example, owner=(str(number), "rejected" if place else "chosen"))
            for number, pair in enumerate(pairs)
            for place, side in enumerate(pair)
            for example in side
        ]
        yield micro_batches(named, engine.config.engine.batch_tokens, engine.config.engine.layout)


def _totals(batches: Sequence[MicroBatch], values: Callable[[MicroBatch], Tensor]) -> Tensor:
    """Return [2P] sums of the values [N] over the tokens of each side."""
    size = 1 + max(int(batch.owners.max()) for batch in batches)
    found = torch.zeros(size)
    for batch in batches:
        found.index_add_(0, torch.from_numpy(batch.owners), values(batch).cpu())
    return found


def _by_worth(logprobs: Tensor, tokens: LossInputs) -> tuple[Tensor, StepMetrics]:
    """Return a loss with DPO's gradient: the derivative by each side's sum, times the gradient of the sum."""
    return (tokens.advantages * logprobs).sum(), StepMetrics()
