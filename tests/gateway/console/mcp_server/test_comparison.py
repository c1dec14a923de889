"""What two versions are compared by, and when there is too little to tell."""

from __future__ import annotations

import random
from sys import float_info
from typing import Any

import pytest
from fakes.memory_tape import call

from penstock.console.mcp_server.comparison import (
    FEWEST,
    VersionRollouts,
    difference,
    randomised,
    split_by_version,
    student,
)
from penstock.gateway.model.facts import SHADOW_OF, is_release_call
from penstock.gateway.model.rollout import Reward, RolloutSummary
from penstock.gateway.model.span import Span


def reward(rollout: str, **given: object) -> Span:
    return call(9, rollout, kind="reward", name="reward", attributes=Reward.model_validate(given).attributes())


def served(rollout: str, version: str, **fields: Any) -> Span:
    return call(1, rollout, versions={"planner": version}, **fields)


@pytest.mark.parametrize(("freedom", "wanted"), [(9, 2.262157), (12, 2.178813), (20, 2.085963), (200, 1.971896)])
def test_students_quantiles(freedom: float, wanted: float) -> None:
    assert student(0.975, freedom) == pytest.approx(wanted, rel=1e-3)


def test_an_interval_is_told_from_ten_of_each_on() -> None:
    one, other = [0.0, 1.0] * 5, [1.0] * 9 + [0.0]
    assert difference(one, other[1:]) is None
    assert difference(one[: FEWEST - 1], other) is None
    told = difference(one, other)
    assert told is not None
    # By hand: a standard error of 0.19437 with 14.74 degrees of freedom, whose quantile is 2.1346.
    assert told == pytest.approx((0.4, -0.0149, 0.8149), abs=2e-4)
    assert difference([1.0] * 10, [0.0] * 10) is None, "nothing varies"
    assert difference([1.0, 1e308] * 5, [-1e308, 0.0] * 5) is None, "more than can be computed with"
    assert difference([1.5e308] * 10, [0.0, 1.0] * 5) == (-1.5e308, -1.5e308, -1.5e308)
    assert difference([1e-200, 0.0] * 5, [0.0, 1e-200] * 5) is None, "next to nothing varies"


def test_intervals_cover_the_truth() -> None:
    """95 of 100 samples of equal rewards have 0 in their interval."""
    chance = random.Random(7)
    covered = 0
    for _ in range(2000):
        pair = [[chance.gauss(0, spread) for _ in range(12)] for spread in (1.0, 3.0)]
        told = difference(*pair)
        covered += told is not None and told.low <= 0 <= told.high
    assert 0.935 <= covered / 2000 <= 0.965


def test_rollouts_belong_to_the_version_that_served_them_alone() -> None:
    rollouts = [RolloutSummary(id=name, reward=1.0) for name in ("a", "b", "both", "other", "none")]
    spans = [
        served("a", "v1", ms=100), served("b", "v2", ms=300), served("both", "v1"), served("both", "v2"),
        served("other", "v3"), call(1, "none"), served("gone", "v1"),
        reward("a", value=1.0, dimensions={"cost": 0.5}), reward("a", value=1.0, dimensions={"cost": 9.0}),
        reward("b", value=1.0, dimensions={"cost": 2.0}, trusted=False),
    ]  # fmt: skip
    one, other, mixed = split_by_version("planner", ("v1", "v2"), spans, rollouts)
    assert ([r.id for r in one.rollouts], [r.id for r in other.rollouts], mixed) == (["a"], ["b"], 1)
    assert (one.durations, other.durations) == ([100_000_000], [300_000_000])
    assert (one.costs, other.costs) == ([0.5], []), "the newest trusted one"
    assert one.figures().lowest == ["a"]


@pytest.mark.parametrize("size", [1.5e308, float_info.max])
def test_rewards_and_costs_of_any_size_have_a_mean(size: float) -> None:
    rollouts = [RolloutSummary(id=f"r{number}", reward=size) for number in range(3)]
    side = VersionRollouts("v1", rollouts, costs=[size, size])
    assert (side.figures().mean_reward, side.figures().cost) == (size, size)


def test_calls_for_a_release_are_nobodys() -> None:
    assert is_release_call(served("a", "v1", attributes={SHADOW_OF: "x"}))


def test_one_release_shares_rollouts_out() -> None:
    shared = [served("a", "v1", arm="planner-1:stable"), served("b", "v2", arm="planner-1:candidate")]
    assert randomised("planner", ("v1", "v2"), shared)
    assert not randomised("planner", ("v1", "v2"), [*shared, served("c", "v1")])
    assert not randomised("planner", ("v1", "v2"), [])
