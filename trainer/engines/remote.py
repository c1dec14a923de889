"""An engine whose ranks are other processes. The loop uses it like the local one, but it holds no weights.
`make_engine` chooses one of both.

    engine = RemoteEngine(config, ranks)    # used like trainer.engines.local.TrainingEngine
    engine.close()

Micro-batches are dealt to the ranks (`trainer.mathematics.batch`), each of which holds a part
(`trainer.engines.verl_backend`); their tallies are added up here. States, adapters and models have the local engine's
formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.gateway.model.codes import install_hint
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import TrainConfig
from penstock.trainer.engines import policy
from penstock.trainer.engines.checkpoint import State, write_directory
from penstock.trainer.engines.local import Objective, TrainingEngine, schedule
from penstock.trainer.engines.policy import PolicyModel, check_paths, fill_adapter
from penstock.trainer.mathematics.batch import MicroBatch, collect_values, deal
from penstock.trainer.mathematics.loss import StepMetrics


def make_engine(config: TrainConfig, reference: bool = False, updates: int | None = None) -> TrainingEngine:
    """Return the engine that `engine.kind` names, after the import of what it alone needs; the arguments are those of
    `TrainingEngine`.

    Raises `ConfigError`, also if it is not installed, and `EngineError` if its ranks cannot start.
    """
    if config.engine.kind == "local":
        return TrainingEngine(config, reference, updates)
    missing = ", ".join(name for name in ("verl", "ray", "tensordict") if not _installed(name))
    if missing:
        raise ConfigError(
            f'engine.kind: "verl" needs {missing} here: {install_hint("verl")}, into an environment '
            'of its own (docs/scale-out.md), or set it to "local"'
        )
    if reference and config.model.weights == "full":
        raise ConfigError('model.weights: with engine.kind = "verl" only adapters have a reference; use "lora"')
    config = _absolute(config)
    check_paths(config)
    from penstock.trainer.engines.verl_backend import RayRankGroup

    return RemoteEngine(config, RayRankGroup(config), updates)


def _absolute(config: TrainConfig) -> TrainConfig:
    """Return the configuration with absolute paths: ranks have another working directory."""
    model = config.model
    paths = {"path": model.path.absolute(), "adapter": model.adapter and model.adapter.absolute()}
    return config.model_copy(update={"model": model.model_copy(update=paths)})


def _installed(name: str) -> bool:
    # By its distribution: an import could find a directory that happens to have the name.
    try:
        _ = distribution(name)
    except PackageNotFoundError:
        return False
    return True


class RankGroup(Protocol):
    """Processes that hold an engine together; each has the methods of `trainer.engines.verl_backend.ShardedEngine`."""

    def __len__(self) -> int: ...

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks and return their results, in their order. An argument that is a list has one item
        for each rank; any other goes to all."""
        ...

    def close(self) -> None: ...


class RemoteEngine(TrainingEngine):
    """Used in place of `TrainingEngine`, with the same behaviour unless a method says otherwise. `ranks` were started
    with the same configuration."""

    def __init__(self, config: TrainConfig, ranks: RankGroup, updates: int | None = None) -> None:
        policy.seed(config.run.seed)
        self.config = config
        self.updates = config.run.steps * config.optimiser.updates if updates is None else updates
        self.done = 0
        self._ranks = ranks
        self.model = RemotePolicy(config, ranks)

    def prepare(self, batches: Sequence[MicroBatch], old: bool = False) -> list[MicroBatch]:
        wanted = [("old", False)] * old + [("reference", True)] * (self.config.loss.kl > 0)
        found = {name: scores(self._ranks, batches, other) for name, other in wanted}
        return [
            replace(batch, **{name: values[number] for name, values in found.items()})
            for number, batch in enumerate(batches)
        ]

    def step(self, batches: Sequence[MicroBatch], objective: Objective) -> dict[str, float]:
        rate = self.config.learning_rate * schedule(self.config.optimiser, self.done, self.updates)
        parts = self._ranks.ask("advance", deal(batches, len(self._ranks)), objective, rate)
        whole, norm = StepMetrics(), parts[0][1]
        for tally, _ in parts:
            whole.add(tally)
        self.done += 1
        finite = bool(np.isfinite(norm))
        return whole.report() | {"grad_norm": norm, "learning_rate": rate, "skipped": float(not finite)}

    def save_adapter(self, directory: Path) -> None:
        """Like `TrainingEngine.save_adapter`; this machine writes the files."""
        if self.model.full:
            raise ValueError("all weights are trained: there is no adapter, save the model")
        config, weights = self._ranks.ask("adapter")[0]
        write_directory(directory, lambda beside: fill_adapter(beside, config, weights))

    def save_model(self, directory: Path) -> None:
        """Like `TrainingEngine.save_model`; this machine needs the memory for the whole model."""
        here = self.config.engine.model_copy(update={"kind": "local", "ranks": 1, "nodes": 1})
        policy = PolicyModel(self.config.model_copy(update={"engine": here}), device=torch.device("cpu"))
        weights = self._ranks.ask("weights")[0]
        with torch.no_grad():
            for name, one in policy.trained.items():
                one.copy_(weights[name])
        policy.save_model(directory)

    def state(self) -> State:
        """Like `TrainingEngine.state`: a local engine can restore it, and the other way round. `ranks` are the random
        states of the ranks."""
        parts = self._ranks.ask("state")
        random = [part["random"] for part in parts]
        return parts[0] | {"done": self.done, "random": policy.state(), "ranks": random}

    def restore(self, state: State) -> None:
        """Like `TrainingEngine.restore`; the state may be of another number of ranks."""
        random = state.get("ranks") or [state["random"]]
        shared = {key: state[key] for key in ("weights", "optimiser")}
        self._ranks.ask("restore", [random[rank % len(random)] for rank in range(len(self._ranks))], shared)
        self.done = state["done"]
        policy.restore(state["random"])

    def close(self) -> None:
        """End the ranks; they also end with this process."""
        self._ranks.close()


class RemotePolicy(PolicyModel):
    """The policy in the driver: the ranks compute it."""

    def __init__(self, config: TrainConfig, ranks: RankGroup) -> None:
        self.config, self._ranks = config, ranks
        self.full = config.model.weights == "full"
        self.device = torch.device("cpu")

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Like `PolicyModel.logprobs`, on a CPU."""
        return torch.from_numpy(scores(self._ranks, [batch], False)[0])

    def reference(self, batch: MicroBatch) -> Tensor:
        """Like `PolicyModel.reference`, on a CPU."""
        return torch.from_numpy(scores(self._ranks, [batch], True)[0])


def scores(ranks: RankGroup, batches: Sequence[MicroBatch], reference: bool) -> list[Any]:
    """Return [N] log-probabilities of the trained tokens of each micro-batch, under the policy or its reference."""
    return collect_values(ranks.ask("scores", deal(batches, len(ranks)), reference), batches)
