"""Tasks: the inputs of rollouts, and which of them a step takes. Pure but for reading the file.

A file of tasks has one JSON value a line, the input of a rollout. Every epoch goes through all of them in an order of
its own, which follows from the seed: step 17 takes the same tasks whenever and however often it is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.data.json_lines import json_lines


class Task(NamedTuple):
    """A task and its place."""

    number: int
    """Place in the file, from 0."""
    input: Any
    """What its rollouts are given."""


def read_tasks(key: str, path: Path) -> list[Task]:
    """The tasks of a file that a setting names. Raises `ConfigError`."""
    found = [Task(number, line.value) for number, line in enumerate(json_lines(key, path))]
    if not found:
        raise ConfigError(f"{key}: {path} has no tasks")
    return found


def drawn(tasks: Sequence[Task], start: int, count: int, seed: int) -> list[Task]:
    """The tasks in the places `start` to `start + count` of an endless walk through all of them, epoch after epoch."""
    found: list[Task] = []
    while len(found) < count:
        epoch, place = divmod(start + len(found), len(tasks))
        order = np.random.default_rng((seed, epoch)).permutation(len(tasks))
        found += [tasks[number] for number in order[place : place + count - len(found)]]
    return found
