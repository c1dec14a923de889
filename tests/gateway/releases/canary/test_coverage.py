"""A fall of coverage is told soon, and coverage that stays what it was gives no alarm; rewards that do not come are
warned of."""

from __future__ import annotations

import random
from random import Random

import pytest
from fakes.mistakes import tells
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.release_policy import CanaryStage, ReleasePolicy
from penstock.gateway.model.resource import Coverage
from penstock.gateway.releases.canary.decision import (
    KNOWN,
    MOST,
    UNLIKELY,
    WINDOW,
    Canary,
    baseline_rate,
    detect_change,
    likelihood,
    observe,
    warnings,
)
from penstock.gateway.releases.canary.evidence import CanaryObservation


def told(rollouts: str, coverage: Coverage | None = None) -> tuple[Coverage, list[tuple[int, str]]]:
    """The coverage after these rollouts (`+` matches), and at which of them it turned, and how."""
    coverage, turns = coverage or Coverage(since_ns=0), list[tuple[int, str]]()
    for number, one in enumerate(rollouts, 1):
        observe(coverage, one == "+")
        turn = detect_change(coverage, number)
        if turn is not None:
            turns.append((number, turn))
    return coverage, turns


def test_all_missing_after_a_day_is_told_after_ten() -> None:
    assert told("+" * 200 + "-" * 40)[1][:1] == [(210, "fell")]


def test_the_first_four_that_miss_are_told() -> None:
    assert told("-" * 40)[1] == [(4, "fell")]


def test_it_is_told_once_and_is_back_when_texts_match_again() -> None:
    coverage, turns = told("+" * 100 + "-" * 60 + "+" * 60)
    assert [turn for _, turn in turns] == ["fell", "back"]
    assert (coverage.fell_ns, coverage.fell) == (None, "")
    # What was before stays what it was while it is down.
    assert baseline_rate(coverage) == MOST


@pytest.mark.parametrize("rate", [1.0, 0.97, 0.9, 0.7, 0.5, 0.2])
def test_what_stays_as_it_was_gives_hardly_an_alarm(rate: float) -> None:
    """Ten thousand rollouts, one after the other looked at, after some by which the rate is known."""
    rng, alarms = Random(int(rate * 100)), 0
    coverage = Coverage(since_ns=0, before=500, before_matched=500 * rate)
    for number in range(10_000):
        observe(coverage, rng.random() < rate)
        alarms += detect_change(coverage, number) == "fell"
    assert alarms <= 3


@pytest.mark.parametrize(("before", "after", "most"), [(1.0, 0.0, 10), (0.98, 0.5, 40), (0.9, 0.3, 40), (0.7, 0.1, 60)])
def test_a_fall_is_told_within_some_rollouts(before: float, after: float, most: int) -> None:
    late = 0
    for seed in range(50):
        rng = Random(seed)
        rollouts = "".join("+" if rng.random() < before else "-" for _ in range(300))
        rollouts += "".join("+" if rng.random() < after else "-" for _ in range(most))
        coverage = Coverage(since_ns=0, before=500, before_matched=500 * before)
        late += not any(number > 300 and turn == "fell" for number, turn in told(rollouts, coverage)[1])
    assert late <= 5


@given(st.integers(0, WINDOW), st.integers(0, WINDOW), st.floats(0.01, MOST))
def test_fewer_matches_are_less_likely(one: int, other: int, before: float) -> None:
    assert 0 <= likelihood(one, WINDOW, before) <= 1 + 1e-9
    assert (one <= other) == (likelihood(one, WINDOW, before) <= likelihood(other, WINDOW, before)) or one > other


@given(st.text("+-", max_size=200))
def test_a_fall_follows_from_what_is_stored(rollouts: str) -> None:
    coverage, turns = told(rollouts)
    assert len(coverage.recent) <= WINDOW
    assert rollouts.endswith(coverage.recent)
    assert coverage.before <= max(len(rollouts) - WINDOW, 0) + 1e-9
    assert (coverage.fell_ns is not None) == (bool(turns) and turns[-1][1] == "fell")
    if turns and turns[-1] == (len(rollouts), "fell"):
        assert likelihood(coverage.recent.count("+"), len(coverage.recent), baseline_rate(coverage)) < UNLIKELY
    assert KNOWN > 0


def warned(
    missing: tuple[float, float], rollouts: int = 400, policy: ReleasePolicy | None = None, seed: int = 1
) -> list[str]:
    """What is said after so many rollouts, whose rewards are missing at these rates by arm."""
    canary = Canary(policy or ReleasePolicy(stages=[CanaryStage(split=0.5)]), 0.1)
    rng = random.Random(seed)
    for number in range(rollouts):
        arm = rng.randrange(2)
        reward = None if rng.random() < missing[arm] else 1.0
        canary.evidence.add(CanaryObservation(number, "50%", arm, 0.5, reward, {}))
    return list(warnings(canary.policy, canary.evidence))


def test_few_missing_rewards_and_few_rollouts_warn_of_nothing() -> None:
    assert warned((0.03, 0.03)) == []
    assert warned((1.0, 1.0), rollouts=49) == []


def test_many_missing_rewards_are_warned_of_with_the_way_out() -> None:
    (one,) = warned((1.0, 1.0), rollouts=50)
    assert tells(one, "50 of 50 counted rollouts (100%)", 'missing = "worst"', "a longer outcome_deadline_s")
    (other,) = warned((0.2, 0.2))
    assert other.startswith(("7", "8", "9")), other
    assert warned((0.2, 0.2), policy=ReleasePolicy(stages=[CanaryStage(split=0.5)], missing="worst")) == []


def test_arms_that_lose_different_shares_are_warned_of_whatever_a_missing_reward_counts_as() -> None:
    worst = ReleasePolicy(stages=[CanaryStage(split=0.5)], missing="worst")
    (more,) = warned((0.0, 0.1), policy=worst)
    assert tells(more, "missing more often on the candidate", "stable version 0%")
    assert tells(warned((0.3, 0.0), policy=worst)[0], "missing less often on the candidate: 0%", "stable version")


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_equal_arms_are_seldom_said_to_differ(rate: float) -> None:
    worst = ReleasePolicy(stages=[CanaryStage(split=0.5)], missing="worst")
    assert sum(bool(warned((rate, rate), 300, worst, seed)) for seed in range(40)) <= 1
