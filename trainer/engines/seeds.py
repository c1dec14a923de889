"""Every source of random numbers that training draws from: seeded, saved and restored together."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch

from penstock.trainer.engines.checkpoint import State


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
