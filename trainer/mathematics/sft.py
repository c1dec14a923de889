"""Supervised fine-tuning: the policy learns the answers in the examples, made of samples or of chats.

    engine = Engine(config, updates=updates(examples, config))
    for report in train(engine, examples): ...              # one optimiser update each

The loss is the mean over rollouts of the mean cross-entropy of their marked tokens. The order follows from the seed,
and the place in it from the number of updates done: a restored engine goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.trainer.config import TrainConfig
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.batch import Owner, TokenExample, micro_batches, passes
from penstock.trainer.mathematics.loss import cross_entropy


def updates(examples: Sequence[TokenExample], config: TrainConfig) -> int:
    """Return the number of optimiser updates that `train` will do."""
    return len(_order(len({example.owner for example in examples}), config))


def train(engine: TrainingEngine, examples: Sequence[TokenExample]) -> Iterator[dict[str, float]]:
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


def evaluate(engine: TrainingEngine, examples: Sequence[TokenExample]) -> dict[str, float]:
    """Return the loss on examples that are not trained on."""
    config = engine.config.engine
    batches = micro_batches(examples, config.batch_tokens, config.layout)
    return {"loss": -sum(float(batch.weights @ engine.logprobs(batch).cpu().numpy()) for batch in batches)}


def _order(count: int, config: TrainConfig) -> list[list[int]]:
    return passes(count, config.data.batch, config.data.epochs, config.run.seed)
