"""Pairs of one group, with a margin, and why a group gives none."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from fakes.tokens import Talk, message
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.chat import ChatConversation, conversations
from penstock.adapters.preferences import Trajectory, of_rollouts, pairing_advice, pairs, row
from penstock.adapters.samples import samples

S, U = message("system", [100]), message("user", [1])


def rated(*rewards: float, group: str = "g") -> list[Trajectory]:
    return [Trajectory(f"{group}.{at}", group, reward, ()) for at, reward in enumerate(rewards)]


def test_the_best_is_preferred_to_the_worst() -> None:
    (pair,), left = pairs(rated(0.2, 0.9, 0.5), margin=0.7)
    assert (pair.chosen.rollout, pair.rejected.rollout, pair.group, left) == ("g.1", "g.0", "g", {})
    assert pair.margin == pytest.approx(0.7)


def test_all_pairs_that_differ_enough() -> None:
    found, _ = pairs(rated(0.0, 0.5, 1.0), margin=0.5, which="all")
    assert [(p.chosen.rollout, p.rejected.rollout) for p in found] == [("g.2", "g.1"), ("g.2", "g.0"), ("g.1", "g.0")]


@pytest.mark.parametrize(
    ("rewards", "why"),
    [([1.0], "alone"), ([1.0, 1.0], "equal"), ([1.0, 0.8], "too_close"), ([1.0, math.nan], "no_reward")],
)
def test_why_a_group_gives_none(rewards: list[float], why: str) -> None:
    assert pairs(rated(*rewards), margin=0.5) == ([], {"g": why})
    assert pairs(rated(1.0, 1.0), margin=0.0)[0] == []


def test_a_negative_margin_is_refused() -> None:
    for margin in (-1.0, math.nan):
        with pytest.raises(ValueError, match="margin"):
            pairs(rated(1.0, 0.0), margin)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=5), max_size=4), st.sampled_from([0.0, 0.5]))
def test_pairs_are_of_one_group_and_differ(groups: list[list[float]], margin: float) -> None:
    items = [one for at, rewards in enumerate(groups) for one in rated(*rewards, group=f"g{at}")]
    every, left = pairs(items, margin, "all")
    best, same = pairs(items, margin, "best")
    assert left == same
    assert {pair.group for pair in every} | left.keys() == {one.group for one in items}
    assert len(best) + len(left) == len({one.group for one in items})
    assert all(p.chosen.group == p.rejected.group == p.group for p in every)
    assert all(p.chosen.reward - p.rejected.reward == p.margin >= margin and p.margin > 0 for p in every)
    expected = sum(a - b >= margin and a > b for rewards in groups for a in rewards for b in rewards)
    assert len(every) == expected


def test_samples_are_paired_by_rollout() -> None:
    talks = [Talk(reward=reward, rollout=name) for name, reward in (("r1", 0.0), ("r2", 1.0))]
    for talk in talks:
        talk.call([1], [(2,)])
        talk.call([1], [(3,)])
    made = [sample for talk in talks for sample in samples(talk.episode())[0]]
    (pair,), _ = pairs(of_rollouts(made))
    assert [s.rollout for s in pair.chosen.samples] == ["r2", "r2"]
    assert [s.rollout for s in pair.rejected.samples] == ["r1", "r1"]


# --- as rows of messages ---


def told(name: str, reward: float, *messages: Any) -> ChatConversation:
    talk = Talk(reward=reward, rollout=name)
    talk.call([1], [(int(reward * 10),)], messages)
    return conversations(talk.episode())[0][0]


def made(*before: tuple[Any, ...]) -> dict[str, Any]:
    good, bad = (
        told(name, reward, *them) for (name, reward), them in zip((("r1", 1.0), ("r2", 0.0)), before, strict=True)
    )
    (pair,), _ = pairs([good, bad])
    return row(pair)


def test_a_row_is_a_prompt_and_what_followed() -> None:
    found = made((S, U), (S, U))
    assert found["prompt"] == [S, U]
    assert (found["chosen"], found["rejected"]) == ([message("assistant", [10])], [message("assistant", [0])])
    assert (found["chosen_rollout"], found["rejected_rollout"], found["margin"]) == ("r1", "r2", 1.0)


def test_the_prompt_ends_before_an_answer_of_both() -> None:
    answered = message("assistant", [5])
    found = made((S, U, answered, U), (S, U, answered, message("user", [2])))
    assert found["prompt"] == [S, U]
    assert (len(found["chosen"]), len(found["rejected"])) == (3, 3)


def test_users_that_begin_differently_share_the_system_s_prompt() -> None:
    found = made((S, U), (S, message("user", [2])))
    assert (found["prompt"], found["chosen"][0], found["rejected"][0]) == ([S], U, message("user", [2]))


def test_what_has_nothing_in_common_is_a_pair_without_a_prompt() -> None:
    found = made((U,), (message("user", [2]),))
    assert (found["prompt"], found["chosen"][0], found["rejected"][0]) == ([], U, message("user", [2]))


def test_what_would_give_more_is_said() -> None:
    items = [*rated(1.0, 1.0, group="e"), *rated(0.0, 0.0, 0.0, group="f"), *rated(1.0, group="a"),
             *rated(1.0, 0.8, group="c"), *rated(1.0, math.nan, group="n"), *rated(0.0, 1.0, group="g")]  # fmt: skip
    found, left = pairs(items, 0.5)
    said = pairing_advice(left, Counter(one.group for one in items), 0.5)
    assert len(found) == 1
    assert [line.partition(":")[0] for line in said] == [
        "the rewards of 2 groups are all equal",
        "the rewards of 1 groups differ by less than the margin, 0.5",
        "1 groups have one rollout",
        "1 groups have fewer than two rollouts with a reward",
    ]
    assert "more often than 2.5 times each" in said[0]
    assert pairing_advice({}, {}, 0.0) == []
