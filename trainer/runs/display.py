"""Shows a run on this machine's stderr. On a terminal: a bar with the present phase and its duration, below a line for
each step. Elsewhere, in a log: the lines. A line has the figures that fit; all of them are on the tape."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from penstock.gateway.model.run import EventLevel
from penstock.gateway.model.terminal_text import terminal_safe

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SHOWN: Final = (
    "reward",
    "evaluation/*reward",
    "groups/differ",
    "evaluation/*/pass@*",
    "seed/reward",
    "best/reward",
    "test/seed",
    "test/winner",
    "loss",
    "evaluation/loss",
    "accuracy",
    "evaluation/accuracy",
    "failed",
    "cells/old_old",
    "cells/new_new",
    "entropy",
    "kl",
    "clip_fraction",
    "mismatch_k3",
    "staleness/mean",
    "tokens_per_second",
)
"""Metrics of a step's line, the most important first. A star stands for the name of a suite."""
LOG_WIDTH: Final = 120
"""Columns of a line in a log."""
BAR_WIDTH: Final = 10


def point_line(step: int, steps: int | None, values: Mapping[str, float], width: int) -> str:
    """Return a step as a line of at most `width` columns, with the figures that fit."""
    line = f"step {step}" if steps is None else f"step {step}/{steps}"
    for figure in figures(values):
        if len(line) + 2 + len(figure) <= width:
            line += "  " + figure
    return line


def figures(values: Mapping[str, float]) -> Iterator[str]:
    """Yield the metrics of `SHOWN`, each with its interval where it has one."""
    named = (name for pattern in SHOWN for name in values if fnmatchcase(name, pattern))
    for name in dict.fromkeys(named):
        low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
        between = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
        yield f"{name} {values[name]:.4g}{between}"


class LogDisplay:
    """Prints one line for each step."""

    def __init__(self, steps: int | None) -> None:
        self._steps = steps

    def phase(self, step: int, text: str) -> None:
        """Prints nothing: a log is for finished work."""

    def point(self, step: int, values: Mapping[str, float]) -> None:
        print(point_line(step, self._steps, values, LOG_WIDTH), file=sys.stderr, flush=True)

    def line(self, level: EventLevel, text: str) -> None:
        print(_line(level, text), file=sys.stderr, flush=True)


class BarDisplay:
    """Shows a bar, with lines above it."""

    def __init__(self, progress: Progress, steps: int | None) -> None:
        self._progress, self._steps = progress, steps
        self._task: TaskID = progress.add_task("gets ready", total=steps, since=progress.get_time())

    def phase(self, step: int, text: str) -> None:
        now = self._progress.get_time()
        self._progress.update(self._task, description=f"step {step} {text}", completed=max(0, step - 1), since=now)

    def point(self, step: int, values: Mapping[str, float]) -> None:
        # A terminal may go to the next line when a character is in its last column.
        line = point_line(step, self._steps, values, self._progress.console.width - 1)
        self._progress.console.print(line, highlight=False, markup=False, no_wrap=True, overflow="ellipsis")
        self._progress.update(self._task, completed=step)

    def line(self, level: EventLevel, text: str) -> None:
        self._progress.console.print(_line(level, text), highlight=False, markup=False)


def _line(level: EventLevel, text: str) -> str:
    """Return an event without terminal controls: it may contain words of models and agents, which must not control a
    terminal."""
    return terminal_safe(text if level == "info" else f"{level}: {text}")


@contextmanager
def display(steps: int | None) -> Generator[LogDisplay | BarDisplay]:
    """Yield the display that fits stderr. `steps`: number of planned steps; None if unknown."""
    if not sys.stderr.isatty():
        yield LogDisplay(steps)
        return
    with _bar() as progress:
        yield BarDisplay(progress, steps)


def _bar() -> Progress:
    """Return a bar as wide as the terminal: present phase, its duration, steps done, time since the start."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
    from rich.table import Column
    from rich.text import Text

    class PhaseColumn(ProgressColumn):
        """The phase and its duration: the clock goes on while nothing else changes."""

        def render(self, task: Task) -> Text:
            return Text(f"{task.description}, {task.get_time() - task.fields['since']:.0f} s", overflow="ellipsis")

    doing = PhaseColumn(Column(ratio=1, no_wrap=True))
    columns = (doing, BarColumn(bar_width=BAR_WIDTH), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), expand=True)
