"""`apo.toml`: what is optimised, on which tasks, by which engine, and what it may cost. Strict, like `train.toml`."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.gateway.model.base import LONGEST_S, Id
from penstock.gateway.model.release import MOST_COMPANIONS
from penstock.gateway.model.toml import ConfigError, Section, read, validated

ENGINES = ("ours", "beam", "gepa", "edits")
FUNCTION: Final = re.compile(r"[\w.]+:\w+")
SEARCHES: Final = ("run", "texts", "tasks", "reward", "engine", "budget", "reflection")
"""Sections that decide the result of a search."""
MOST_TEXTS: Final = 1 + MOST_COMPANIONS
"""Most texts that one release can change."""
Price = Annotated[float, Field(ge=0)]
RunName = Annotated[Id, Field(max_length=64)]
"""Names of runs; the names of their rollouts and versions begin with them."""


class ApoRunSettings(Section):
    """`[run]`: what this run is called."""

    name: RunName = "apo"
    """Name on the tape; its rollouts and versions begin with it."""
    directory: Path = Field(default=Path("penstock-apo"), strict=False)
    """Directory of splits and report. A run that finds its splits there uses them."""
    seed: int = Field(default=0, ge=0)
    """Random seed of splits, minibatches and task order."""


class TextSettings(Section):
    """`[texts]`: what is optimised. One prompt must be named."""

    prompts: list[Id] = Field(default=[])
    """Names of prompts that the gateway recognises; they are optimised together."""
    tools: list[Id] = Field(default=[])
    """Names of resources of the kind tool-text, which are optimised too. Default: none."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        names = [*self.prompts, *self.tools]
        if not names:
            raise ValueError(
                "prompts: name the resources whose texts are optimised; `penstock prompts discover` finds some"
            )
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is named twice in prompts and tools; name it once")
        if len(names) > MOST_TEXTS:
            raise ValueError(f"prompts and tools name {len(names)} texts; at most {MOST_TEXTS} are optimised together")
        return self


class TaskSettings(Section):
    """`[tasks]`: what agents are given."""

    file: Path | None = Field(default=None, strict=False)
    """JSONL file of tasks, one rollout input a line. `--tasks` overrides it."""
    key: str | None = None
    """Field whose value groups tasks, such as `customer`. Default: only equal tasks are grouped."""


class RewardSettings(Section):
    """`[reward]`: the range of rewards."""

    range: tuple[float, float] = Field(default=(0.0, 1.0), strict=False)
    """Worst and best reward. A rollout that fails or is late without a reward gets the worst."""
    step_cost: float = Field(default=0.0, ge=0)
    """Reward that each model call costs, so that of two equal texts the one with fewer steps wins."""

    @field_validator("range")
    @classmethod
    def _rises(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not value[0] < value[1]:
            raise ValueError(f"{list(value)} does not rise from the worst reward to the best")
        return value

    def scaled(self, value: float, calls: int = 0) -> float:
        """Return a reward as 0 to 1. `calls`: calls of the model, if their cost is to be subtracted."""
        low, high = self.range
        return min(1.0, max(0.0, (value - low - self.step_cost * calls) / (high - low)))


class BudgetSettings(Section):
    """`[budget]`: what the run may cost; kept exactly."""

    rollouts: int = Field(default=500, ge=40)
    """Rollouts of search and race. The test adds `test.repeats` rollouts of each test task for each of its two
    prompts."""
    reflections: int | None = Field(default=None, ge=0)
    """Calls of the reflecting model. Default: no limit."""
    tokens: int | None = Field(default=None, ge=0)
    """Tokens of the reflecting model, in and out, hidden reasoning included. Default: no limit."""
    money: float | None = Field(default=None, ge=0)
    """Cost of these tokens, in the currency of `reflection.price`. Default: no limit."""


class ReflectionSettings(Section):
    """`[reflection]`: the model that reflects. `model` is required."""

    model: str = Field(min_length=1)
    """Model name to ask; the gateway's routes choose the upstream."""
    most_tokens: int = Field(default=4096, ge=64)
    """Most tokens of one answer, hidden reasoning included."""
    price: tuple[Price, Price] = Field(default=(0.0, 0.0), strict=False)
    """Prices of a million input and a million output tokens, such as [1.25, 10.0]."""


class ApoRolloutSettings(Section):
    """`[rollouts]`: how candidates are tried."""

    run: list[str] = Field(default=[])
    """Arguments of a `penstock run` that is started along; `--agent` adds the command. Default: runners run
    elsewhere."""
    attempt_timeout: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """Seconds that an attempt may take. After six times as many a batch goes on without unfinished rollouts, which get
    the worst reward."""

    @property
    def batch_timeout(self) -> float:
        """Seconds after which a batch goes on without the rollouts that have not ended; they get the worst reward."""
        return 6 * self.attempt_timeout


class FinalTestSettings(Section):
    """`[test]`: the test at the end."""

    repeats: int = Field(default=2, ge=0)
    """Rollouts of each test task, for your prompt and for the winner each; 0 leaves the test out."""


class ApoPublishSettings(Section):
    """`[publish]`: what becomes of a winner."""

    release: Literal["auto", "canary", "none"] = "none"
    """Release that promotes itself, release that waits for approval, or none."""
    policy: Path | None = Field(default=None, strict=False)
    """TOML file with the release's policy. Default: that of `penstock release start`."""


class ApoConfig(Section):
    """The whole of `apo.toml`, a table for each part of a prompt search."""

    run: ApoRunSettings = ApoRunSettings()
    texts: TextSettings
    tasks: TaskSettings = TaskSettings()
    reward: RewardSettings = RewardSettings()
    engine: str = "ours"
    """Who proposes candidates: `ours`, `beam`, `gepa`, `edits`, or a function of yours, `module:function`."""
    budget: BudgetSettings = BudgetSettings()
    reflection: ReflectionSettings
    rollouts: ApoRolloutSettings = ApoRolloutSettings()
    test: FinalTestSettings = FinalTestSettings()
    publish: ApoPublishSettings = ApoPublishSettings()

    @model_validator(mode="after")
    def _known_engine(self) -> Self:
        if self.engine not in ENGINES and not FUNCTION.fullmatch(self.engine):
            raise ValueError(f"engine: {self.engine!r} is neither {', '.join(ENGINES)} nor module:function")
        return self


def load(path: Path) -> ApoConfig:
    return validated(ApoConfig, read(path), str(path))


def with_overrides(
    config: ApoConfig, tasks: Path | None, release: Literal["auto", "canary", "none"] | None
) -> ApoConfig:
    """Return the configuration with the options of the command line. Raises `ConfigError` if no tasks are named."""
    inputs = config.tasks if tasks is None else config.tasks.model_copy(update={"file": tasks})
    publish = config.publish if release is None else config.publish.model_copy(update={"release": release})
    found = config.model_copy(update={"tasks": inputs, "publish": publish})
    _ = tasks_file(found)
    return found


def digest(config: ApoConfig) -> str:
    kept = config.model_dump(mode="json", include=set(SEARCHES))
    kept["run"].pop("directory")
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def tasks_file(config: ApoConfig) -> Path:
    if config.tasks.file is None:
        raise ConfigError("tasks.file: name a JSONL file with the tasks that agents are given, one a line, or --tasks")
    return config.tasks.file
