"""Tiny models of transformers with random weights, made on the spot, and configurations that train them."""

from __future__ import annotations

import resource
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fakes.lives import as_its_own
from fakes.settings import merged
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from penstock.trainer.config import TrainConfig

VOCABULARY = 300


def make_model(directory: Path, kind: str = "qwen2", **more: Any) -> Path:
    """Two layers of width 32, with weights large enough that every token matters."""
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }  # fmt: skip
    sizes |= more
    made = Qwen2ForCausalLM(Qwen2Config(**sizes)) if kind == "qwen2" else Qwen3ForCausalLM(Qwen3Config(**sizes))
    made.save_pretrained(directory)
    return directory


def make_tokenizer(template: str | None = None) -> Any:
    """A byte-level BPE tokenizer of at most `VOCABULARY` tokens, with the chat template of `make demo-rl` or this."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["user assistant tool the water and the wheel"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = lookup_template() if template is None else template
    return fast


def lookup_template() -> str:
    """It comes with an agent, and that with an SDK, which need not be here."""
    from examples.lookup_model import TEMPLATE

    return TEMPLATE


def config(path: Path, **sections: dict[str, Any]) -> TrainConfig:
    """A configuration for such a model, on a CPU: LoRA unless said otherwise, learning fast enough to see it."""
    given: dict[str, dict[str, Any]] = {
        "model": {"path": path, "rank": 4},
        "engine": {"batch_tokens": 64},
        "optimiser": {"learning_rate": 0.01},
    }
    return TrainConfig.model_validate(merged(given, sections))


def peak(says: Connection, path: Path, tokens: int) -> None:
    """Says the MiB that a process had at most for a step of so many trained tokens of a vocabulary of 150,000."""
    from penstock.trainer.engines.local import TrainingEngine
    from penstock.trainer.mathematics.batch import MicroBatch

    as_its_own()
    engine = TrainingEngine(config(path, engine={"layout": "padded"}))
    rows, columns = (one.ravel() for one in np.indices((tokens // 64, 64)))
    ids = (np.arange(tokens // 64 * 65, dtype=np.int32) % 150_000).reshape(-1, 65)
    places, ones = np.tile(np.arange(65, dtype=np.int32), (len(ids), 1)), np.ones(tokens, np.float32)
    engine.step(
        [MicroBatch(ids, places, rows, columns + 1, (ones / tokens).astype(np.float32), ones, ones * -11, rows, rows)],
        engine.policy_objective(),
    )
    says.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
