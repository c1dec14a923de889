"""One rank's part of an engine whose network is sharded over several: each holds a piece of every weight (FSDP2).

    part = Sharded(config, network, optimiser, update)
    tally = part.accumulate(dealt, policy)        # its own micro-batches
    norm = update()                               # clips and steps, all ranks together

All ranks go through the network at the same time, with the same number of micro-batches. Losses and gradients come from
the local engine's own code: the ranks' losses add up to that of the step, and because the network takes the mean of
their gradients, each is multiplied by the number of ranks.

The state is gathered into the local engine's form: a run may go on with another number of ranks, or with the local
engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from penstock.trainer.config import TrainConfig
from penstock.trainer.engines import policy
from penstock.trainer.engines.checkpoint import State
from penstock.trainer.engines.local import Objective, TrainingEngine, check_fit
from penstock.trainer.engines.policy import PolicyModel, without_dropout
from penstock.trainer.mathematics.batch import MicroBatch, is_filler
from penstock.trainer.mathematics.loss import LossInputs, StepMetrics


class ShardedPolicy(PolicyModel):
    """A policy over a network that is built and sharded over the ranks already."""

    def __init__(self, config: TrainConfig, network: torch.nn.Module, device: torch.device) -> None:
        self.config, self.network, self.device = config, without_dropout(network), device
        self.full = config.model.weights == "full"
        self.dtype = cast(torch.dtype, getattr(torch, config.engine.dtype))
        self._frozen = None
        self.trained = {name: one for name, one in network.named_parameters() if one.requires_grad}
        # Now, while all ranks are in their constructors: each pass through the network needs all of them.
        self._in_pieces = self._try_pieces()
        if config.engine.layout == "packed":
            self._refuse_leaks()


class ShardedEngine(TrainingEngine):
    """A rank's part of an engine. `update` clips the gradients, steps unless they are not finite, and returns their
    norm."""

    def __init__(
        self, config: TrainConfig, model: ShardedPolicy, optimiser: torch.optim.AdamW, update: Callable[[], float]
    ) -> None:
        self.config = config
        self.model = model
        self.optimiser = optimiser
        self.update = update

    def accumulate(self, batches: Sequence[MicroBatch], objective: Objective) -> StepMetrics:
        """Add the gradients of this rank's micro-batches to those of the others; return this rank's part of the
        tally."""
        ranks = torch.distributed.get_world_size()
        return _at_hand(super().accumulate(batches, functools.partial(_part, objective=objective, ranks=ranks)))

    def advance(self, batches: Sequence[MicroBatch], objective: Objective, rate: float) -> tuple[StepMetrics, float]:
        """Do one update at a learning rate; return (this rank's part of the tally, norm of the whole gradient)."""
        tally = self.accumulate(batches, objective)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        return tally, self.update()

    def weights(self) -> dict[str, Tensor]:
        """Return all trained tensors, gathered from the ranks."""
        return {name: _whole(one) for name, one in self.model.trained.items()}

    def adapter(self) -> tuple[Any, dict[str, Tensor]]:
        """Return (PEFT's configuration, weights by PEFT's names): the arguments of `policy.fill_adapter`."""
        network = cast(PeftModel, self.model.network)
        named = get_peft_model_state_dict(network, self.weights(), save_embedding_layers=False)
        return network.peft_config["default"], named

    def state(self) -> State:
        """Return weights and optimiser as `TrainingEngine.state` does, gathered from the ranks; `random` is this
        rank's own."""
        trained = self.model.trained
        (settings,) = self.optimiser.param_groups
        moments = {
            number: {key: _whole(value) for key, value in self.optimiser.state[one].items()}
            for number, one in enumerate(trained.values())
            if one in self.optimiser.state
        }
        return {
            "weights": self.weights(),
            "optimiser": {"state": moments, "param_groups": [settings | {"params": list(range(len(trained)))}]},
            "random": policy.state(),
        }

    def restore(self, state: State) -> None:
        """Restore a `state()`. Raises `ConfigError` when it is of another model or adapter."""
        weights, trained = cast(dict[str, Tensor], state["weights"]), self.model.trained
        check_fit(weights, trained)
        moments = state["optimiser"]["state"]
        self.optimiser.state.clear()
        with torch.no_grad():
            for number, (name, one) in enumerate(trained.items()):
                one.copy_(_like(weights[name], one))
                if number in moments:
                    self.optimiser.state[one] = {key: _like(value, one) for key, value in moments[number].items()}
        policy.restore(state["random"])


def _part(logprobs: Tensor, tokens: LossInputs, objective: Objective, ranks: int) -> tuple[Tensor, StepMetrics]:
    """Return the objective's loss times `ranks`, and its metrics; 0 for a filler."""
    if is_filler(tokens.weights):
        return logprobs.sum() * 0, StepMetrics()
    loss, tally = objective(logprobs, tokens)
    return loss * ranks, tally


def _at_hand(tally: StepMetrics) -> StepMetrics:
    """Return a copy that a process without a GPU can read."""
    sums, maxima = ({name: one.cpu() for name, one in part.items()} for part in (tally.sums, tally.maxima))
    return StepMetrics(sums, maxima, {name: [one.cpu() for one in parts] for name, parts in tally.values.items()})


def _whole(value: Tensor) -> Tensor:
    """Return the gathered tensor, on the CPU; every rank must call this at the same time."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()


def _like(value: Tensor, one: Tensor) -> Tensor:
    """Return this rank's piece of a value with the shape of the weights; a copy of any other, such as the number of
    steps."""
    if value.shape != one.shape:
        return value.clone()
    if not isinstance(one, DTensor):
        return value.to(one.device, copy=True)
    # Every rank has the whole value, so none needs to send it.
    return distribute_tensor(value.to(one.device), one.device_mesh, one.placements, src_data_rank=None)
