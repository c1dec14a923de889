"""The two methods of tuning on lessons, `sft` and `dpo`, with the state that a run needs to go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from penstock.trainer.config import TrainConfig
from penstock.trainer.data.training_examples import TrainingExample, TrainingSet
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics import dpo, sft
from penstock.trainer.mathematics.examples import TokenExample

Metrics = dict[str, float]


class TuningMethod(Protocol):
    """A method that turns lessons into updates."""

    updates: int
    """Optimiser updates of the whole run."""
    epochs: int
    """Times that every lesson is seen in them."""

    def begin(self, engine: TrainingEngine) -> None:
        """Compute what `state` holds from the engine as it is before the first update."""
        ...

    def train(self, engine: TrainingEngine) -> Iterator[Metrics]:
        """Do the remaining updates; yield the metrics of each."""
        ...

    def evaluate(self, engine: TrainingEngine) -> Metrics:
        """Return the metrics of the held-out lessons; empty without any."""
        ...

    def state(self) -> Any:
        """Return the result of `begin`, for a checkpoint."""
        ...

    def restore(self, state: Any) -> None:
        """Restore a `state()` instead of `begin`, for a run that goes on."""
        ...


class SupervisedMethod:
    """Supervised fine-tuning without a state; see `trainer.mathematics.sft`."""

    def __init__(self, config: TrainConfig, lessons: TrainingSet) -> None:
        self._taught, self._held_out = _rollouts(lessons.training), _rollouts(lessons.held_out)
        self.updates, self.epochs = sft.updates(self._taught, config), config.data.epochs

    def begin(self, engine: TrainingEngine) -> None: ...

    def train(self, engine: TrainingEngine) -> Iterator[Metrics]:
        return sft.train(engine, self._taught)

    def evaluate(self, engine: TrainingEngine) -> Metrics:
        return sft.evaluate(engine, self._held_out) if self._held_out else {}

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


class PreferenceMethod:
    """Direct preference optimisation; its state is the reference. See `trainer.mathematics.dpo`."""

    def __init__(self, config: TrainConfig, lessons: TrainingSet) -> None:
        self._taught, self._held_out = _pairs(lessons.training), _pairs(lessons.held_out)
        self.updates, self.epochs = dpo.updates(self._taught, config), config.data.epochs
        self._before = (torch.zeros(0, 2), torch.zeros(0, 2))

    def begin(self, engine: TrainingEngine) -> None:
        self._before = (dpo.reference(engine, self._taught), dpo.reference(engine, self._held_out))

    def train(self, engine: TrainingEngine) -> Iterator[Metrics]:
        return dpo.train(engine, self._taught, self._before[0])

    def evaluate(self, engine: TrainingEngine) -> Metrics:
        return dpo.evaluate(engine, self._held_out, self._before[1]) if self._held_out else {}

    def state(self) -> Any:
        return self._before

    def restore(self, state: Any) -> None:
        self._before = state


def _rollouts(lessons: Sequence[TrainingExample]) -> list[TokenExample]:
    return [example for lesson in lessons for side in lesson.sides for example in side]


def _pairs(lessons: Sequence[TrainingExample]) -> list[dpo.PairSides]:
    return [(chosen, rejected) for chosen, rejected in (lesson.sides for lesson in lessons)]
