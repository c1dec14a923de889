"""What is believed of prompts and of tools: real gains are found, lucky ones drawn back, tools blamed within tasks."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

from penstock.trainer.apo.advice.estimates import (
    Arm,
    Belief,
    NormalEstimate,
    Observation,
    Stance,
    fit_belief,
    variance_components,
)
from penstock.trainer.apo.protocol import Candidate

STANCES: tuple[Stance, ...] = ("seed", "terse", "steps", "checklist", "scratch", "mended")
ARMS = [Arm(Candidate({"p": stance}), stance) for stance in STANCES]
NAMES = {arm.stance: arm.candidate.id for arm in ARMS}


def observed(draw: random.Random, level: dict[Stance, float], each: int = 16) -> list[Observation]:
    """Rewards of 0 and 1, with these chances."""
    return [
        Observation(NAMES[stance], f"t{at % 8}", float(draw.random() < level.get(stance, 0.4)))
        for stance in STANCES
        for at in range(each)
    ]


def believed(observations: list[Observation]) -> Belief:
    return fit_belief(ARMS, observations, variance_components(observations))


def test_a_gain_is_found_and_named() -> None:
    found = believed(observed(random.Random(1), {"mended": 0.9, "checklist": 0.8}))
    assert found.best == NAMES["mended"]
    assert found.gain.low > 0.05
    assert found.gain.above(0.05) > 0.95
    assert found.seed.low < 0.4 < found.seed.high


def test_intervals_hold_what_they_promise_although_the_best_is_picked() -> None:
    draw = random.Random(2)
    gains = [believed(observed(draw, {})).gain for _ in range(200)]
    # Nothing is better: a naive mean of the best of five is about 0.15 too high.
    assert sum(gain.low > 0 for gain in gains) / len(gains) <= 0.12
    assert sum(gain.mean for gain in gains) / len(gains) < 0.1


def test_misuse_of_tools_is_judged_within_tasks() -> None:
    draw = random.Random(3)

    def rollout(at: int, harm: float) -> Observation:
        task = at % 8
        # Tasks that need the tool are harder anyway.
        misused = int(task < 4 and draw.random() < 0.5)
        return Observation(NAMES["seed"], f"t{task}", 0.5 + 0.4 * (task >= 4) - harm * misused, misused=misused)

    harmful = believed([rollout(at, 0.4) for at in range(64)]).tools
    harmless = believed([rollout(at, 0.0) for at in range(64)]).tools
    assert harmful.mean == pytest.approx(0.1, abs=0.04)
    assert harmless.high < 0.05


def test_without_rewards_everything_is_open() -> None:
    found = believed([])
    assert (found.seed.mean, found.seed.sd) == pytest.approx((0.5, 0.5))
    assert found.tools == NormalEstimate(0.0, 0.0)
    assert fit_belief(ARMS[:1], [], variance_components([])).best is None


def test_a_quantity_without_doubt_is_above_or_not() -> None:
    assert (NormalEstimate(0.1, 0.0).above(0.05), NormalEstimate(0.0, 0.0).above(0.05)) == (1.0, 0.0)
    assert NormalEstimate(0.05, 0.1).above(0.05) == 0.5
