"""Where the calls of a rollout go: always the same way, in proportion, and never to one that is overrun."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from bench.affinity import CHOICES, made, play
from penstock.gateway.traffic.upstreams.routes import LOAD_BOUND, rank_upstreams

names = st.lists(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=8, unique=True)
rollouts = st.text(min_size=1, max_size=20)


@dataclass
class Upstream:
    name: str
    running: int = 0


def first(among: list[str], rollout: str) -> str:
    return rank_upstreams([Upstream(name) for name in among], dict.fromkeys(among, 1.0), rollout)[0].name


@given(names, rollouts, st.text("xyz", min_size=1, max_size=3))
def test_one_that_comes_takes_rollouts_and_moves_no_other(among: list[str], rollout: str, new: str) -> None:
    assert first([*among, new], rollout) in (new, first(among, rollout))


@given(names, rollouts)
def test_one_that_goes_moves_its_own_only(among: list[str], rollout: str) -> None:
    there = first(among, rollout)
    assert all(first([it for it in among if it != gone], rollout) == there for gone in among if gone != there)


def test_rollouts_are_shared_by_weight_and_a_new_one_takes_its_share() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    upstreams = [Upstream(name) for name in weights]
    many = [f"rollout-{number}" for number in range(8000)]
    counted = Counter(rank_upstreams(upstreams, weights, name)[0].name for name in many)
    for name, weight in weights.items():
        # Five standard deviations of a binomial count.
        share = weight / 8
        assert abs(counted[name] - 8000 * share) < 5 * math.sqrt(8000 * share * (1 - share))
    before = {name: first(["a", "b", "c"], name) for name in many}
    moved = sum(first(["a", "b", "c", "d"], name) != there for name, there in before.items())
    assert moved / 8000 < 1 / 4 + 0.025


@given(names, st.data())
def test_none_has_more_than_its_share_and_a_quarter(among: list[str], data: st.DataObject) -> None:
    weights = {name: data.draw(st.sampled_from([0.5, 1.0, 3.0])) for name in among}
    upstreams = [Upstream(name) for name in among]
    running = list[Upstream]()
    for rollout in data.draw(st.lists(st.sampled_from(["r1", "r2", "r3"]), max_size=60)):
        if running and data.draw(st.booleans()):
            running.pop().running -= 1
        taken = rank_upstreams(upstreams, weights, rollout)[0]
        taken.running += 1
        running.append(taken)
        bound = math.ceil(LOAD_BOUND * len(running) * weights[taken.name] / sum(weights.values()))
        assert taken.running <= bound


@given(names, names, rollouts)
def test_spares_come_last_and_in_their_order(sharing: list[str], spares: list[str], rollout: str) -> None:
    spares = [name for name in spares if name not in sharing]
    upstreams = [Upstream(name) for name in [*spares, *sharing]]
    found = [one.name for one in rank_upstreams(upstreams, dict.fromkeys(sharing, 1.0), rollout)]
    assert sorted(found[: len(sharing)]) == sorted(sharing)
    assert found[len(sharing) :] == spares


def test_it_is_worth_something() -> None:
    """On engines that are models of a prefix cache (`bench.affinity`)."""
    calls = made(60)
    with patch("bench.affinity.CACHE", 40_000):
        cached = {name: play(calls, 8, choose)[0] for name, choose in CHOICES.items()}
    assert cached["by rollout"] > 2 * max(cached["in turn"], cached["least busy"])
