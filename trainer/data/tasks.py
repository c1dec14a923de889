"""Tasks: the inputs of rollouts, and which of them a step takes. Pure but for reading the file.

A file of tasks has one JSON value a line, the input of a rollout. Every epoch goes through all of them in an order of
its own, which follows from the seed: step 17 takes the same tasks whenever and however often it is asked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class TaskError(ValueError):
    """The tasks cannot be used; the message names the file, the line and what is wrong."""


class Task(NamedTuple):
    """A task and its place."""

    number: int
    """Line of the file, from 0."""
    input: Any
    """What its rollouts are given."""


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a file. Raises `TaskError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read: {error}") from None
    found: list[Task] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(Task(len(found), json.loads(line)))
            except json.JSONDecodeError as error:
                raise TaskError(f"{path}, line {number}: not JSON: {error.msg}") from None
    if not found:
        raise TaskError(f"{path} has no tasks")
    return found


def drawn(tasks: Sequence[Task], start: int, count: int, seed: int) -> list[Task]:
    """The tasks in the places `start` to `start + count` of an endless walk through all of them, epoch after epoch."""
    found: list[Task] = []
    while len(found) < count:
        epoch, place = divmod(start + len(found), len(tasks))
        order = np.random.default_rng((seed, epoch)).permutation(len(tasks))
        found += [tasks[number] for number in order[place : place + count - len(found)]]
    return found
