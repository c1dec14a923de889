"""Tasks: the inputs of rollouts, and the choice of a step's tasks. Pure but for reading the file.

A file of tasks has one JSON value a line, the input of a rollout. Every epoch goes through all of them in an order of
its own, which follows from the seed: step 17 takes the same tasks whenever and however often it is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.data.json_lines import json_lines


class RolloutTask(NamedTuple):
    """A task and its place in the file."""

    number: int
    """Place in the file, from 0."""
    input: Any
    """Input of its rollouts."""


def read_tasks(key: str, path: Path) -> list[RolloutTask]:
    """Read the tasks of a file that a setting names. Raises `ConfigError`."""
    found = [RolloutTask(number, line.value) for number, line in enumerate(json_lines(key, path))]
    if not found:
        raise ConfigError(f"{key}: {path} has no tasks")
    return found


def draw_tasks(tasks: Sequence[RolloutTask], start: int, count: int, seed: int) -> list[RolloutTask]:
    """Return the tasks in the places `start` to `start + count` of an endless walk through all of them, epoch after
    epoch."""
    found: list[RolloutTask] = []
    while len(found) < count:
        epoch, place = divmod(start + len(found), len(tasks))
        order = np.random.default_rng((seed, epoch)).permutation(len(tasks))
        found += [tasks[number] for number in order[place : place + count - len(found)]]
    return found
