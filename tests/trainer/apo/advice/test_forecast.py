"""Races played in advance end where the gate would end them, sooner with larger gains and less noise."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

import numpy as np

from penstock.trainer.apo.advice.estimates import BLOCK, MOST_PAIRS, NormalEstimate, forecast_race, race_lengths
from penstock.trainer.apo.search import Racer

RATE = 0.4


def test_a_race_is_decided_where_the_gate_decides_it() -> None:
    gains = np.array([0.4, 0.25, 0.15, 0.1])
    ends = race_lengths(gains, 0.1, RATE, np.random.default_rng(5))
    source = np.random.default_rng(5)
    blocks = [source.normal(gains[:, None], 0.1**0.5, (4, BLOCK)) for _ in range(MOST_PAIRS // BLOCK)]
    drawn = np.clip(np.concatenate(blocks, axis=1), -1, 1)
    for race, end in enumerate(ends):
        racer = Racer("c", 1, RATE)
        pairs = 0
        while racer.e_value < racer.needed:
            racer.add(float(drawn[race, pairs]))
            pairs += 1
        assert pairs == end


def test_larger_gains_and_less_noise_take_fewer_pairs() -> None:
    pairs = [
        forecast_race(NormalEstimate(gain, 0.01), 0.05, variance, 100).pairs or MOST_PAIRS + 1
        for gain, variance in ((0.3, 0.1), (0.15, 0.1), (0.15, 0.4), (0.0, 0.5))
    ]
    assert pairs == sorted(pairs)
    assert pairs[0] < 60 < pairs[-1]


def test_a_gain_that_nobody_expects_is_forecast_as_the_least_that_counts() -> None:
    found = forecast_race(NormalEstimate(-5.0, 0.01), 0.05, 0.1, 50)
    assert found.pairs is None or found.pairs > 100
    assert found.power < 0.2


def test_a_gain_that_is_known_well_is_played_as_it_is() -> None:
    found = forecast_race(NormalEstimate(0.9, 0.01), 0.05, 0.05, 100)
    assert found.pairs is not None
    assert found.power == 1.0
