"""`engine.kind = "verl"`: ranks that are verl's workers over Ray. The only module that imports them.

    ranks = RayRankGroup(config)    # processes on a Ray cluster, for trainer.engines.remote.RemoteEngine
    ranks.close()

verl places the ranks (`RayResourcePool`, `RayWorkerGroup`). In each it builds the network, its adapter and its
optimiser, spread over all ranks by FSDP2 (`FSDPEngineWithLMHead`); it also clips and steps. The batches and the losses
are ours (`ShardedEngine`). verl's own trainer, batches and losses are not used, so a step equals the local
engine's up to the order of sums.

verl knows GPUs and NPUs; `CpuPlatform` describes a machine without them to verl.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast
from uuid import uuid4

import ray as _ray
import torch
import torch.distributed
from peft import PeftModel, get_peft_model_state_dict
from ray.exceptions import RayError, RayTaskError
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import MAX_NORM, TrainConfig
from penstock.trainer.engines import EngineError, policy
from penstock.trainer.engines.checkpoint import State
from penstock.trainer.engines.local import Objective, TrainingEngine, check_fit
from penstock.trainer.engines.policy import LORA_SCALE, PolicyModel, without_dropout
from penstock.trainer.mathematics.batch import MicroBatch, is_filler
from penstock.trainer.mathematics.loss import LossInputs, StepMetrics

ray: Any = _ray
"""Ray, untyped: its annotations are not complete enough to check against."""
Cuda: Any = PlatformCUDA
"""verl's CUDA platform, untyped: the decorator that registers it hides its type."""


# -- the ranks, seen from the driver -----------------------------------------------------------------------------------


class RayRankGroup:
    """The processes of an engine on a Ray cluster."""

    def __init__(self, config: TrainConfig) -> None:
        wanted = config.engine
        _join(config)
        self._gpu = bool(ray.cluster_resources().get("GPU"))
        _refuse_few("GPU" if self._gpu else "CPU", config)
        _settle(self._gpu)
        # verl would draw a random name, which with the run's seed would always be the same.
        name, places = f"penstock-{uuid4().hex[:8]}-", [wanted.ranks // wanted.nodes] * wanted.nodes
        self._pool = RayResourcePool(places, use_gpu=self._gpu, name_prefix=name, max_colocate_count=1)
        actor = RayClassWithInitArgs(ray.remote(Rank), config, self._gpu)
        device = "cuda" if self._gpu else "cpu"
        self._group = RayWorkerGroup(self._pool, actor, name_prefix=name, device_name=device)
        self.ask("begin")

    def __len__(self) -> int:
        return cast(int, self._group.world_size)

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """See `trainer.engines.remote.RankGroup.ask`. Raises `EngineError` when a rank fails or dies, `ConfigError`
        when a rank raises one."""
        # `ray.put` sends a shared argument to each machine once.
        spread = [one if isinstance(one, list) else [ray.put(one)] * len(self) for one in arguments]
        try:
            return self._group.execute_all_sync(method, *spread)
        except RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise error.cause from None
            raise EngineError(f"a rank failed: {type(error.cause).__name__}: {error.cause}") from error
        except RayError as error:
            raise EngineError(f"a rank has died: {' '.join(str(error).split())[:500]}") from error

    def close(self) -> None:
        """End the ranks and free their places."""
        for worker in self._group.workers:
            ray.kill(worker)
        for group in self._pool.pgs or ():
            ray.util.remove_placement_group(group)


def _join(config: TrainConfig) -> None:
    """Connect this process to the cluster that `RAY_ADDRESS` names, or to one of its own, once."""
    address = os.environ.get("RAY_ADDRESS", "local")
    if ray.is_initialized():
        return
    _ = os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Only a cluster that we start takes its resources from us: there may be more ranks on CPUs than cores.
    own = {"num_cpus": max(os.cpu_count() or 1, config.engine.ranks), "include_dashboard": False}
    more = own if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, namespace="penstock", **more)
    except (ConnectionError, ValueError, RayError) as error:
        raise ConfigError(f"cannot reach the Ray cluster at RAY_ADDRESS = {address!r}: {error}") from None


def _refuse_few(resource: str, config: TrainConfig) -> None:
    """Raise `ConfigError` if the cluster has too few of a resource: Ray would wait for them for ever."""
    wanted, there = config.engine.ranks, int(ray.cluster_resources().get(resource, 0))
    if there < wanted:
        raise ConfigError(f"engine.ranks: {wanted} ranks need a {resource} each, and the Ray cluster has {there}")


# -- a rank ------------------------------------------------------------------------------------------------------------


class Rank(Worker):
    """A process of the engine: a Ray actor."""

    def __init__(self, config: TrainConfig, gpu: bool) -> None:
        _settle(gpu)
        super().__init__()
        self.config, self.gpu = config, gpu

    def begin(self) -> None:
        """Join the process group, and build the network together with the other ranks."""
        backend = "cpu:gloo,cuda:nccl" if self.gpu else "gloo"
        torch.distributed.init_process_group(backend, rank=self.rank, world_size=self.world_size)
        # All ranks use the first rank's adapter, and the seed makes it the same as the local engine's.
        policy.seed(self.config.run.seed)
        self.verl = _built(self.config)
        device = torch.device("cuda", torch.cuda.current_device()) if self.gpu else torch.device("cpu")
        model = ShardedPolicy(self.config, self.verl.module, device)
        self.part = ShardedEngine(self.config, model, self.verl.optimizer, self.verl.optimizer_step)

    def scores(self, batches: list[MicroBatch], reference: bool) -> list[Any]:
        """Return [N] log-probabilities for each of this rank's micro-batches."""
        ask = self.part.model.reference if reference else self.part.model.logprobs
        with self.verl.eval_mode():
            return [ask(batch).cpu().numpy() for batch in batches]

    def advance(self, batches: list[MicroBatch], objective: Objective, rate: float) -> tuple[StepMetrics, float]:
        with self.verl.train_mode():
            return self.part.advance(batches, objective, rate)

    def adapter(self) -> Any:
        """See `ShardedEngine.adapter`; only the first rank returns it, the others None."""
        adapter = self.part.adapter()
        return adapter if self.rank == 0 else None

    def weights(self) -> Any:
        """See `ShardedEngine.weights`; only the first rank returns them, the others None."""
        weights = self.part.weights()
        return weights if self.rank == 0 else None

    def state(self) -> State:
        """See `ShardedEngine.state`; the first rank returns all of it, the others only their `random`."""
        state = self.part.state()
        return state if self.rank == 0 else {"random": state["random"]}

    def restore(self, random: State, shared: State) -> None:
        self.part.restore(shared | {"random": random})


def _built(config: TrainConfig) -> Any:
    """Return verl's engine: the network, sharded over the ranks, and its optimiser."""
    # This import reads the platform that `_settle` sets, so it is not at the top.
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    engine: Any = FSDPEngineWithLMHead
    model, wanted = config.model, config.engine
    settings = HFModelConfig(
        path=str(model.path),
        load_tokenizer=False,
        override_config={"attn_implementation": "sdpa"},
        enable_gradient_checkpointing=wanted.gradient_checkpointing,
        use_remove_padding=False,
        lora_rank=model.rank if model.weights == "lora" else 0,
        lora_alpha=LORA_SCALE * model.rank,
        target_modules=model.targets,
        lora_adapter_path=None if model.adapter is None else str(model.adapter),
    )
    # Trained tensors stay in float32, and so do the sums of their gradients.
    spread = FSDPEngineConfig(
        strategy="fsdp2",
        fsdp_size=wanted.ranks,
        model_dtype="fp32",
        mixed_precision={"param_dtype": wanted.dtype, "reduce_dtype": "float32"},
        use_torch_compile=False,
    )
    steps = FSDPOptimizerConfig(
        lr=config.learning_rate,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        clip_grad=MAX_NORM,
        total_training_steps=1,  # of its own schedule, which is not used
    )
    made = engine(settings, spread, steps, CheckpointConfig())
    made.initialize()
    return made


def _settle(gpu: bool) -> None:
    """Set verl's platform for this process, which verl would guess."""
    set_platform(Cuda() if gpu else CpuPlatform())


class CpuPlatform(Cuda):
    """The platform of a machine without a GPU; the other methods of `Cuda` are never called."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"

    def empty_cache(self) -> None: ...


# One rank's part of an engine whose network is sharded over several: each holds a piece of every weight (FSDP2).
#
#     part = ShardedEngine(config, model, optimiser, update)
#     tally = part.accumulate(dealt, objective)     # its own micro-batches
#     norm = update()                               # clips and steps, all ranks together
#
# All ranks go through the network at the same time, with the same number of micro-batches. Losses and gradients come
# from the local engine's own code: the ranks' losses add up to that of the step, and because the network takes the
# mean of their gradients, each is multiplied by the number of ranks.
#
# The state is gathered into the local engine's form: a run may go on with another number of ranks, or with the local
# engine.


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
