"""Rewards that are odd, late, per turn, in dimensions; and what they credit calls with."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fakes.tokens import Talk

from penstock.adapters.samples import Options, Sample, returns, samples
from penstock.adapters.selection import SampleReport, collect_rewards

NAN, INF = math.nan, math.inf


def three_calls(reward: float | None = None) -> Talk:
    talk = Talk(reward=reward)
    one = talk.call([1], [(2,)])
    two = talk.call([*one.whole(), 3], [(4,)])
    talk.call([*two.whole(), 5], [(6,), (7,)])
    return talk


def of(talk: Talk, **about: Any) -> tuple[list[Sample], SampleReport]:
    return samples(talk.episode(), Options(**about))


def test_the_newest_trusted_reward_of_the_attempt_counts_and_late_ones_are_counted() -> None:
    talk = three_calls(reward=0.25)
    talk.judge(value=1.0)
    talk.judge(value=0.75, late=True)
    talk.judge(value=9.0, trusted=False, source="agent")
    made, report = of(talk)
    assert {sample.reward for sample in made} == {0.75}
    assert report.notes == {"late_reward": 1}


def test_an_attempt_whose_reward_spans_are_not_there_has_its_own() -> None:
    assert {sample.reward for sample in of(three_calls(reward=0.25))[0]} == {0.25}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "no_reward"),
        ([{"dimensions": {"style": 1.0}}], "no_reward"),
        ([{"value": 1.0, "trusted": False}], "untrusted_reward"),
        ([{"value": NAN}], "nan_reward"),
        ([{"value": INF}], "nan_reward"),
        ([{"value": 1.0}, {"value": NAN}], "nan_reward"),
        ([{"value": "good"}], "no_reward"),
        ([{"value": True}], "no_reward"),
        ([{"value": 1.0, "trusted": "yes"}], "untrusted_reward"),
    ],
)
def test_what_is_no_reward_is_reported(given: list[dict[str, Any]], reason: str) -> None:
    talk = three_calls()
    for one in given:
        talk.judge(**one)
    made, report = of(talk)
    assert (made, report.reasons) == ([], {reason: 3})
    made, _ = of(talk, allow=frozenset({reason}))
    assert len(made) == 2
    assert all(math.isnan(sample.reward) for sample in made)


def test_a_reward_of_nan_in_the_head_is_reported_too() -> None:
    assert of(three_calls(reward=NAN))[1].reasons == {"nan_reward": 3}


def test_dimensions_have_weights() -> None:
    talk = three_calls()
    talk.judge(value=1.0, dimensions={"style": 0.5, "cost": -2.0})
    talk.judge(dimensions={"style": 0.25})
    (made, *_), _ = of(talk)
    assert (made.reward, made.rewards) == (1.0, {"style": 0.25, "cost": -2.0})
    (made, *_), _ = of(talk, weights={"reward": 2.0, "style": 4.0, "cost": 0.5})
    assert made.reward == 2.0
    none, report = of(talk, weights={"style": 1.0, "speed": 1.0})
    assert (none, report.reasons) == ([], {"no_reward": 3})
    assert "speed" in report.dropped[0].detail


def test_odd_dimensions_are_counted_and_a_weighted_one_is_no_reward() -> None:
    talk = three_calls()
    talk.judge(value=1.0, dimensions={"style": NAN, "cost": "high"})
    (made, *_), report = of(talk)
    assert (made.reward, made.rewards, report.notes) == (1.0, {}, {"odd_reward": 1})
    assert of(talk, weights={"style": 1.0})[1].reasons == {"nan_reward": 3}


def test_calls_have_rewards_of_their_own() -> None:
    talk = three_calls()
    talk.judge(value=0.5, span=1)
    talk.judge(value=0.1, span=2)
    talk.judge(value=0.2, span=2)
    talk.judge(value=NAN, span=3)
    made, report = of(talk)
    assert {s.sequence: s.reward for sample in made for s in sample.segments} == {1: 0.5, 2: 0.2, 3: None}
    # What calls were worth is not what the attempt was worth.
    assert {sample.reward for sample in made} == {0.0}
    assert report.notes == {"turn_rewards_only": 1, "odd_reward": 1}


@pytest.mark.parametrize("merge", [True, False])
def test_returns_are_discounted_call_by_call(merge: bool) -> None:
    talk = three_calls()
    talk.judge(value=1.0)
    talk.judge(value=0.5, span=2)
    made, _ = of(talk, merge=merge)
    credit = {
        (s.sequence, s.choice): float(value)
        for sample, values in zip(made, returns(made, 0.5), strict=True)
        for s, value in zip(sample.segments, values, strict=True)
    }
    assert credit == {(3, 0): 1.0, (3, 1): 1.0, (2, 0): 0.5 + 0.5, (1, 0): 0.5}


def test_returns_of_nothing_and_of_what_does_not_belong_together() -> None:
    assert returns([]) == []
    other = Talk(rollout="r2")
    other.call([1], [(2,)])
    mixed = [*of(three_calls(1.0))[0], *of(other)[0]]
    with pytest.raises(ValueError, match="these samples are of 2"):
        returns(mixed)
    with pytest.raises(ValueError, match=r"gamma is 1\.5"):
        returns(mixed[:1], 1.5)


def test_judging_an_attempt_without_calls() -> None:
    talk = Talk(reward=None)
    talk.judge(value=1.0)
    (one,) = talk.episode().attempts
    assert collect_rewards(one).reward == 1.0
    assert of(talk)[0] == []
