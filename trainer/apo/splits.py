"""Splits of tasks: one for the search, one for the race, one that is opened once. Pure.

A split by rows leaks: what was learnt about a customer in one split helps on the same customer in another, and nowhere
else. So tasks of one key stay together, and without keys equal tasks do. The share of a split is of tasks, as near as
whole keys allow.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.protocol import AgentTask

SHARES: Final[Mapping[str, float]] = {"train": 0.4, "validation": 0.35, "test": 0.25}
LEAST: Final = 4
"""Fewest tasks of each split."""


@dataclass(frozen=True, slots=True)
class Splits:
    """The tasks of a run."""

    train: Sequence[AgentTask]
    """Tasks for engines."""
    validation: Sequence[AgentTask]
    """Tasks of the race."""
    test: Sequence[AgentTask]
    """Tasks of the test, opened once, when all is decided."""

    @property
    def seal(self) -> str:
        """SHA-256 of the tasks of each split, with their inputs: 16 hex digits."""
        names = [[[task.id, task.key, task.input] for task in one] for one in (self.train, self.validation, self.test)]
        return hashlib.sha256(json.dumps(names, sort_keys=True).encode()).hexdigest()[:16]


def agent_tasks(inputs: Sequence[Any], key: str | None) -> list[AgentTask]:
    """Return tasks with ids by their place: `t0`, `t1` ... `key`: field of the input, or a path of fields such as
    `customer.id`, whose value is the key of a task; without it each task has its own, and equal tasks share one. Raises
    `ConfigError`."""
    first: dict[str, str] = {}
    return [
        AgentTask(f"t{at}", value, first.setdefault(_text(value), f"t{at}") if key is None else _key(value, key, at))
        for at, value in enumerate(inputs)
    ]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _key(value: Any, path: str, at: int) -> str:
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ConfigError(f"tasks.key: task {at + 1} has no field {path!r}")
        value = cast(dict[str, Any], value)[name]
    return value if isinstance(value, str) else _text(value)


def split(tasks: Sequence[AgentTask], seed: int) -> Splits:
    """Split the tasks: keys go in a random order to the split that lacks the largest share. Raises `ConfigError` when a
    split gets fewer than `LEAST` tasks."""
    by_key: defaultdict[str, list[AgentTask]] = defaultdict(list)
    for task in tasks:
        by_key[task.key].append(task)
    order = sorted(by_key)
    random.Random(f"split-{seed}").shuffle(order)
    found: dict[str, list[AgentTask]] = {name: [] for name in SHARES}
    for key in order:
        lacking = max(SHARES, key=lambda name: SHARES[name] - len(found[name]) / len(tasks))
        found[lacking] += by_key[key]
    for name, one in found.items():
        if len(one) < LEAST:
            raise ConfigError(
                f"tasks: the {name} split has {len(one)} of {len(tasks)} tasks with {len(order)} keys, and needs "
                f"{LEAST}; give more tasks, or a key that parts them more finely (tasks.key)"
            )
    places = {task.id: at for at, task in enumerate(tasks)}
    ordered = {name: sorted(one, key=lambda task: places[task.id]) for name, one in found.items()}
    return Splits(ordered["train"], ordered["validation"], ordered["test"])
