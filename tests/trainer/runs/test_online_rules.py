"""What a run that learns from production decides by itself: what a step takes, and when it stops."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

from fakes.process import ROOT
from fakes.settings import documented, read

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import TrainConfig, check_online
from penstock.trainer.data.selection import EPS, RunVersions, TrainableRollout, pick
from penstock.trainer.runs.evaluation import EvaluationHistory

RUN = RunVersions("run", frozenset({"base", "v7"}))


def candidate(name: str, created: int, reward: float, group: str | None = None) -> TrainableRollout:
    return TrainableRollout(name, group, created, 0, reward, {"a1": 2})


def candidates(most: int = 24) -> st.SearchStrategy[list[TrainableRollout]]:
    one = st.tuples(st.integers(0, 9), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["g", "h", "i", None]))
    return st.lists(one, max_size=most).map(
        lambda found: [candidate(f"r{number}", *some) for number, some in enumerate(found)]
    )


def spread(some: list[TrainableRollout]) -> float:
    return max(one.reward for one in some) - min(one.reward for one in some)


# -- what a step takes -------------------------------------------------------------------------------------------------


@given(candidates(), st.integers(2, 8))
def test_a_batch_is_whole_differs_and_is_the_oldest(ready: list[TrainableRollout], enough: int) -> None:
    chosen = pick(ready, enough, None)
    # There is one whenever there can be one.
    assert bool(chosen) == (len(ready) >= enough and spread(ready) >= EPS)
    if chosen:
        assert len(chosen) == enough
        assert len({one.rollout for one in chosen}) == enough
        assert spread(chosen) >= EPS
        # All but the one that makes the difference are the oldest.
        oldest = {one.rollout for one in sorted(ready, key=lambda one: (one.created_ns, one.rollout))[:enough]}
        assert len(oldest - {one.rollout for one in chosen}) <= 1


@given(candidates(), st.integers(2, 8), st.integers(2, 5))
def test_groups_are_taken_whole(ready: list[TrainableRollout], enough: int, least: int) -> None:
    sizes = Counter(one.group for one in ready)
    good = {
        group
        for group, size in sizes.items()
        if group is not None and size >= least and spread([one for one in ready if one.group == group]) >= EPS
    }
    chosen = pick(ready, enough, least)
    taken = Counter(one.group for one in chosen)
    assert bool(chosen) == (sum(sizes[group] for group in good) >= enough)
    assert all(group in good and size == sizes[group] for group, size in taken.items())
    # Not one group more than it takes.
    assert all(len(chosen) - size < enough for size in list(taken.values())[-1:])


@given(candidates(), st.integers(2, 8), st.sampled_from([None, 2, 3]), st.randoms())
def test_the_order_in_which_they_came_does_not_matter(
    ready: list[TrainableRollout], enough: int, least: int | None, random: object
) -> None:
    shuffled = list(ready)
    getattr(random, "shuffle")(shuffled)  # noqa: B009 - hypothesis names no type for it
    assert pick(shuffled, enough, least) == pick(ready, enough, least)


@given(candidates(), st.integers(2, 4), st.sampled_from([None, 2]))
def test_step_after_step_takes_each_once(ready: list[TrainableRollout], enough: int, least: int | None) -> None:
    left, taken = list(ready), list[str]()
    while chosen := pick(left, enough, least):
        taken += [one.rollout for one in chosen]
        left = [one for one in left if one not in chosen]
    assert len(taken) == len(set(taken))
    assert {*taken, *(one.rollout for one in left)} == {one.rollout for one in ready}


def test_rewards_that_are_all_the_same_wait_for_one_that_differs() -> None:
    same = [candidate(f"r{number}", number, 1.0) for number in range(5)]
    assert pick(same, 3, None) == []
    assert [one.rollout for one in pick([*same, candidate("late", 9, 0.0)], 3, None)] == ["r0", "r1", "late"]


def test_versions_are_of_the_run_or_what_it_began_from() -> None:
    steps = {
        name: RUN.step(name) for name in ("base", "v7", "run.0", "run.12", "other.3", "run.x", "run.1.2", "", None)
    }
    found = {name: step for name, step in steps.items() if step is not None}
    assert found == {"base": 0, "v7": 0, "run.0": 0, "run.12": 12}
    assert RUN.oldest(["run.4", "run.2"]) == 2
    assert RUN.oldest(["run.4", "other.2"]) is None
    assert RUN.oldest([]) is None


# -- when it stops itself ----------------------------------------------------------------------------------------------

rewards = st.lists(st.integers(0, 20).map(lambda tenth: tenth / 10), max_size=12)


def evaluated(values: list[float], max_drop: float, patience: int) -> EvaluationHistory:
    found = EvaluationHistory(max_drop, patience)
    for step, value in enumerate(values):
        found.add(step, value)
    return found


@given(rewards, st.sampled_from([0.0, 0.25, 1.0]), st.integers(1, 3))
def test_it_stops_when_the_last_ones_are_all_far_below_the_best(
    values: list[float], max_drop: float, patience: int
) -> None:
    last = values[-patience:]
    bests = [max(values[: len(values) - patience + place], default=0.0) for place in range(patience)]
    low = len(values) > patience and all(one < best - max_drop for one, best in zip(last, bests, strict=True))
    assert (evaluated(values, max_drop, patience).stop_reason is not None) == low


@given(rewards, st.integers(1, 3))
def test_what_gets_better_never_stops_it(values: list[float], patience: int) -> None:
    assert evaluated(sorted(values), 0.0, patience).stop_reason is None


def test_it_says_why() -> None:
    assert evaluated([0.5, 0.8, 0.7, 0.4, 0.8, 0.3], 0.2, 2).stop_reason is None
    assert evaluated([0.5, 0.8, 0.75, 0.4, 0.3], 0.2, 2).stop_reason == (
        "evaluation fell: 0.4 after step 3, 0.3 after step 4; the best was 0.8 after step 1 (online.max_drop = 0.2)"
    )


# -- what cannot work --------------------------------------------------------------------------------------------------

GOOD = {"model": {"path": "m"}, "advantage": {"estimator": "reinforce++"}, "publish": {"release": "auto"}}


def test_the_documented_file_can_learn_from_production(tmp_path: Path) -> None:
    check_online(read(tmp_path, documented(ROOT / "docs" / "online.md")))


def test_it_is_refused_by_the_key_that_cannot_work() -> None:
    check_online(TrainConfig.model_validate(GOOD))
    check_online(TrainConfig.model_validate(GOOD | {"advantage": {"estimator": "rloo"}}))
    for key, more in {
        'publish.release: "none" shows production nothing': {"publish": {}},
        "rollouts.ahead: .*not queued": {"rollouts": {"ahead": True}},
        "rollouts.curriculum: .*not drawn": {"rollouts": {"curriculum": True}},
        'model.weights: .*use "lora"': {"model": {"path": "m", "weights": "full"}},
    }.items():
        with pytest.raises(ConfigError, match=key):
            check_online(TrainConfig.model_validate(GOOD | more))
