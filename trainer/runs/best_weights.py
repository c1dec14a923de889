"""The best weights of a run: those with the highest mean reward on the first held-out suite. Their directory is kept
however many versions come after them, the link `best` in the run's directory leads to it, and a release takes them,
unless `publish.version` says otherwise.

The highest of several means is higher than it will be on other tasks: the more evaluations there are, and the fewer
held-out tasks, the more so. A release's canary measures the weights anew.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.trainer.config import Config

LINK: Final = "best"


@dataclass(slots=True)
class Place:
    """Where a run stands; the next step follows from this and the engine's state."""

    step: int = 0
    """Steps that are done."""
    tasks: int = 0
    """Tasks that they have taken."""
    trained: int = 0
    """The step of the newest update."""
    version: int = 0
    """The step that the newest published weights are of."""
    best: int | None = None
    """The step that the best weights are of; None while nothing was evaluated."""
    best_reward: float | None = None
    """Their mean reward on the held-out tasks."""
    owed: bool = False
    """Whether the held-out tasks of `step` have been left to the next step, and have not ended yet."""

    def due(self, last: bool, every: int) -> bool:
        """Whether weights are published now: those that are new, every so many steps, and the last ones always."""
        return self.trained > self.version and (last or self.step % every == 0)

    def evaluated(self, reward: float) -> bool:
        """Takes an evaluation of the newest published weights; whether they are the best so far."""
        if self.best_reward is not None and reward <= self.best_reward:
            return False
        self.best, self.best_reward = self.version, reward
        return True


def link(directory: Path, version: Path) -> None:
    """Lets `best` in a run's directory lead to a version; in one step, so that it always leads to one. Raises
    OSError."""
    beside = directory / f".{LINK}"
    beside.unlink(missing_ok=True)
    beside.symlink_to(os.path.relpath(version, directory))
    os.replace(beside, directory / LINK)


def to_release(place: Place, config: Config) -> tuple[int, str]:
    """(the step of the weights that a release takes, why these, for a person); 0: there are none to release."""
    if config.publish.version == "last" or place.best is None:
        return place.version, "the last weights"
    reward = f"reward {place.best_reward:.4g}"
    if place.best == 0:
        return 0, f"no later weights were better on the held-out tasks than those that the run began with ({reward})"
    return place.best, f"the best on the held-out tasks ({reward})"
