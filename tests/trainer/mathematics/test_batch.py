"""Micro-batches: every trained token once, in its place, with its weight, whatever the arrangement."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

import numpy as np
from fakes.training import example, random_examples
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.mathematics.batch import Layout, admit, arrange, micro_batches, passes, split

LAYOUTS: list[Layout] = ["packed", "padded"]


def test_three_tokens_by_hand() -> None:
    """Two rollouts: one with the tokens 5 and 6 trained, one with 9. Weights 1/4, 1/4 and 1/2."""
    first = {"advantages": [2, 0, 2], "behaviour": [-0.5, 0, -0.7], "sequences": [0, -1, 1]}
    two = [example("a", [1, 2], [5, 4, 6], [1, 0, 1], **first), example("b", [3], [9], [1], advantages=[-1])]
    (batch,) = micro_batches(two, 100, "packed")
    assert batch.ids.tolist() == [[1, 2, 5, 4, 6], [3, 9, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert batch.rows.tolist() == [0, 0, 1]
    assert batch.columns.tolist() == [2, 4, 1]
    assert batch.weights.tolist() == [0.25, 0.25, 0.5]
    assert batch.advantages.tolist() == [2, 2, -1]
    assert batch.behaviour.tolist() == pytest.approx([-0.5, -0.7, -1])
    assert batch.owners.tolist() == [0, 0, 1]
    assert len(set(batch.sequences.tolist())) == 3


def test_a_packed_row_begins_again_with_every_example() -> None:
    given = [example("a", [1, 2, 3], [4], [1]), example("b", [5], [6], [1]), example("c", [7] * 5, [8], [1])]
    (batch,) = micro_batches(given, 12, "packed")
    assert batch.ids.tolist() == [[7, 7, 7, 7, 7, 8], [1, 2, 3, 4, 5, 6]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 1]]
    assert batch.columns.tolist() == [5, 3, 5]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [24, 100, 1000])
def test_every_trained_token_is_there_once(layout: Layout, tokens: int) -> None:
    examples = random_examples(20, 300)
    expected = Counter(
        (int(token), round(float(worth), 5), round(float(engine), 5))
        for one in examples
        for token, worth, engine in zip(
            one.response[one.mask], one.advantages[one.mask], one.behaviour[one.mask], strict=True
        )
    )
    found: Counter[tuple[int, float, float]] = Counter()
    for batch in micro_batches(examples, tokens, layout):
        assert batch.ids.size <= tokens
        assert batch.columns.min() >= 1
        ids = batch.ids[batch.rows, batch.columns]
        found.update(
            (int(token), round(float(worth), 5), round(float(engine), 5))
            for token, worth, engine in zip(ids, batch.advantages, batch.behaviour, strict=True)
        )
    assert found == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rollouts_weigh_the_same_in_all_arrangements(layout: Layout) -> None:
    examples = random_examples(20, 300)
    total = np.zeros(20)
    for batch in micro_batches(examples, 60, layout):
        np.add.at(total, batch.owners, batch.weights)
    assert total.tolist() == pytest.approx([1 / 20] * 20)


def test_padding_wastes_what_packing_fills() -> None:
    examples = random_examples(60, 300, longest=30)
    sizes = {layout: sum(one.ids.size for one in micro_batches(examples, 240, layout)) for layout in LAYOUTS}
    needed = sum(one.length for one in examples)
    assert needed <= sizes["packed"] < sizes["padded"]
    assert sizes["packed"] < 1.1 * needed


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(40, 200), st.sampled_from(LAYOUTS))
def test_every_index_is_in_one_row_and_no_batch_is_too_large(lengths: list[int], tokens: int, layout: Layout) -> None:
    made = arrange(lengths, tokens, layout)
    assert sorted(index for rows in made for row in rows for index in row) == list(range(len(lengths)))
    for rows in made:
        width = max(sum(lengths[index] for index in row) for row in rows)
        assert len(rows) * width <= tokens
        assert layout == "packed" or all(len(row) == 1 for row in rows)


def test_what_cannot_be_trained_on_is_refused_and_never_cut() -> None:
    empty, masked = example("a", [1], [], []), example("b", [1], [2], [0])
    bare, long, fine = example("c", [], [2], [1]), example("d", [1] * 8, [2, 2], [1, 1]), example("e", [1], [2], [1])
    kept, refused = admit([empty, masked, bare, long, fine], 9)
    assert kept == [fine]
    assert [(one.example.owner[0], one.reason) for one in refused] == [
        ("a", "empty"), ("b", "empty"), ("c", "prompt"), ("d", "long"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="rollout d cannot be batched: long"):
        micro_batches([fine, long], 9, "packed")


def test_nothing_gives_nothing() -> None:
    assert micro_batches([], 10, "packed") == []
    assert split([], 3) == []
    assert passes(0, 4, 2, 0) == []


@given(st.integers(1, 12), st.integers(1, 5))
def test_a_split_keeps_rollouts_whole_and_even(count: int, parts: int) -> None:
    made = split(random_examples(count, 300), parts)
    owners = [{one.owner for one in part} for part in made]
    assert len(set().union(*owners)) == sum(len(one) for one in owners) == count
    assert max(len(one) for one in owners) - min(len(one) for one in owners) <= 1


def test_passes_see_everything_in_an_order_of_their_own() -> None:
    made = passes(7, 3, 2, 5)
    assert [len(one) for one in made] == [3, 3, 1, 3, 3, 1]
    first, second = ([one for part in made[start : start + 3] for one in part] for start in (0, 3))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert made == passes(7, 3, 2, 5)
    assert made != passes(7, 3, 2, 6)
