"""Credit, computed by hand: rollouts 1, 2 and 6 of a group, so mean 3 and standard deviation sqrt(7)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

import numpy as np
from fakes.training import sample
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.samples import Sample
from penstock.trainer.config import AdvantageSettings, Estimator
from penstock.trainer.mathematics.advantage import credit

NAN = float("nan")


def group(*rewards: float, name: str = "g") -> list[Sample]:
    return [
        sample(f"{name}{number}", reward, [1], [2, 3], [4], [5], group=name) for number, reward in enumerate(rewards)
    ]


def given_to(samples: Sequence[Sample], estimator: Estimator = "dr_grpo") -> dict[str, float]:
    made = credit(samples, AdvantageSettings(estimator=estimator))
    return {one.owner[0]: float(one.advantages[0]) for one in made.examples}


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("dr_grpo", [-2, -1, 3]),
        ("grpo", [-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)]),
        # Against the mean of the others: 4, 3.5 and 1.5.
        ("rloo", [-3, -1.5, 4.5]),
        ("reinforce++", [-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)]),
    ],
)
def test_by_hand(estimator: Estimator, expected: list[float]) -> None:
    assert list(given_to(group(1, 2, 6), estimator).values()) == pytest.approx(expected, rel=1e-5)


def test_it_is_broadcast_to_what_was_sampled_and_to_nothing_else() -> None:
    made = credit(group(1, 2, 6), AdvantageSettings()).examples[2]
    assert made.advantages.tolist() == [3, 3, 0, 3]
    assert made.mask.tolist() == [True, True, False, True]
    assert made.sequences.tolist() == [0, 0, -1, 1]


def test_each_group_has_its_own_baseline_and_the_batch_has_one() -> None:
    both = [*group(0, 2, name="a"), *group(10, 14, name="b")]
    assert list(given_to(both).values()) == [-1, 1, -2, 2]
    spread = np.std([0, 2, 10, 14], ddof=1)
    expected = (np.array([0, 2, 10, 14]) - 6.5) / spread
    assert list(given_to(both, "reinforce++").values()) == pytest.approx(expected.tolist(), rel=1e-5)


def test_a_rollout_in_many_pieces_weighs_as_much_as_another() -> None:
    """Counting rows would make the mean 4/3: the second rollout's reward counted three times."""
    pieces = [sample("b", 2, [1], [2], first=call) for call in (1, 2, 3)]
    assert given_to([sample("a", 0, [1], [2]), *pieces]) == {"a": -1, "b": 1}


def test_what_teaches_nothing_is_dropped_with_its_reason() -> None:
    samples = [*group(1, 1, 1, name="e"), *group(5, name="s"), *group(0, NAN, 2, name="n"), *group(3, NAN, name="m")]
    made = credit(samples, AdvantageSettings())
    assert {owner[0]: reason for owner, reason in made.dropped.items()} == {
        "e0": "equal", "e1": "equal", "e2": "equal", "s0": "single", "n1": "reward", "m1": "reward", "m0": "single",
    }  # fmt: skip
    assert [one.owner[0] for one in made.examples] == ["n0", "n2"]
    assert [float(one.advantages[0]) for one in made.examples] == [-1, 1]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # Rewards 1, 2, 6 and twice 0 of rollouts without samples: mean 1.8.
        ("dr_grpo", [-0.8, 0.2, 4.2]),
        # Against the mean of the others: 2, 1.75 and 0.75.
        ("rloo", [-1, 0.25, 5.25]),
        ("grpo", [-0.8 / math.sqrt(6.2), 0.2 / math.sqrt(6.2), 4.2 / math.sqrt(6.2)]),
        ("reinforce++", [-0.8 / math.sqrt(6.2), 0.2 / math.sqrt(6.2), 4.2 / math.sqrt(6.2)]),
    ],
)
def test_rollouts_that_failed_without_a_sample_are_compared_too(estimator: Estimator, expected: list[float]) -> None:
    made = credit(group(1, 2, 6), AdvantageSettings(estimator=estimator), {"g": [0.0, 0.0]})
    assert [float(one.advantages[0]) for one in made.examples] == pytest.approx(expected, rel=1e-5)
    others = credit(group(1, 2, 6), AdvantageSettings(estimator=estimator), {"other": [0.0, 0.0]})
    same = [float(one.advantages[0]) for one in others.examples] == list(given_to(group(1, 2, 6), estimator).values())
    assert same == (estimator != "reinforce++")


def test_one_that_succeeds_among_failures_is_not_alone() -> None:
    made = credit(group(1), AdvantageSettings(), {"g": [0.0]})
    assert [float(one.advantages[0]) for one in made.examples] == [0.5]


def test_rounding_is_no_difference() -> None:
    assert not given_to(group(0.1 + 0.2, 0.3))


def test_the_batch_needs_no_groups_but_a_difference() -> None:
    alone = [*group(0, name="a"), *group(1, name="b")]
    assert list(given_to(alone, "reinforce++").values()) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5)
    assert not given_to([*group(1, name="a"), *group(1, name="b")], "reinforce++")


def test_turns_have_returns_of_their_own() -> None:
    """Returns: the first rollout's calls have 1 + 0 + 4 = 5 and 4, the second's 0 + 1."""
    first = [sample("a", 4.0, [1], [2], [3], [4], rewards=[1.0, None])]
    # The same calls in two samples: merging must not matter.
    cut = [sample("a", 4.0, [1], [2], rewards=[1.0]), sample("a", 4.0, [1, 2, 3], [4], first=2)]
    other = [sample("b", 1.0, [1], [2], rewards=[0.0])]
    config = AdvantageSettings(credit="turn")
    mean = (5 + 4 + 1) / 3
    whole = credit([*first, *other], config).examples
    assert whole[0].advantages.tolist() == pytest.approx([5 - mean, 0, 4 - mean])
    pieces = credit([*cut, *other], config).examples
    assert [float(one.advantages[0]) for one in pieces] == pytest.approx([5 - mean, 4 - mean, 1 - mean])
    # Leave-one-out leaves the rollout out, not the call.
    out = credit([*first, *other], AdvantageSettings(credit="turn", estimator="rloo")).examples
    assert out[0].advantages.tolist() == pytest.approx([5 - 1, 0, 4 - 1])
    assert out[1].advantages.tolist() == pytest.approx([1 - 4.5])


def test_a_rollout_without_a_reward_is_dropped_by_turns_too() -> None:
    samples = [sample("a", NAN, [1], [2]), *group(1, 2, name="g")]
    assert credit(samples, AdvantageSettings(credit="turn")).dropped == {("a", "a1"): "reward"}


def test_a_rollout_has_one_reward() -> None:
    with pytest.raises(ValueError, match=r"rollout a: its samples have different rewards: \[1\.0, 2\.0\]"):
        credit([sample("a", 1.0, [1], [2]), sample("a", 2.0, [1], [2])], AdvantageSettings())


def test_nothing_gives_nothing() -> None:
    assert credit([], AdvantageSettings()).examples == []


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.sampled_from(["dr_grpo", "grpo", "rloo"]))
def test_what_one_gains_others_lose(rewards: list[float], estimator: Estimator) -> None:
    values = list(given_to(group(*rewards), estimator).values())
    assert sum(values) == pytest.approx(0, abs=1e-3)
    assert len(values) in (0, len(rewards))
