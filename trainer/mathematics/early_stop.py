"""Decides when an unattended run stops itself: when its evaluation falls, and stays low. Pure.

An evaluation is *low* when it is more than `max_drop` below the best so far, which may be the one before any training.
One may be bad luck; two in a row are not.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EvaluationHistory:
    """The evaluations of a run, in their order."""

    max_drop: float
    """Evaluations further than this below the best are low, in units of reward."""
    patience: int = 2
    """Number of low evaluations in a row that stops the run."""
    best: tuple[int, float] | None = None
    """Step and mean reward of the best evaluation, the first of equal ones."""
    low: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Low evaluations since the last one that was not: (step, mean reward)."""

    def add(self, step: int, reward: float) -> None:
        """Add the mean reward of the next evaluation."""
        if self.best is not None and reward < self.best[1] - self.max_drop:
            self.low.append((step, reward))
            return
        self.low.clear()
        if self.best is None or reward > self.best[1]:
            self.best = step, reward

    @property
    def stop_reason(self) -> str | None:
        """Why the run must stop, in a sentence; None while it may go on."""
        if self.best is None or len(self.low) < self.patience:
            return None
        values = ", ".join(f"{reward:.4g} after step {step}" for step, reward in self.low)
        step, reward = self.best
        best = f"the best was {reward:.4g} after step {step} (online.max_drop = {self.max_drop:g})"
        return f"evaluation fell: {values}; {best}"
