"""The policy: a causal language model of transformers, its reference, the log-probabilities of tokens under both, and
its adapter, which can be merged into the weights.

Trained weights are in float32 whatever the format of the computation, which runs in `engine.dtype` under autocast; the
frozen model below a LoRA adapter is in `engine.dtype` itself. The reference is the model with its adapter switched off,
or a frozen copy of all weights.

Logits are computed only for the columns that a trained token needs, a small part of agents' long prompts, and in pieces
if these are many (`chunked_head`).
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, Final, cast

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import TrainConfig
from penstock.trainer.engines import EngineError
from penstock.trainer.engines.checkpoint import State, write_directory
from penstock.trainer.mathematics.batch import MicroBatch

# Computes log-probabilities from a model's last hidden states in pieces, so that memory does not grow with the
# tokens.
#
# A row of logits has a number for each token of the vocabulary: 32,000 trained tokens of a vocabulary of 150,000 are
# 20 GB in float32, and as much again for their gradients. Here at most `LOGITS` numbers exist at a time. The backward
# pass computes the pieces again (`torch.utils.checkpoint`), which costs the output layer once more and nothing else.
#
# The output layer is replaced while the model runs, so that its wrappers (an adapter, FSDP) see one call and one
# output. A model that changes its logits afterwards would change log-probabilities instead; `agrees` detects such
# models, and their logits are computed in one piece.

LOGITS: Final = 1 << 25
"""Logits computed at a time: 128 MiB in float32."""


def score_logits(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return [2, N] in nats, from logits [N, V] and tokens [N]: log-probabilities, with gradients, and entropies,
    without."""
    chosen = logits.float() / temperature
    whole = chosen.logsumexp(-1)
    logprobs = chosen.gather(1, targets[:, None])[:, 0] - whole
    with torch.no_grad():
        entropy = whole - (torch.softmax(chosen, -1) * chosen).sum(-1)
    return torch.stack((logprobs, entropy))


@contextmanager
def chunked_head(
    network: torch.nn.Module, rows: Tensor, places: Tensor, targets: Tensor, temperature: float, size: int
) -> Generator[None]:
    """Replace the network's output layer: within the context its logits are `score_logits` of the hidden states at
    [rows, places], `size` tokens at a time."""
    head = cast(Any, network).get_output_embeddings()
    whole: Callable[[Tensor], Tensor] = head.forward

    def piece(hidden: Tensor, wanted: Tensor) -> Tensor:
        return score_logits(whole(hidden), wanted, temperature)

    def forward(hidden: Tensor) -> Tensor:
        chosen = hidden[rows, places]
        parts = zip(chosen.split(size), targets.split(size), strict=True)
        # cast: `checkpoint` has no type for its result.
        return torch.cat([cast(Tensor, checkpoint(piece, *part, use_reentrant=False)) for part in parts], 1)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def chunk_size(vocabulary: int) -> int:
    """Return the number of tokens of a piece."""
    return max(1, LOGITS // vocabulary)


def agrees(whole: Tensor, pieces: Tensor) -> bool:
    """True if a model's log-probabilities are the same in one piece and in pieces, up to rounding."""
    return whole.shape == pieces.shape and torch.allclose(whole, pieces, atol=0.05)


WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
"""Endings of files with weights, and of their index files."""
LORA_SCALE: Final = 2
"""Factor of a new adapter's output (`alpha / rank`), at any rank."""


class PolicyModel:
    """A model and its trained tensors. `reference`: log-probabilities of a reference will be needed; `device`: the
    model's device, by default a GPU if there is one."""

    def __init__(self, config: TrainConfig, reference: bool = False, device: torch.device | None = None) -> None:
        self.config = config
        self.full = config.model.weights == "full"
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = cast(torch.dtype, getattr(torch, config.engine.dtype))
        self.network = self._load().to(self.device)
        self._frozen = copy.deepcopy(self.network).requires_grad_(False).eval() if reference and self.full else None
        self.trained = {name: one for name, one in self.network.named_parameters() if one.requires_grad}
        self._in_pieces = self._try_pieces()
        if config.engine.layout == "packed":
            self._refuse_leaks()

    def _load(self) -> torch.nn.Module:
        path, engine = self.config.model.path, self.config.engine
        check_paths(self.config)
        # Its progress bars would be drawn over the run's display.
        logging.disable_progress_bar()
        model = _pretrained(path, torch.float32 if self.full else self.dtype)
        if engine.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return without_dropout(model if self.full else _in_format_of_layers(_adapted(model, self.config)))

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [N] log-probabilities of the trained tokens, in nats, float32, without gradients."""
        self.network.eval()
        with torch.no_grad():
            return self.forward(batch)[0]

    def reference(self, batch: MicroBatch) -> Tensor:
        """Return [N] log-probabilities of the trained tokens under the reference."""
        if self._frozen is not None:
            with torch.no_grad():
                return self.forward(batch, self._frozen)[0]
        if self.full:
            raise ValueError("no reference was asked for when this policy was loaded")
        with cast(PeftModel, self.network).disable_adapter():
            return self.logprobs(batch)

    def forward(self, batch: MicroBatch, model: torch.nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Return log-probabilities, with gradients, and entropies of the trained tokens: [N] each, in nats. Raises
        `EngineError` for a token that the model does not know: in the model it would make the GPU unusable."""
        if (largest := int(batch.ids.max())) >= self._vocabulary:
            raise EngineError(
                f"a sample has the token {largest}, and the model in {self.config.model.path} has {self._vocabulary}: "
                "what samples is another model; let the inference server have this one, or correct model.path"
            )
        size = chunk_size(self._vocabulary)
        logprobs, entropy = self._scored(batch, size if len(batch.rows) > size and self._in_pieces else None, model)
        return logprobs, entropy.detach()

    def _scored(self, batch: MicroBatch, size: int | None, model: torch.nn.Module | None = None) -> Tensor:
        """Return [2, N] log-probabilities and entropies. `size`: tokens of a piece, None to compute all logits at
        once."""
        columns, place = np.unique(batch.columns - 1, return_inverse=True)
        network, rows, places = model or self.network, self.tensor(batch.rows), self.tensor(place)
        targets = self.tensor(batch.ids[batch.rows, batch.columns]).long()
        temperature = self.config.rollouts.temperature
        pieces = nullcontext() if size is None else chunked_head(network, rows, places, targets, temperature, size)
        with self._autocast(), pieces:
            made: Tensor = network(
                input_ids=self.tensor(batch.ids).long(),
                position_ids=self.tensor(batch.positions).long(),
                use_cache=False,
                logits_to_keep=self.tensor(columns),
            ).logits
        return made if size is not None else score_logits(made[rows, places], targets, temperature)

    @property
    def _vocabulary(self) -> int:
        return int(cast(Any, self.network).config.get_text_config().vocab_size)

    def _try_pieces(self) -> bool:
        """True if this model's log-probabilities can be computed in pieces."""
        self.network.eval()
        batch = _batch(np.arange(8, dtype=np.int32)[None] % self._vocabulary, np.arange(8, dtype=np.int32)[None])
        with torch.no_grad():
            return agrees(self._scored(batch, None), self._scored(batch, 2))

    def tensor(self, array: Any) -> Tensor:
        """Return an array as a tensor on the model's device."""
        return torch.from_numpy(array).to(self.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype != torch.float32:
            return torch.autocast(self.device.type, self.dtype)
        return nullcontext()

    def _refuse_leaks(self) -> None:
        """Raise `ConfigError` if the model carries a state along the row, over the border between two packed
        examples."""
        size = self._vocabulary
        ids = np.arange(8, dtype=np.int32)[None] % size
        other = np.where(np.arange(8) < 4, (ids + 1) % size, ids).astype(np.int32)
        if not torch.equal(self._of_second_half(ids), self._of_second_half(other)):
            raise ConfigError('engine.layout: in this model packed examples see each other; set it to "padded"')

    def _of_second_half(self, ids: Any) -> Tensor:
        positions = np.tile(np.arange(4, dtype=np.int32), 2)[None]
        return self.logprobs(_batch(ids, positions))

    def save_adapter(self, directory: Path) -> None:
        """Write the adapter in PEFT's format, for vLLM and others; complete or absent.

        Raises `CheckpointError`, and `ValueError` if all weights are trained.
        """
        if self.full:
            raise ValueError("all weights are trained: there is no adapter, save the model")
        write_directory(directory, self._fill_adapter)

    def _fill_adapter(self, directory: Path) -> None:
        model = cast(PeftModel, self.network)
        weights = get_peft_model_state_dict(model, save_embedding_layers=False)
        fill_adapter(directory, model.peft_config["default"], weights)

    def save_model(self, directory: Path) -> None:
        """Write the whole model in `engine.dtype`, with an adapter merged into it; complete or absent.

        The other files of the model's directory are copied: tokenizer, chat template. Raises `CheckpointError`.
        """
        write_directory(directory, self._fill_model)

    def _fill_model(self, directory: Path) -> None:
        made: Any = copy.deepcopy(self.network)
        model = made if self.full else made.merge_and_unload()
        model.to(self.dtype).save_pretrained(directory)
        copy_rest(self.config.model.path, directory)


def without_dropout(network: torch.nn.Module) -> torch.nn.Module:
    """Switch off dropout and return the network, whatever an adapter or a model was trained with before: two passes
    over the same tokens must have the same log-probabilities, or ratios would be noise."""
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - torch's own types know no such field
    return network


def copy_rest(model: Path, directory: Path) -> None:
    """Copy the files of a model's directory that are no weights and are missing in the other: tokenizer, chat
    template."""
    for path in model.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS) and not (directory / path.name).exists():
            shutil.copyfile(path, directory / path.name)


def _batch(ids: Any, positions: Any) -> MicroBatch:
    """Return a batch of [1, 8] tokens, the last three of which are trained."""
    nothing, zeros, columns = np.zeros(3, np.float32), np.zeros(3, np.intp), np.arange(5, 8)
    return MicroBatch(ids, positions, zeros, columns, nothing, nothing, nothing, zeros, zeros)


def _pretrained(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    # Files can be wrong in as many ways as there are formats: SafetensorError, OSError, ValueError, RuntimeError.
    except Exception as error:
        raise ConfigError(
            f"model.path: the model in {path} cannot be loaded ({type(error).__name__}: {first_line(error)}); its "
            "files are incomplete, damaged or of another kind: copy them again"
        ) from None
    return made


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason is given"


def check_paths(config: TrainConfig) -> None:
    """Raise `ConfigError` unless the model and the adapter to begin with are where the configuration says."""
    path, adapter = config.model.path, config.model.adapter
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path: {path} holds no config.json; it must be the directory of a model")
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise ConfigError(f"model.adapter: {adapter} holds no adapter_config.json")


def fill_adapter(directory: Path, config: Any, weights: dict[str, Tensor]) -> None:
    """Write the files of an adapter's directory: PEFT's configuration, and the weights by name."""
    made = copy.copy(config)
    made.inference_mode = True
    # A set has another order in every process; the same weights must give the same bytes.
    if isinstance(made.target_modules, set):
        made.target_modules = sorted(made.target_modules)
    made.save_pretrained(str(directory))
    tensors = {name: one.detach().to("cpu").contiguous() for name, one in weights.items()}
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})


def _in_format_of_layers(network: torch.nn.Module) -> torch.nn.Module:
    """Let the adapter take the inputs of layers in their own format, and return the network. PEFT would keep each in
    float32 as well, which is more memory than all other activations."""
    for module in network.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
    return network


def _adapted(model: PreTrainedModel, config: TrainConfig) -> torch.nn.Module:
    wanted = config.model
    if wanted.adapter is not None:
        return _with_adapter(model, wanted.adapter)
    _check_targets(model, wanted.targets)
    made = LoraConfig(
        task_type="CAUSAL_LM",
        r=wanted.rank,
        lora_alpha=LORA_SCALE * wanted.rank,
        target_modules=wanted.targets,
    )
    with warnings.catch_warnings():
        # peft asks transformers for an attribute by its former name.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return get_peft_model(model, made)
        except ValueError as error:
            raise _wrong_targets(model, f"{wanted.targets!r} do not fit this model: {first_line(error)}") from None


def _check_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raise `ConfigError` unless every target fits: PEFT accepts a list of which one fits."""
    if isinstance(targets, str):
        return
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise _wrong_targets(model, f"this model has no module {target!r}")


def _wrong_targets(model: PreTrainedModel, what: str) -> ConfigError:
    names = sorted({name.rpartition(".")[2] for name, one in model.named_modules() if _linear(one)})
    return ConfigError(
        f'model.targets: {what}; its linear modules are {", ".join(names)}, "all-linear" are all of them'
    )


def _linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def _with_adapter(model: PreTrainedModel, adapter: Path) -> torch.nn.Module:
    try:
        return PeftModel.from_pretrained(model, str(adapter), is_trainable=True, local_files_only=True)
    # As for the model's own files, and where it was made for another model.
    except Exception as error:
        raise ConfigError(
            f"model.adapter: the adapter in {adapter} cannot be loaded ({type(error).__name__}: {first_line(error)}); "
            "its files are damaged, or it is of another model"
        ) from None


# Every source of random numbers that training draws from: seeded, saved and restored together.


def seed(number: int) -> None:
    """Seeds python, numpy and torch."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def state() -> State:
    """Return the states of all sources of random numbers."""
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(saved: State) -> None:
    """Restore a `state()`, which may be of a machine with more GPUs."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    torch.cuda.set_rng_state_all(saved["cuda"][: torch.cuda.device_count()])


# The machine's speed for a run in one line, so that nobody finds out after a day that it takes a month.

SIZE: Final = 512
"""Rows and columns of the matrices in the measurement of speed."""


def describe_machine(policy: PolicyModel) -> str:
    """Return a line: the device that computes a policy, the policy's size, and on a CPU the highest possible speed of
    training."""
    if policy.config.engine.kind == "verl":
        return f"computes on {policy.config.engine.ranks} ranks of verl"
    size = sum(one.numel() for one in policy.network.parameters())
    if policy.device.type == "cuda":
        slow = ', in float32: engine.dtype = "bfloat16" is several times faster'
        name = torch.cuda.get_device_name(policy.device)
        return f"computes on {name}: {_short(size)} parameters{slow if policy.dtype == torch.float32 else ''}"
    why = "" if torch.cuda.is_available() else "there is no usable GPU here: "
    rate = _operations() / (size * (6 if policy.full else 4))
    return (
        f"{why}computes on the CPU (threads: {torch.get_num_threads()}); for {_short(size)} parameters that is at best "
        f"{_short(rate)} tokens a second"
    )


def _operations() -> float:
    """Return floating-point operations a second, float32. A token takes 2 for each parameter in the forward pass, as
    many in the backward pass through the layers, and again as many where weights themselves have gradients (Kaplan et
    al. 2020, arXiv:2001.08361)."""
    one = torch.ones(SIZE, SIZE)
    times: list[float] = []
    for _ in range(5):
        began = perf_counter()
        _ = one @ one
        times.append(perf_counter() - began)
    return 2 * SIZE**3 / min(times)


def _short(number: float) -> str:
    """Return a number with two digits and a unit: 1.2 M."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.2g}{name}" if number < 100 * unit else f"{number / unit:.0f}{name}"
    return f"{number:.2g}" if number < 100 else f"{number:.0f}"


# An adapter merged into the weights of its model: a directory as the Hugging Face hub lays models out.
#
# The sum is computed in float32 and written in the model's own format. Tokenizer and chat template are those of the
# model.


class MergeError(Exception):
    """Adapter and model cannot be merged; the message says why."""


def merge_adapter(adapter: Path, model: Path | None, target: Path) -> Path:
    """Write the merged model to `target`, which must not exist, and return the directory of the base model. `model`:
    that directory; None for the one that the adapter names.

    Raises `MergeError`, and `CheckpointError` if `target` cannot be written.
    """
    base = _base(adapter, model)
    if target.exists():
        raise MergeError(f"{target} exists; name another directory with --output")
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
        kept = cast(torch.dtype, loaded.dtype)
        adapted: Any = PeftModel.from_pretrained(loaded.float(), str(adapter), local_files_only=True)
    # Each format of weights fails in its own way: OSError, SafetensorError, RuntimeError where shapes differ.
    except Exception as error:
        raise MergeError(f"{adapter} does not fit {base}, or one of them is damaged: {first_line(error)}") from error
    merged = adapted.merge_and_unload().to(kept)
    write_directory(target, lambda beside: _fill(beside, merged, base))
    return base


def _fill(directory: Path, merged: Any, base: Path) -> None:
    merged.save_pretrained(directory)
    copy_rest(base, directory)


def _base(adapter: Path, model: Path | None) -> Path:
    path = adapter / "adapter_config.json"
    try:
        named = json.loads(path.read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise MergeError(f"{adapter} is no directory of an adapter: {path.name}: {first_line(error)}") from None
    base = Path(str(named)) if model is None else model
    if not (base / "config.json").is_file():
        hint = f"{adapter} names it; give the model's directory with --model" if model is None else "correct --model"
        raise MergeError(f"{base} holds no config.json, so it is no directory of a model; {hint}")
    return base
