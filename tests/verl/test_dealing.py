"""Micro-batches dealt to ranks: every token is at exactly one, with its weight, and values find their way back."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-verl`")

import numpy as np
from fakes.training import example, random_examples

from penstock.trainer.mathematics.batch import MicroBatch, collect_values, deal, is_filler, micro_batches

Token = tuple[tuple[int, ...], float, float, float]


def tokens(batch: MicroBatch) -> list[Token]:
    """Of each token what stands before it in its row, itself included, and what it counts."""
    return [
        (tuple(batch.ids[row, : column + 1].tolist()), float(weight), float(worth), float(behaviour))
        for row, column, weight, worth, behaviour in zip(
            batch.rows, batch.columns, batch.weights, batch.advantages, batch.behaviour, strict=True
        )
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("count", "size"), [(6, 24), (6, 64), (7, 4096), (1, 64)])
def test_every_token_is_at_exactly_one_rank(ranks: int, count: int, size: int) -> None:
    batches = micro_batches(random_examples(count, 300), size, "packed")
    hands = deal(batches, ranks)
    assert len(hands) == ranks
    assert len({len(hand) for hand in hands}) == 1
    dealt = [batch for hand in hands for batch in hand if not is_filler(batch.weights)]
    assert sorted(token for batch in dealt for token in tokens(batch)) == sorted(
        token for batch in batches for token in tokens(batch)
    )
    assert sum(float(batch.weights.sum()) for hand in hands for batch in hand) == pytest.approx(1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_values_come_back_in_the_order_of_the_micro_batches(ranks: int) -> None:
    batches = micro_batches(random_examples(7, 300), 64, "packed")
    assert len(batches) % 3
    found = collect_values([[batch.advantages * 2 for batch in hand] for hand in deal(batches, ranks)], batches)
    for batch, values in zip(batches, found, strict=True):
        assert np.array_equal(values, batch.advantages * 2)


def test_a_filler_is_short_and_counts_nothing() -> None:
    (batch,) = micro_batches([example("a", [5, 6], [7, 8, 9], [0, 1, 1])], 64, "packed")
    (first,), (second,) = deal([batch], 2)
    assert tokens(first) == tokens(batch)
    assert (second.ids.tolist(), second.rows.tolist(), second.columns.tolist()) == ([[5, 6]], [0], [1])
    assert is_filler(second.weights)
