"""Decides when a run that nobody watches stops itself: when its evaluation falls, and stays low. Pure.

An evaluation is *low* when it is more than `max_drop` below the best one so far, the one before any training included.
One may be bad luck; two in a row are not.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Evaluations:
    """The evaluations of a run, in their order."""

    max_drop: float
    """How far below the best one is low, in units of reward."""
    patience: int = 2
    """How many low ones in a row are too many."""
    best: tuple[int, float] | None = None
    """The step of the first best one, and its mean reward."""
    low: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Those that are low since the last one that was not."""

    def add(self, step: int, reward: float) -> None:
        """The next one."""
        if self.best is not None and reward < self.best[1] - self.max_drop:
            self.low.append((step, reward))
            return
        self.low.clear()
        if self.best is None or reward > self.best[1]:
            self.best = step, reward

    @property
    def trouble(self) -> str | None:
        """Why the run must stop, in a sentence; None while it may go on."""
        if self.best is None or len(self.low) < self.patience:
            return None
        values = ", ".join(f"{reward:.4g} after step {step}" for step, reward in self.low)
        step, reward = self.best
        best = f"the best was {reward:.4g} after step {step} (online.max_drop = {self.max_drop:g})"
        return f"evaluation fell: {values}; {best}"
