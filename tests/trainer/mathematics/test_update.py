"""What a step of several updates reports, and how old its samples are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.mistakes import tells
from fakes.tiny_model import config, make_model
from fakes.training import sample

from penstock.gateway.model.rollout import RolloutStatus
from penstock.trainer.data.collector import RolloutBatch
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.update import learn
from penstock.trainer.runs.grpo import IdleStepCounter, versions_behind


def test_the_largest_of_several_updates_is_the_largest(tmp_path: Path) -> None:
    """And their means are means: the engine of one of the rollouts is far away, in one of two updates."""
    model, found = make_model(tmp_path), dict[int, dict[str, float]]()
    samples = [sample(f"r{n}", n % 2, [1, 2, 3], [4, 5], logprobs=-20.0 if n == 0 else -6.0) for n in range(4)]
    for updates in (1, 2):
        engine = TrainingEngine(config(model, optimiser={"updates": updates, "learning_rate": 1e-9}))
        found[updates] = learn(engine, samples, lambda _: 0, engine.config)
    assert found[2]["updates"] == 2
    assert found[1]["mismatch_max"] > 10
    for name in ("mismatch_max", "ratio_max", "mismatch_k1", "entropy"):
        assert found[2][name] == pytest.approx(found[1][name], rel=1e-4), name


async def test_an_update_that_changes_nothing_is_none_and_is_told(tmp_path: Path) -> None:
    """One reward that is far too large takes the gradient of a whole update."""
    engine = TrainingEngine(config(make_model(tmp_path), optimiser={"updates": 2}))
    samples = [sample(f"r{n}", n % 2, [1, 2, 3], [4, 5], group=f"g{n // 2}") for n in range(4)]
    odd = [*samples[:2], *(replace(one, reward=one.reward * 3e38) for one in samples[2:])]
    found = learn(engine, odd, lambda _: 0, engine.config)
    assert (found["updates"], found["dropped/rollouts_not_finite"]) == (1, 2)
    found = learn(engine, odd[2:], lambda _: 0, engine.config)
    assert (found["updates"], found["dropped/rollouts_not_finite"]) == (0, 2)
    collected = RolloutBatch(ended=Counter({RolloutStatus.SUCCEEDED: 2}), names=["r2", "r3"])
    said = await IdleStepCounter(engine.config, nobody).record(collected, found, has_learnt=False)
    assert tells(said, "2 of 2 rollouts", "gradient that is not finite", "optimiser.learning_rate")


async def nobody(rollout: str) -> None:
    """Nothing is said of its reward."""


@pytest.mark.parametrize(
    ("version", "newest", "every", "versions"),
    [
        ("run.3", 3, 1, 0), ("run.1", 3, 1, 2), ("run.0", 8, 8, 1), ("run.8", 8, 8, 0), ("run.0", 10, 8, 2),
        ("run.9", 8, 8, 0), ("base", 8, 1, 0), (None, 8, 1, 0), ("other.1", 8, 1, 0), ("run.x", 8, 1, 0),
    ],
)  # fmt: skip
def test_age_is_counted_in_versions_and_not_in_steps(
    version: str | None, newest: int, every: int, versions: int
) -> None:
    assert versions_behind("run", version, newest, every) == versions
