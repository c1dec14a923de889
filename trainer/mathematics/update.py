"""Updates the weights from one step's samples, and reports on it. No I/O; runs on a thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from penstock.adapters.samples import Sample
from penstock.trainer.config import TrainConfig
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.advantage import NO_REWARDS, credit
from penstock.trainer.mathematics.batch import admit, micro_batches, split

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
