"""Deals the micro-batches of a step to ranks that go through the model together, and collects the results.

Ranks take turns in rounds: in each, every rank has one micro-batch. Whole micro-batches are dealt as long as there is
one for every rank; the rest are split by their rows, so that no rank is idle if there are rows enough. A rank without a
row in a round gets a filler, which weighs nothing: ranks hold the model together and all must go through it.

Every token keeps its weight, so the sum over all ranks is the loss of the step, however the tokens are dealt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.trainer.mathematics.batch import MicroBatch

BY_TOKEN = [one.name for one in fields(MicroBatch) if one.name not in ("ids", "positions")]
"""Fields with one value for each trained token."""


def deal(batches: Sequence[MicroBatch], ranks: int) -> list[list[MicroBatch]]:
    """Return each rank's micro-batches, as many for one as for another."""
    whole = len(batches) // ranks * ranks
    rounds = [list(batches[start : start + ranks]) for start in range(0, whole, ranks)]
    rounds += [_parts(batch, ranks) for batch in batches[whole:]]
    return [list(hand) for hand in zip(*rounds, strict=True)]


def collect_values(
    hands: Sequence[Sequence[npt.NDArray[Any]]], batches: Sequence[MicroBatch]
) -> list[npt.NDArray[Any]]:
    """Return the values [N] of each of `batches`, from the ranks' values for the micro-batches that were dealt to
    them."""
    ranks, whole = len(hands), len(batches) // len(hands) * len(hands)
    rounds = list(zip(*hands, strict=True))
    found = [values for turn in rounds[: whole // ranks] for values in turn]
    # Fillers come last.
    rest = zip(rounds[whole // ranks :], batches[whole:], strict=True)
    return found + [np.concatenate(turn)[: len(batch.rows)] for turn, batch in rest]


def is_filler(weights: Any) -> bool:
    """True if tokens with these weights are a filler's; the weight of a trained token is never 0."""
    return not weights.any()


def _parts(batch: MicroBatch, ranks: int) -> list[MicroBatch]:
    """Return a micro-batch for each rank: its rows, in their order, as evenly as possible."""
    count = min(ranks, len(batch.ids))
    borders = [len(batch.ids) * place // count for place in range(count + 1)]
    return [_rows(batch, *span) for span in pairwise(borders)] + [_filler(batch)] * (ranks - count)


def _rows(batch: MicroBatch, start: int, end: int) -> MicroBatch:
    there = (batch.rows >= start) & (batch.rows < end)
    part = _tokens(batch, there)
    return replace(part, ids=batch.ids[start:end], positions=batch.positions[start:end], rows=part.rows - start)


def _filler(batch: MicroBatch) -> MicroBatch:
    """Return the shortest possible micro-batch: one token that follows another, with weight 0."""
    one = _tokens(batch, np.arange(len(batch.rows)) == 0)
    return replace(
        one, ids=batch.ids[:1, :2], positions=batch.positions[:1, :2], rows=one.rows * 0, columns=one.columns * 0 + 1,
        weights=one.weights * 0,
    )  # fmt: skip


def _tokens(batch: MicroBatch, there: npt.NDArray[np.bool_]) -> MicroBatch:
    values = {name: getattr(batch, name) for name in BY_TOKEN}
    return replace(batch, **{name: one[there] for name, one in values.items() if one is not None})
