"""`[evaluate]` of `train.toml`: held-out tasks. A part of `trainer.config`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from penstock.gateway.model.toml import Section


class SuiteSettings(Section):
    """`[[evaluate.suite]]`: tasks that are never trained on, and are reported together."""

    tasks: Path = Field(strict=False)
    """JSONL file of the tasks, one rollout input a line."""
    name: str = Field(default="held-out", pattern=r"^[A-Za-z0-9_-]{1,32}$")
    """What the suite is called in figures: `evaluation/NAME/reward`."""
    samples: int = Field(default=1, ge=1, le=1000)
    """Rollouts of each task."""
    passed: float = Field(default=1.0, allow_inf_nan=False)
    """Least reward of a rollout that counts as passed, for `pass@k`."""


class EvaluateSettings(Section):
    """`[evaluate]`: held-out tasks."""

    every: int = Field(default=10, ge=1)
    """Steps from one evaluation to the next; the last step is always evaluated."""
    suite: list[SuiteSettings] = Field(default=[])
    """Suites of tasks; the first one's reward says which weights are the best. Default: none."""

    @field_validator("suite")
    @classmethod
    def _names_differ(cls, value: list[SuiteSettings]) -> list[SuiteSettings]:
        names = [suite.name for suite in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two suites are called {name!r}; give each a name of its own")
        return value
