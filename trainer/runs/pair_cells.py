"""The four cells of a pair: old and new prompt with old and new weights, on held-out tasks. Pure.

A cell is a mean over tasks of the mean over a task's rollouts, because rollouts of one task are alike. The means, and
their differences on the same tasks, have intervals of Student's t over tasks: they hold for other tasks of the same
kind.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Final, Literal, NamedTuple, Self

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.resource import Resource
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.config import ApoConfig as Prompts
from penstock.trainer.apo.config import ApoRolloutSettings, ApoRunSettings
from penstock.trainer.apo.gateway_laboratory import GatewayLaboratory
from penstock.trainer.apo.protocol import TrialSpec
from penstock.trainer.apo.report.figures import t_quantile
from penstock.trainer.config import TrainConfig

Age = Literal["old", "new"]
Cell = tuple[Age, Age]
"""(prompt, weights)."""
CELLS: Final[Sequence[Cell]] = (("old", "old"), ("new", "old"), ("old", "new"), ("new", "new"))
TITLES: Final[Mapping[Cell, str]] = {
    ("old", "old"): "old prompt, old weights",
    ("new", "old"): "new prompt, old weights",
    ("old", "new"): "old prompt, new weights",
    ("new", "new"): "new prompt, new weights",
}
Rewards = Mapping[str, Sequence[float]]
"""Rewards by task."""


class TaskMean(NamedTuple):
    """A mean over tasks with its interval of 95 %; with one task the interval has no width."""

    value: float
    low: float
    high: float
    tasks: int


def mean(values: Sequence[float]) -> TaskMean:
    """Return the mean of values, one for each task; at least one."""
    centre = fmean(values)
    spread = t_quantile(0.975, len(values) - 1) * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return TaskMean(centre, centre - spread, centre + spread, len(values))


def by_task(rewards: Rewards) -> dict[str, float]:
    """Return the mean reward of each task that has one."""
    return {task: fmean(values) for task, values in rewards.items() if values}


def difference(one: Rewards, other: Rewards) -> TaskMean | None:
    """Return the mean of `one` less `other`, on tasks that both have; None without any."""
    mine, theirs = by_task(one), by_task(other)
    pairs = [mine[task] - theirs[task] for task in mine if task in theirs]
    return mean(pairs) if pairs else None


def table(cells: Mapping[Cell, Rewards]) -> list[str]:
    """Return a line for each cell that has rewards: its mean and its difference from the first cell, with their
    intervals."""
    base, found = cells.get(CELLS[0], {}), list[str]()
    for cell in CELLS:
        values = list(by_task(cells.get(cell, {})).values())
        if not values:
            continue
        told = f"{TITLES[cell]}: {format_mean(mean(values))}"
        apart = None if cell == CELLS[0] else difference(cells[cell], base)
        found.append(told if apart is None else f"{told}, {format_mean(apart, '+')} against both old")
    return found


def format_mean(one: TaskMean, sign: str = "") -> str:
    """Return a mean as text: 0.512 [0.480, 0.544]."""
    return f"{one.value:{sign}.3f} [{one.low:{sign}.3f}, {one.high:{sign}.3f}]"


def figures(cells: Mapping[Cell, Rewards]) -> dict[str, float]:
    """Return the cells as metrics: `cells/PROMPT_WEIGHTS`, and its `_low` and `_high`."""
    found: dict[str, float] = {}
    for cell, rewards in cells.items():
        if values := list(by_task(rewards).values()):
            one, name = mean(values), f"cells/{cell[0]}_{cell[1]}"
            found |= {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high}
    return found


# The laboratory of `trainer.apo` in a run that trains weights too: its rollouts are pinned to weights as well.
#
# Each set of trials has a label, such as `round-3`, which is in its rollout ids: the same prompt is tried again with
# other weights, and trials that are repeated after a crash find their rollouts on the tape.


class PinnedLaboratory(GatewayLaboratory):
    """The laboratory of one run. Call `with_pins` before use."""

    _label = ""
    _pins: Mapping[str, str] = {}
    _step = 0

    def with_pins(self, label: str, step: int, pins: Mapping[str, str]) -> Self:
        """Return a copy for rollouts of this label and step, which get these versions besides those of the texts."""
        made = copy.copy(self)
        made._label, made._step, made._pins = label, step, pins
        return made

    def _spec(self, order: TrialSpec, versions: Mapping[str, str], mode: Mode) -> RolloutSpec:
        spec = super()._spec(order, {**versions, **self._pins}, mode)
        run = self._config.run.name
        names = {
            "id": f"{run}.{self._label}.{order.candidate}.{order.task}.{order.number}",
            "group": f"{run}.{self._label}.{order.task}",
            "metadata": {**(spec.metadata or {}), "penstock.step": self._step},
        }
        return spec.model_copy(update=names)


def settings_of(prompts: Prompts, config: TrainConfig) -> Prompts:
    """Return the settings of `--prompts` for a run: name, seed and time limit of rollouts are those of the run. Raises
    `ConfigError`."""
    if config.model.name in (*prompts.texts.prompts, *prompts.texts.tools):
        raise ConfigError(f"model.name: {config.model.name!r} is the name of a text too; give one of them another name")
    run = ApoRunSettings(name=config.run.name, directory=config.run.directory, seed=config.run.seed)
    rollouts = ApoRolloutSettings(attempt_timeout=config.rollouts.timeout)
    return prompts.model_copy(update={"run": run, "rollouts": rollouts})


async def versions_of(client: Client, names: Mapping[str, str]) -> dict[str, Resource]:
    """Return these versions of resources. Raises `ConfigError` if one does not exist."""
    found: dict[str, Resource] = {}
    for name, version in names.items():
        try:
            versions = (await client.resource(name)).versions
        except ClientError as error:
            raise ConfigError(f"{name!r}, which the checkpoint names: {error}") from None
        one = next((one for one in versions if one.version == version), None)
        if one is None:
            raise ConfigError(f"the checkpoint names {name}@{version}, which the gateway does not have")
        found[name] = one
    return found
