"""Turns a lack of GPU memory into an error that says what to change."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from penstock.trainer.config import Config
from penstock.trainer.engines.errors import EngineError


@contextmanager
def enough_memory(config: Config) -> Generator[None]:
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
