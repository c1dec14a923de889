"""The local engine: a policy on one machine and the AdamW that trains it.

    engine = TrainingEngine(config)
    batches = engine.prepare(micro_batches(examples, ...))
    report = engine.step(batches, engine.policy_objective())          # one update over all micro-batches
    engine.save_adapter(directory)

`step` adds up the gradients of its micro-batches; their weights add up to 1 over the step, so nothing is divided.
`state` holds everything that the next step depends on: after `restore` that step is the same, bit for bit on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import MAX_NORM, OptimiserSettings, TrainConfig
from penstock.trainer.engines import EngineError, policy
from penstock.trainer.engines.checkpoint import State
from penstock.trainer.engines.policy import PolicyModel
from penstock.trainer.mathematics.batch import MicroBatch
from penstock.trainer.mathematics.loss import LossInputs, StepMetrics, policy_loss


@contextmanager
def enough_memory(config: TrainConfig) -> Generator[None]:
    """Raise `EngineError` if the GPU's memory does not suffice within the context."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        engine = config.engine
        ways = [f"lower engine.batch_tokens (now {engine.batch_tokens})"]
        ways += [] if engine.gradient_checkpointing else ["set engine.gradient_checkpointing = true"]
        ways += ['set engine.dtype = "bfloat16"'] if engine.dtype == "float32" else []
        raise EngineError(
            f"the GPU has too little memory for this model and batch: {', or '.join(ways)}, and see what else is on "
            f"the GPU; torch says: {str(error)[:300]}"
        ) from None


Objective = Callable[[Tensor, LossInputs], tuple[Tensor, StepMetrics]]
"""(log-probabilities [N] with gradients, the other inputs of the loss) -> (loss, metrics)."""


class TrainingEngine:
    """A policy and its optimiser. Raises `EngineError` if the GPU's memory does not suffice for it or for a step.

    `reference`: load a reference even if `loss.kl` needs none. `updates`: number of updates for the schedule of the
    learning rate; by default that of the run.
    """

    def __init__(self, config: TrainConfig, reference: bool = False, updates: int | None = None) -> None:
        policy.seed(config.run.seed)
        self.config = config
        with enough_memory(config):
            self.model = PolicyModel(config, reference or config.loss.kl > 0)
        self.updates = config.run.steps * config.optimiser.updates if updates is None else updates
        self.done = 0
        self.optimiser = torch.optim.AdamW(
            self.model.trained.values(),
            config.learning_rate,
            weight_decay=0.0,
        )

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [N] log-probabilities of the trained tokens, in nats, without gradients."""
        with enough_memory(self.config):
            return self.model.logprobs(batch)

    def prepare(self, batches: Sequence[MicroBatch], old: bool = False) -> list[MicroBatch]:
        """Return the batches with the other inputs of the policy loss: log-probabilities of the reference if `loss.kl`
        needs them, and, with `old`, those of the present policy, which are needed if more than one update follows."""
        with enough_memory(self.config):
            return [
                replace(
                    batch,
                    old=_array(self.logprobs(batch)) if old else None,
                    reference=_array(self.model.reference(batch)) if self.config.loss.kl else None,
                )
                for batch in batches
            ]

    def policy_objective(self) -> Objective:
        """Return the objective of the configured policy gradient."""
        return partial(policy_loss, config=self.config.loss)

    def step(self, batches: Sequence[MicroBatch], objective: Objective) -> dict[str, float]:
        """Do one update over all micro-batches. Return the objective's metrics and `entropy`, `grad_norm`,
        `learning_rate`, `skipped`: 1 when a gradient was not finite and the weights were left as they are."""
        with enough_memory(self.config):
            return self.accumulate(batches, objective).report() | self._update()

    def accumulate(self, batches: Sequence[MicroBatch], objective: Objective) -> StepMetrics:
        """Add the gradients of a step to those of the trained tensors; the first half of `step`."""
        self.model.network.train()
        tally = StepMetrics()
        for batch in batches:
            logprobs, entropy = self.model.forward(batch)
            tokens = self._tokens(batch)
            loss, found = objective(logprobs, tokens)
            loss.backward()
            found.sums["entropy"] = (tokens.weights * entropy).sum()
            tally.add(found)
        return tally

    def _update(self) -> dict[str, float]:
        wanted = self.config.optimiser
        rate = self.config.learning_rate * schedule(wanted, self.done, self.updates)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.trained.values(), MAX_NORM))
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        if math.isfinite(norm):
            self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.done += 1
        return {"grad_norm": norm, "learning_rate": rate, "skipped": float(not math.isfinite(norm))}

    def _tokens(self, batch: MicroBatch) -> LossInputs:
        tensor = self.model.tensor
        return LossInputs(
            weights=tensor(batch.weights),
            advantages=tensor(batch.advantages),
            behaviour=tensor(batch.behaviour),
            sequences=tensor(batch.sequences),
            old=None if batch.old is None else tensor(batch.old),
            reference=None if batch.reference is None else tensor(batch.reference),
        )

    def save_adapter(self, directory: Path) -> None:
        self.model.save_adapter(directory)

    def save_model(self, directory: Path) -> None:
        self.model.save_model(directory)

    def state(self) -> State:
        """Return everything that the next step depends on: weights, optimiser, number of updates, all states of random
        numbers.

        On a CPU it is not a copy: save it before the next step.
        """
        return {
            "done": self.done,
            "weights": {name: one.detach().cpu() for name, one in self.model.trained.items()},
            "optimiser": self.optimiser.state_dict(),
            "random": policy.state(),
        }

    def restore(self, state: State) -> None:
        """Restore a `state()`. Raises `ConfigError` when it is of another model or adapter."""
        weights, trained = cast(dict[str, Tensor], state["weights"]), self.model.trained
        check_fit(weights, trained)
        with torch.no_grad():
            for name, one in trained.items():
                one.copy_(weights[name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.done = state["done"]
        policy.restore(state["random"])


def check_fit(weights: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
    """Raise `ConfigError` if the weights of a checkpoint do not fit the trained tensors."""
    for name in sorted(weights.keys() | trained.keys()):
        if name not in weights or name not in trained or weights[name].shape != trained[name].shape:
            raise ConfigError(f"model: the checkpoint is of another model, adapter or rank: {name} does not fit")


def schedule(optimiser: OptimiserSettings, step: int, steps: int) -> float:
    """Return the share of the learning rate at `step`, from 0: a linear warm-up, then constant or falling to 0 at
    `steps`."""
    if step < optimiser.warmup:
        return (step + 1) / optimiser.warmup
    if optimiser.schedule == "constant":
        return 1.0
    done = min(1.0, (step - optimiser.warmup) / max(1, steps - optimiser.warmup))
    return 1.0 - done if optimiser.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


def _array(values: Tensor) -> Any:
    return values.cpu().numpy()
