"""Direct preference optimisation: of two rollouts of one task the policy learns to prefer the better.

    engine = Engine(config, reference=True, updates=updates(sides, config))
    for report in train(engine, sides): ...                 # one optimiser update each

The loss joins the log-probabilities of two whole rollouts, which together may be longer than a forward pass can hold.
So a step goes twice over its micro-batches: first for the log-probabilities alone, then, once the derivative of the
loss by each side's is known, for the gradients. That is exact as long as nothing is dropped at random (`model.dropout`
0), and no pair has to fit into one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gateway.strict import ConfigError
from trainer.batch import MicroBatch, micro_batches, passes
from trainer.config import Config
from trainer.engine import Engine
from trainer.examples import Example
from trainer.loss import Tally, Tokens, preference_loss

Sides = tuple[Sequence[Example], Sequence[Example]]
"""All examples of the chosen rollout and all of the rejected one."""


def updates(pairs: Sequence[Sides], config: Config) -> int:
    """Optimiser updates that `train` will do."""
    return len(_order(pairs, config))


def train(engine: Engine, pairs: Sequence[Sides]) -> Iterator[dict[str, float]]:
    """Trains on pairs whose examples `batch.admit` has let pass; yields the metrics of each update.

    Raises `ConfigError` with dropout, and `ValueError` for a pair with an empty side.
    """
    if engine.config.model.dropout:
        raise ConfigError(f"model.dropout: dpo needs 0 (found {engine.config.model.dropout})")
    if any(not side for pair in pairs for side in pair):
        raise ValueError("a pair has no examples on one of its sides")
    for places in _order(pairs, engine.config)[engine.done :]:
        yield step(engine, [pairs[place] for place in places])


def _order(pairs: Sequence[Sides], config: Config) -> list[list[int]]:
    return passes(len(pairs), config.dpo.batch, config.dpo.epochs, config.run.seed)


def step(engine: Engine, pairs: Sequence[Sides]) -> dict[str, float]:
    """One update on all of `pairs`."""
    config = engine.config
    # A rollout may stand in several pairs: here each side of each pair is somebody.
    named = [
        replace(example, owner=(str(number), "rejected" if place else "chosen"))
        for number, pair in enumerate(pairs)
        for place, side in enumerate(pair)
        for example in side
    ]
    batches = micro_batches(named, config.engine.batch_tokens, config.engine.layout)
    policy = _sums(batches, engine.logprobs).requires_grad_()
    reference = _sums(batches, engine.model.reference)
    scale = 1 / _sums(batches, lambda batch: torch.ones(len(batch.owners))) if config.dpo.normalise else 1.0
    loss, tally = preference_loss(_pairs(policy * scale), _pairs(reference * scale), config.dpo.beta)
    (worth,) = torch.autograd.grad(loss, policy)
    weighted = [replace(batch, advantages=worth.numpy()[batch.owners]) for batch in batches]
    return engine.step(weighted, _by_worth) | tally.report()


def _sums(batches: Sequence[MicroBatch], values: Callable[[MicroBatch], Tensor]) -> Tensor:
    """[2M] for each side of each pair the sum of values [N] over its tokens: chosen, rejected, chosen …"""
    size = 1 + max(int(batch.owners.max()) for batch in batches)
    found = torch.zeros(size)
    for batch in batches:
        found.index_add_(0, torch.from_numpy(batch.owners), values(batch).cpu())
    return found


def _pairs(sides: Tensor) -> tuple[Tensor, Tensor]:
    return sides[0::2], sides[1::2]


def _by_worth(logprobs: Tensor, tokens: Tokens) -> tuple[Tensor, Tally]:
    """Has the gradient of the loss: the derivative by each side's sum, times the gradient of the sum."""
    return (tokens.advantages * logprobs).sum(), Tally()
