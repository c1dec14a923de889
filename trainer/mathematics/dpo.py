"""Direct preference optimisation: the policy learns to prefer the better of two rollouts of one task.

    engine = Engine(config, updates=updates(pairs, config))
    before = reference(engine, pairs)                       # the policy before training
    for report in train(engine, pairs, before): ...         # one optimiser update each

The reference is the policy as the run finds it, with the adapter that it begins with. Its log-probabilities are
computed once, so no second model is kept. The loss joins the log-probabilities of two whole rollouts, which together
may be longer than a forward pass can hold. So a step goes twice over its micro-batches: first for the log-probabilities
alone, then, with the derivative of the loss by the log-probability of each side, for the gradients. That is exact as
long as there is no dropout, and adapters here have none; no pair has to fit into one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.trainer.config import TrainConfig
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.batch import MicroBatch, TokenExample, micro_batches, passes
from penstock.trainer.mathematics.loss import LossInputs, StepMetrics, preference_loss

PairSides = tuple[Sequence[TokenExample], Sequence[TokenExample]]
"""All examples of the chosen rollout and all of the rejected one."""


def updates(pairs: Sequence[PairSides], config: TrainConfig) -> int:
    """Return the number of optimiser updates that `train` will do."""
    return len(_order(pairs, config))


def reference(engine: TrainingEngine, pairs: Sequence[PairSides]) -> Tensor:
    """Return [P, 2] log-probabilities of both sides of each pair under the present policy, in nats. Raises `ValueError`
    for a pair with an empty side."""
    if any(not side for pair in pairs for side in pair):
        raise ValueError("a pair has no examples on one of its sides")
    size = engine.config.data.batch
    parts = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    found = [_totals(batches, engine.logprobs) for batches in _batched(parts, engine)]
    return torch.cat([torch.zeros(0, 2), *(one.reshape(-1, 2) for one in found)])


def train(engine: TrainingEngine, pairs: Sequence[PairSides], before: Tensor) -> Iterator[dict[str, float]]:
    """Train on pairs whose examples `batch.admit` has let pass; yield the metrics of each update. `before`: their
    `reference`."""
    for places in _order(pairs, engine.config)[engine.done :]:
        yield step(engine, [pairs[place] for place in places], before[places])


def _order(pairs: Sequence[PairSides], config: TrainConfig) -> list[list[int]]:
    return passes(len(pairs), config.data.batch, config.data.epochs, config.run.seed)


def step(engine: TrainingEngine, pairs: Sequence[PairSides], before: Tensor) -> dict[str, float]:
    """Do one update on all of `pairs`; return its metrics. `before` [P, 2]: their `reference`."""
    (batches,) = _batched([pairs], engine)
    policy = _totals(batches, engine.logprobs).requires_grad_()
    loss, tally = _loss(policy.reshape(-1, 2), before, engine)
    (worth,) = torch.autograd.grad(loss, policy)
    weighted = [replace(batch, advantages=worth.numpy()[batch.owners]) for batch in batches]
    tokens = float(sum(len(batch.owners) for batch in batches))
    return engine.step(weighted, _by_worth) | tally.report() | {"tokens": tokens}


def evaluate(engine: TrainingEngine, pairs: Sequence[PairSides], before: Tensor) -> dict[str, float]:
    """Return loss, accuracy, margin and the gaps of both sides, of pairs that are not trained on."""
    return _loss(reference(engine, pairs), before, engine)[1].report()


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
