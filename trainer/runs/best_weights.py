"""The best weights of a run: those with the highest mean reward on the first held-out suite. Their directory is kept
however many versions follow, the link `best` in the run's directory leads to it, and a release takes them.

The highest of several means overestimates the reward on other tasks, the more so the more evaluations and the fewer
held-out tasks there are. A release's canary measures the weights anew.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LINK: Final = "best"


@dataclass(slots=True)
class TrainingProgress:
    """The progress of a run; the next step follows from this and the engine's state."""

    step: int = 0
    """Number of steps done."""
    tasks: int = 0
    """Number of tasks taken by these steps."""
    trained: int = 0
    """Step of the newest update."""
    version: int = 0
    """Step of the newest published weights."""
    best: int | None = None
    """Step of the best weights; None before the first evaluation."""
    best_reward: float | None = None
    """Mean reward of the best weights on the held-out tasks."""
    owed: bool = False
    """True if the held-out tasks of `step` run beside the next step and have not ended."""

    def publish_due(self, last: bool, every: int) -> bool:
        """True if weights must be published now: new ones every `every` steps, and the last ones always."""
        return self.trained > self.version and (last or self.step % every == 0)

    def record_evaluation(self, reward: float) -> bool:
        """Note an evaluation of the newest published weights; return True if they are the best so far."""
        if self.best_reward is not None and reward <= self.best_reward:
            return False
        self.best, self.best_reward = self.version, reward
        return True


def link_best(directory: Path, version: Path) -> None:
    """Let `best` in a run's directory lead to a version; atomically, so that it always leads to one. Raises OSError."""
    beside = directory / f".{LINK}"
    beside.unlink(missing_ok=True)
    beside.symlink_to(os.path.relpath(version, directory))
    os.replace(beside, directory / LINK)


def choose_release(place: TrainingProgress) -> tuple[int, str]:
    """Return (the step of the weights to release, the reason for a person); step 0 if there are none to release."""
    if place.best is None:
        return place.version, "the last weights"
    reward = f"reward {place.best_reward:.4g}"
    if place.best == 0:
        return 0, f"no later weights were better on the held-out tasks than those that the run began with ({reward})"
    return place.best, f"the best on the held-out tasks ({reward})"
