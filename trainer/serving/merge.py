"""Merges an adapter into the weights of its model: a directory as the Hugging Face hub lays models out.

The sum is computed in float32 and written in the model's own format. Tokenizer and chat template are those of the
model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from penstock.trainer.engines.checkpoint import write_directory
from penstock.trainer.engines.policy import copy_rest, first_line


class MergeError(Exception):
    """Adapter and model cannot be merged; the message says why."""


def merge(adapter: Path, model: Path | None, target: Path) -> Path:
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
