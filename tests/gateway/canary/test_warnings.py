"""Warnings about rewards that do not come."""

from __future__ import annotations

import random

import pytest

from penstock.gateway.canary.decision import Canary
from penstock.gateway.canary.evidence import Observation
from penstock.gateway.canary.warnings import warnings
from penstock.gateway.model.policy import Policy, Stage


def warned(missing: tuple[float, float], rollouts: int = 400, policy: Policy | None = None, seed: int = 1) -> list[str]:
    """What is said after so many rollouts, whose rewards are missing at these rates by arm."""
    canary = Canary(policy or Policy(stages=[Stage(split=0.5)]), 0.1)
    rng = random.Random(seed)
    for number in range(rollouts):
        arm = rng.randrange(2)
        reward = None if rng.random() < missing[arm] else 1.0
        canary.evidence.add(Observation(number, "50%", arm, 0.5, reward, {}))
    return list(warnings(canary.policy, canary.evidence))


def test_few_missing_rewards_and_few_rollouts_warn_of_nothing() -> None:
    assert warned((0.03, 0.03)) == []
    assert warned((1.0, 1.0), rollouts=49) == []


def test_many_missing_rewards_are_warned_of_with_the_way_out() -> None:
    (one,) = warned((1.0, 1.0), rollouts=50)
    assert one == (
        "50 of 50 counted rollouts (100%) have no reward, and it is not known how they went: if they are failures, "
        'start it with missing = "worst"; if their rewards come later, with a longer outcome_deadline_s'
    )
    (other,) = warned((0.2, 0.2))
    assert other.startswith(("7", "8", "9")), other
    assert warned((0.2, 0.2), policy=Policy(stages=[Stage(split=0.5)], missing="worst")) == []


def test_arms_that_lose_different_shares_are_warned_of_whatever_a_missing_reward_counts_as() -> None:
    worst = Policy(stages=[Stage(split=0.5)], missing="worst")
    (more,) = warned((0.0, 0.1), policy=worst)
    assert more.startswith("rewards are missing more often on the candidate: ")
    assert more.endswith("%, on the stable version 0%")
    assert warned((0.3, 0.0), policy=worst)[0].startswith("rewards are missing less often on the candidate: 0%")


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_equal_arms_are_seldom_said_to_differ(rate: float) -> None:
    worst = Policy(stages=[Stage(split=0.5)], missing="worst")
    assert sum(bool(warned((rate, rate), 300, worst, seed)) for seed in range(40)) <= 1
