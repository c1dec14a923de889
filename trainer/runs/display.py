"""A run on this machine's stderr: a bar and the newest figures on a terminal, a line a step elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from penstock.gateway.model.run import Level

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SHOWN: Final = (
    "reward",
    "failed",
    "seed/reward",
    "best/reward",
    "test/seed",
    "test/winner",
    "evaluation/reward",
    "loss",
    "evaluation/loss",
    "accuracy",
    "evaluation/accuracy",
    "cells/old_old",
    "cells/new_new",
    "entropy",
    "kl",
    "clip_fraction",
    "mismatch_k3",
    "staleness/mean",
    "tokens_per_second",
)
"""Metrics that the one line shows."""


def figures(values: Mapping[str, float]) -> str:
    """The newest ones, in a line."""
    return "  ".join(f"{name} {values[name]:.4g}" for name in SHOWN if name in values)


class Lines:
    """One line for each step."""

    def __init__(self, steps: int | None) -> None:
        self._of = "" if steps is None else f"/{steps}"

    def phase(self, step: int, text: str) -> None:
        """Prints nothing: a log is for finished work."""

    def point(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a step."""
        print(f"step {step}{self._of}  {figures(values)}", file=sys.stderr, flush=True)

    def line(self, level: Level, text: str) -> None:
        """Something that happened."""
        print(text if level == "info" else f"{level}: {text}", file=sys.stderr, flush=True)


class Live:
    """A bar, with lines above it."""

    def __init__(self, progress: Progress, steps: int | None) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task("", total=steps)

    def phase(self, step: int, text: str) -> None:
        """What is being done."""
        self._progress.update(self._task, description=f"step {step} {text}", completed=max(0, step - 1))

    def point(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a step."""
        self._progress.console.print(f"step {step}  {figures(values)}", highlight=False)
        self._progress.update(self._task, completed=step)

    def line(self, level: Level, text: str) -> None:
        """Something that happened."""
        self._progress.console.print(text if level == "info" else f"{level}: {text}", highlight=False, markup=False)


@contextmanager
def display(steps: int | None) -> Generator[Lines | Live]:
    """The display that fits stderr. `steps`: how many are planned; None when nobody knows."""
    if not sys.stderr.isatty():
        yield Lines(steps)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Live(progress, steps)
