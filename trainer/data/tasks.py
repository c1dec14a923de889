"""Tasks: the inputs of rollouts, and the choice of a step's tasks. Pure but for reading the file.

A file of tasks has one JSON value a line, the input of a rollout. Every epoch goes through all of them in an order of
its own, which follows from the seed: step 17 takes the same tasks whenever and however often it is repeated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.gateway.model.toml import ConfigError

# Reads files of JSON lines, whole, before a run begins.


class JsonLine(NamedTuple):
    """A line that is not empty."""

    number: int
    """Line number, from 1."""
    value: Any


def json_lines(key: str, path: Path) -> list[JsonLine]:
    """Return the values of a file that a setting names. Raises `ConfigError` with the setting, the file, the line and
    the error."""
    try:
        # Not `splitlines`: JSON strings may contain other characters that it takes for ends of lines.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from None
    found: list[JsonLine] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(JsonLine(number, _value(line)))
            except json.JSONDecodeError as error:
                raise ConfigError(f"{key}: {path}, line {number}: not JSON: {error.msg}") from None
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{key}: {path}, line {number}: cannot be used: {error}") from None
    return found


def _value(line: str) -> Any:
    """Return the value of a line, which must be valid to send on. Raises `ValueError` and `RecursionError`."""
    value = json.loads(line, parse_constant=_refuse)
    try:
        # Only an escape can contain half a character (a lone surrogate).
        _ = json.dumps(value, ensure_ascii=False).encode() if "\\u" in line else b""
    except UnicodeEncodeError:
        raise ValueError("it has half a character, which cannot be sent") from None
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


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


# Chooses the tasks of a step by the rewards of their earlier rollouts. A task whose rollouts all have the same reward
# teaches nothing: tasks whose rewards differ are taken more often.
#
#     measure     per task: the variance of the rewards of a group; p(1 - p) for rewards of 0 and 1 with success rate p
#     prior       every task counts as if it had `PRIOR` rollouts more, of the highest variance that any task has, so
#                 that untried tasks are tried
#     forgetting  earlier rollouts count `DISCOUNT` as much with every step, because the policy changes. So the prior
#                 comes back, and every task is tried again some time
#     draw        without replacement, in proportion to that weight
#
# The choice follows from the seed, the step and the notes, which are in the checkpoint: a step that is repeated takes
# the same tasks. Sources: tasks of medium difficulty teach most (Bae et al. 2025, arXiv:2504.03380); sampling them by
# measured success, and testing others again (Fatemi 2026, arXiv:2601.02648; for levels of games Jiang et al. 2021,
# arXiv:2010.03934); the draw by keys of Efraimidis and Spirakis (2006). Taking more groups until enough differ
# (`rollouts.dynamic`) is another means to the same end, and costs rollouts.

PRIOR: Final = 1.0
"""Rollouts that the prior counts as."""
DISCOUNT: Final = 0.95
"""Factor of a rollout's weight per step: half is left after 14 steps."""


class Curriculum:
    """The rewards seen so far for each task of a run, and the choice of tasks from them."""

    def __init__(self, tasks: Sequence[RolloutTask], seed: int) -> None:
        self._tasks, self._seed = tasks, seed
        self._sums = np.zeros((2, len(tasks)))
        """By task: the number of its rollouts, and the sum of squared distances of their rewards from the group's
        mean; both discounted by `DISCOUNT` per step."""
        self._tried = np.zeros(len(tasks), np.bool_)
        self._groups: dict[str, int] = {}
        """Task number by the name of a group that has not ended."""

    def register_groups(self, groups: Mapping[str, RolloutTask]) -> None:
        """Note the groups of a step: the task of each, by group name."""
        self._groups |= {name: task.number for name, task in groups.items()}

    def record_rewards(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Note the rewards of a step's groups, one or more each, by group name; called once a step."""
        self._sums *= DISCOUNT
        for name, group in rewards.items():
            task = self._groups[name]
            self._sums[0, task] += len(group)
            # The variance of equal rewards would be rounding errors.
            self._sums[1, task] += 0.0 if max(group) == min(group) else len(group) * float(np.var(group))
            self._tried[task] = True
        self._groups.clear()

    def draw(self, step: int, start: int, count: int) -> list[RolloutTask]:
        """Return the tasks in the places `start` to `start + count` of a step's order. It begins again after the last
        task."""
        random = np.random.default_rng((self._seed, step))
        keys = np.log(1.0 - random.random(len(self._tasks))) / self.weights()
        order = np.argsort(-keys, kind="stable")
        return [self._tasks[order[place % len(order)]] for place in range(start, start + count)]

    def weights(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the weight of each task in the draw, above 0."""
        counts, squares = self._sums
        # If no rewards differ, the tasks with the fewest rollouts are taken.
        highest = self._variances().max(initial=0.0) or 1.0
        return (squares + PRIOR * highest) / (counts + PRIOR)

    def figures(self) -> dict[str, float]:
        """Return metrics: the share of tasks tried, and the share of these whose rewards are all equal."""
        tried = self._tried.sum()
        equal = (self._variances()[self._tried] == 0).mean() if tried else 0.0
        return {"curriculum/tried": float(tried / len(self._tasks)), "curriculum/equal": float(equal)}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"sums": self._sums.tolist(), "tried": self._tried.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. Raises `ValueError` when it has another number of tasks."""
        sums = np.asarray(state["sums"], np.float64)
        if sums.shape != self._sums.shape:
            raise ValueError(f"it was made with {sums.shape[1]} tasks, and rollouts.tasks has {len(self._tasks)}")
        self._sums, self._tried = sums, np.asarray(state["tried"], np.bool_)

    def _variances(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        counts, squares = self._sums
        return np.divide(squares, counts, out=np.zeros_like(squares), where=counts > 0)
