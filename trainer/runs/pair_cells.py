"""The four cells of a pair: old and new prompt with old and new weights, on held-out tasks. Pure.

A cell is a mean over tasks of the mean over a task's rollouts, because rollouts of one task are alike. The means, and
their differences on the same tasks, have intervals of Student's t over tasks: they hold for other tasks of the same
kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Final, Literal, NamedTuple

from penstock.trainer.apo.report.figures import t_quantile

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
