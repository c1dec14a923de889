"""The local engine: a policy on one machine and the AdamW that trains it.

    engine = Engine(config)
    batches = engine.prepared(micro_batches(examples, ...))
    report = engine.step(batches, engine.policy())          # one update over all micro-batches
    engine.save_adapter(directory)

`step` adds up the gradients of its micro-batches; their weights sum up to 1 over the step, so nothing is divided.
`state` holds all that the next step depends on: after `restore` it is the same, bit for bit on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import Config, Optimiser
from penstock.trainer.engines import seeds
from penstock.trainer.engines.checkpoint import State
from penstock.trainer.engines.memory import enough_memory
from penstock.trainer.engines.policy import Policy
from penstock.trainer.mathematics.batch import MicroBatch
from penstock.trainer.mathematics.loss import Tally, Tokens, policy_loss

Objective = Callable[[Tensor, Tokens], tuple[Tensor, Tally]]
"""(log-probabilities [N] with gradients, what else is known of the tokens) -> (loss, metrics)."""


class Engine:
    """A policy and its optimiser. Raises `EngineError` where the GPU's memory does not suffice for it or for a step.

    `reference`: whether one is needed beside what `loss.kl` needs. `updates`: how many there will be, for the schedule
    of the learning rate; by default those of the run.
    """

    def __init__(self, config: Config, reference: bool = False, updates: int | None = None) -> None:
        seeds.seed(config.run.seed)
        self.config = config
        with enough_memory(config):
            self.model = Policy(config, reference or config.loss.kl > 0)
        self.updates = config.run.steps * config.optimiser.updates if updates is None else updates
        self.done = 0
        self.optimiser = torch.optim.AdamW(
            self.model.trained.values(),
            config.learning_rate,
            weight_decay=0.0,
        )

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """[N] log-probabilities of the trained tokens, in nats, without gradients."""
        with enough_memory(self.config):
            return self.model.logprobs(batch)

    def prepared(self, batches: Sequence[MicroBatch], old: bool = False) -> list[MicroBatch]:
        """The batches with what the policy loss needs beside: log-probabilities of the reference where `loss.kl` wants
        them, and those of the policy as it is now, `old`, where more than one update follows."""
        with enough_memory(self.config):
            return [
                replace(
                    batch,
                    old=_array(self.logprobs(batch)) if old else None,
                    reference=_array(self.model.reference(batch)) if self.config.loss.kl else None,
                )
                for batch in batches
            ]

    def policy(self) -> Objective:
        """The configured policy gradient."""
        return partial(policy_loss, config=self.config.loss)

    def step(self, batches: Sequence[MicroBatch], objective: Objective) -> dict[str, float]:
        """One update over all micro-batches. Returns the objective's metrics and `entropy`, `grad_norm`,
        `learning_rate`, `skipped`: 1 when a gradient was not finite and the weights were left as they are."""
        with enough_memory(self.config):
            return self.accumulate(batches, objective).report() | self._update()

    def accumulate(self, batches: Sequence[MicroBatch], objective: Objective) -> Tally:
        """Adds the gradients of a step to what is trained; the first half of `step`."""
        self.model.network.train()
        tally = Tally()
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
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.trained.values(), wanted.max_norm))
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        if math.isfinite(norm):
            self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.done += 1
        return {"grad_norm": norm, "learning_rate": rate, "skipped": float(not math.isfinite(norm))}

    def _tokens(self, batch: MicroBatch) -> Tokens:
        tensor = self.model.tensor
        return Tokens(
            weights=tensor(batch.weights),
            advantages=tensor(batch.advantages),
            behaviour=tensor(batch.behaviour),
            sequences=tensor(batch.sequences),
            old=None if batch.old is None else tensor(batch.old),
            reference=None if batch.reference is None else tensor(batch.reference),
        )

    def save_adapter(self, directory: Path) -> None:
        """See `Policy.save_adapter`."""
        self.model.save_adapter(directory)

    def save_model(self, directory: Path) -> None:
        """See `Policy.save_model`."""
        self.model.save_model(directory)

    def state(self) -> State:
        """All that the next step depends on: weights, optimiser, updates done, every source of random numbers.

        On a CPU it is not a copy: save it before the next step.
        """
        return {
            "done": self.done,
            "weights": {name: one.detach().cpu() for name, one in self.model.trained.items()},
            "optimiser": self.optimiser.state_dict(),
            "random": seeds.state(),
        }

    def restore(self, state: State) -> None:
        """Goes back to a `state()`. Raises `ConfigError` when it is of another model or adapter."""
        weights, trained = cast(dict[str, Tensor], state["weights"]), self.model.trained
        check_fit(weights, trained)
        with torch.no_grad():
            for name, one in trained.items():
                one.copy_(weights[name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.done = state["done"]
        seeds.restore(state["random"])


def check_fit(weights: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
    """Raises `ConfigError` when the weights of a checkpoint are not those of the tensors that are trained."""
    for name in sorted(weights.keys() | trained.keys()):
        if name not in weights or name not in trained or weights[name].shape != trained[name].shape:
            raise ConfigError(f"model: the checkpoint is of another model, adapter or rank: {name} does not fit")


def schedule(optimiser: Optimiser, step: int, steps: int) -> float:
    """Share of the learning rate at `step`, from 0: a linear warm-up, then constant or falling to 0 at `steps`."""
    if step < optimiser.warmup:
        return (step + 1) / optimiser.warmup
    if optimiser.schedule == "constant":
        return 1.0
    done = min(1.0, (step - optimiser.warmup) / max(1, steps - optimiser.warmup))
    return 1.0 - done if optimiser.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


def _array(values: Tensor) -> Any:
    return values.cpu().numpy()
