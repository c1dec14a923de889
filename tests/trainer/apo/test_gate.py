"""The gate lets hardly any candidate through that is no better, whenever one looks; and real gains, soon."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.apo.search import ALPHA, ENOUGH, LEAST_RATE, MOST_RATE, Racer, rate, winner

RUNS = 400
PAIRS = 200
RATE = 0.4
"""Of the bet that fits what a search has seen."""
Draw = Callable[[random.Random], float]
"""The difference on one task."""


def racer_of(name: str, finalists: int = 1) -> Racer:
    return Racer(name, finalists, RATE)


def race(draw: Draw, finalists: int, seed: int, pairs: int = PAIRS) -> list[Racer]:
    """Racers that are looked at after every pair."""
    source = random.Random(seed)
    racers = [racer_of(f"c{at}", finalists) for at in range(finalists)]
    for _ in range(pairs):
        for racer in racers:
            if racer.state == "racing":
                racer.add(draw(source))
    return racers


def coin(seed_mean: float, gain: float) -> Draw:
    """Rewards of 0 and 1."""
    return lambda source: float(source.random() < seed_mean + gain) - float(source.random() < seed_mean)


def partly(gain: float) -> Draw:
    """Rewards that are shares."""
    return lambda source: max(-1.0, min(1.0, source.gauss(gain, 0.3)))


NO_BETTER: dict[str, Draw] = {
    "coins": coin(0.5, 0.0),
    "seldom": coin(0.04, 0.0),
    "nearly always": coin(0.95, 0.0),
    "shares": partly(0.0),
    "many small gains and few large losses": lambda source: 0.1 if source.random() < 0.9 else -0.9,
    "worse": coin(0.5, -0.1),
}


@pytest.mark.parametrize("finalists", [1, 2])
@pytest.mark.parametrize("name", NO_BETTER)
def test_what_is_no_better_is_let_through_seldom_however_often_one_looks(name: str, finalists: int) -> None:
    wrong = sum(winner(race(NO_BETTER[name], finalists, seed)) is not None for seed in range(RUNS))
    # Four standard deviations of a rate of exactly ALPHA: a gate that keeps its word fails in 1 of 30,000 such tests.
    assert wrong / RUNS <= ALPHA + 4 * (ALPHA * (1 - ALPHA) / RUNS) ** 0.5
    assert wrong / RUNS <= ALPHA, "and these seeds are below it"


@pytest.mark.parametrize("draw", [coin(0.4, 0.3), coin(0.05, 0.3), partly(0.15)])
def test_real_gains_are_found_soon(draw: Draw) -> None:
    found = [race(draw, 1, seed)[0] for seed in range(100)]
    assert sum(racer.state == "better" for racer in found) >= 90
    pairs = sorted(len(racer.differences) for racer in found)
    assert pairs[50] <= 80


def test_what_is_worse_is_out_before_all_rollouts_are_used() -> None:
    found = [race(coin(0.6, -0.3), 1, seed)[0] for seed in range(100)]
    assert {racer.state for racer in found} == {"out"}
    assert max(len(racer.differences) for racer in found) <= ENOUGH


def test_what_gains_nothing_is_out_after_enough_pairs_and_what_gains_a_little_goes_on() -> None:
    same, little = racer_of("same"), racer_of("little")
    for at in range(ENOUGH):
        assert same.state == little.state == "racing"
        same.add(0.0)
        little.add(0.01 if at else 0.0)
    assert (same.state, little.state) == ("out", "racing")


def test_more_finalists_need_more_evidence() -> None:
    assert [racer_of("a", count).needed for count in (1, 2)] == [pytest.approx(20), pytest.approx(40)]
    alone, beside = racer_of("a"), racer_of("a", 2)
    while alone.state == "racing":
        alone.add(1.0)
        beside.add(1.0)
    assert (alone.state, beside.state) == ("better", "racing")


@given(st.lists(st.floats(-1, 1), max_size=150))
def test_any_differences_give_a_state_and_their_mean(differences: list[float]) -> None:
    racer = racer_of("a", 2)
    for difference in differences:
        racer.add(difference)
    assert racer.e_value >= 0
    assert racer.gain == (sum(differences) / len(differences) if differences else 0.0)
    assert (racer.state == "better") == (racer.e_value >= racer.needed)
    assert (winner([racer]) is racer) == (racer.state == "better")


def test_of_several_that_are_better_the_one_with_the_highest_gain_wins() -> None:
    racers = [racer_of(name, 3) for name in ("much", "more", "none")]
    for at in range(200):
        for racer, gains in zip(racers, ((0.2, 0.2), (0.4, 0.1), (0.1, -0.1)), strict=True):
            racer.add(gains[at % 2])
    assert [racer.state for racer in racers] == ["better", "better", "out"]
    best = winner(racers)
    assert best is not None
    assert best.candidate == "more"
    assert winner(racers[2:]) is None
    assert winner([]) is None


@given(st.floats(-1, 1), st.floats(0, 1))
def test_a_bet_never_loses_all(gain: float, variance: float) -> None:
    found = rate(gain, variance)
    assert LEAST_RATE <= found <= MOST_RATE
    assert 1 - found >= 0.0999


def test_a_bet_that_fits_grows_faster_than_others() -> None:
    """Differences of +1 and -1, of which six in ten are +1: wealth grows most at a fifth."""
    assert rate(0.2, 0.96) == pytest.approx(0.2)
    fitting, timid, bold = (Racer("it", 1, one) for one in (0.2, LEAST_RATE, MOST_RATE))
    for racer in (fitting, timid, bold):
        for _ in range(20):
            for difference in (1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0):
                racer.add(difference)
    assert fitting.e_value > timid.e_value
    assert fitting.e_value > bold.e_value
