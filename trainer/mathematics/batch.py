"""Examples -> micro-batches: rows of tokens, and flat arrays of the trained tokens.

A row holds one example (`padded`) or as many as fit beside each other (`packed`). In a packed row positions start
again with every example; transformers then keeps them apart in attention by itself, sliding windows included, as long
as it is given no mask of its own (`transformers.masking_utils.find_packed_sequence_indices`). Padding
continues the positions before it: attention is causal, so no token sees it, and rows of one example keep the fast
kernel.

Arrays hold the N trained tokens only, each with its row and column. Every loss is a sum over them of weight times
value. With R rollouts in the update, of n_1 ... n_R trained tokens, a token of rollout i weighs

    rollout-mean  1 / (R n_i)     mean over rollouts of their mean: GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 3
    token-mean    1 / sum of n    DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8: there over a group, here over all
    constant      1 / (R L)       Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2; L is given

The weights follow from the update alone: how examples are merged, packed or spread over micro-batches changes nothing
but rounding. The weights of `constant` do not add up to 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.adapters.samples import Sample
from penstock.trainer.config import Aggregate

# The engine's input: a sequence of tokens, with the trained tokens and their advantages.
#
# A `TokenExample` is a sample after credit assignment. `advantage` makes examples of the tape's samples,
# `trainer.data.training_examples` makes them of chats.

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Owner = tuple[str, str]
"""(rollout, attempt): the unit of weight in the loss."""


@dataclass(frozen=True, slots=True)
class TokenExample:
    """One sequence of P + R tokens. It is never truncated."""

    owner: Owner
    """Its rollout and attempt; all examples of an owner together weigh as much as those of any other."""
    prompt: Ids
    """[P] Tokens of the first prompt."""
    response: Ids
    """[R] Tokens that follow: the model's own, and in between the tokens of later prompts."""
    mask: Flags
    """[R] True for tokens that are trained."""
    behaviour: Floats
    """[R] Log-probabilities of the engine that sampled; nan where it gave none."""
    advantages: Floats
    """[R] Advantage of each token; counts only where the mask is true."""
    sequences: Ids
    """[R] Number of the call in which a token was sampled, from 0 within the example; -1 between calls."""

    @property
    def length(self) -> int:
        """Number of tokens, prompt and response together."""
        return len(self.prompt) + len(self.response)


def example(sample: Sample, worth: Sequence[float]) -> TokenExample:
    """Return the example of a sample; `worth[n]` is the advantage of each token of its n-th segment."""
    advantages = np.zeros(len(sample.response), np.float32)
    sequences = np.full(len(sample.response), -1, np.int32)
    for number, (segment, value) in enumerate(zip(sample.segments, worth, strict=True)):
        advantages[segment.start : segment.end] = value
        sequences[segment.start : segment.end] = number
    owner = (sample.rollout, sample.attempt)
    return TokenExample(owner, sample.prompt, sample.response, sample.mask, sample.logprobs, advantages, sequences)


Indices = npt.NDArray[np.intp]
Layout = Literal["packed", "padded"]
Reason = Literal["empty", "prompt", "long"]
"""Why an example cannot be trained on: nothing in it is trained, no prompt, or more tokens than allowed."""


@dataclass(frozen=True, slots=True)
class RejectedExample:
    """An example that is left out."""

    example: TokenExample
    reason: Reason


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass: B rows of W tokens, N of which are trained."""

    ids: Ids
    """[B, W] Tokens; 0 where a row is padded."""
    positions: Ids
    """[B, W] Position of each token in its example."""
    rows: Indices
    """[N] Rows of the trained tokens."""
    columns: Indices
    """[N] Their columns, from 1: the prediction of a token comes from the column before."""
    weights: Floats
    """[N] Weights in the loss."""
    advantages: Floats
    """[N] Advantages."""
    behaviour: Floats
    """[N] Log-probabilities of the engine that sampled; nan where it gave none."""
    sequences: Indices
    """[N] Number of the call in which each was sampled, within the micro-batch."""
    owners: Indices
    """[N] Number of the rollout, within the step, in the order in which rollouts first occur."""
    old: Floats | None = None
    """[N] Log-probabilities of the policy when the step began; None: the present ones."""
    reference: Floats | None = None
    """[N] Log-probabilities of the reference; None if it is not needed."""


def admit(examples: Iterable[TokenExample], longest: int) -> tuple[list[TokenExample], list[RejectedExample]]:
    """Return the examples of at most `longest` tokens with something to train, and the others with the reason."""
    kept, refused = list[TokenExample](), list[RejectedExample]()
    for example in examples:
        reason = _trouble(example, longest)
        if reason is None:
            kept.append(example)
        else:
            refused.append(RejectedExample(example, reason))
    return kept, refused


def _trouble(example: TokenExample, longest: int) -> Reason | None:
    if not example.mask.any():
        return "empty"
    if not len(example.prompt):
        return "prompt"
    return "long" if example.length > longest else None


def split(examples: Sequence[TokenExample], parts: int) -> list[list[TokenExample]]:
    """Split examples into `parts` of as equal numbers of rollouts as possible, in their order; no part is empty."""
    owners = list(dict.fromkeys(example.owner for example in examples))
    part = {owner: place * min(parts, len(owners)) // len(owners) for place, owner in enumerate(owners)}
    found: list[list[TokenExample]] = [[] for _ in range(min(parts, len(owners)))]
    for example in examples:
        found[part[example.owner]].append(example)
    return found


def token_weights(trained: Counter[Owner], aggregate: Aggregate) -> dict[Owner, float]:
    """Return the weight of a token of each rollout, as `loss.aggregate` says. `trained`: the trained tokens of each
    rollout."""
    if aggregate == "rollout-mean":
        return {owner: 1.0 / (len(trained) * count) for owner, count in trained.items()}
    whole = trained.total() if aggregate == "token-mean" else len(trained) * aggregate
    return dict.fromkeys(trained, 1.0 / max(1, whole))


def micro_batches(
    examples: Sequence[TokenExample],
    tokens: int,
    layout: Layout,
    aggregate: Aggregate = "rollout-mean",
) -> list[MicroBatch]:
    """Return a whole update as micro-batches of at most `tokens` tokens each, padding included. Raises `ValueError` for
    an example that `admit` would refuse."""
    for refused in admit(examples, tokens)[1]:
        raise ValueError(f"an example of rollout {refused.example.owner[0]} cannot be batched: {refused.reason}")
    trained: Counter[Owner] = Counter()
    for example in examples:
        trained[example.owner] += int(np.count_nonzero(example.mask))
    numbers = {owner: number for number, owner in enumerate(trained)}
    of_owner = token_weights(trained, aggregate)
    weights = [of_owner[example.owner] for example in examples]
    return [
        _collate(examples, rows, weights, numbers)
        for rows in arrange([example.length for example in examples], tokens, layout)
    ]


def arrange(lengths: Sequence[int], tokens: int, layout: Layout) -> list[list[list[int]]]:
    """Return micro-batches of rows of indices into `lengths`, longest first. A micro-batch is as wide as its longest
    row and has at most `tokens` tokens; a packed row is filled up with the longest that still fits (best fit,
    decreasing)."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    left = [lengths[index] for index in order]
    made: list[list[list[int]]] = []
    while left:
        width = left[-1]
        rows: list[list[int]] = []
        while left and len(rows) < max(1, tokens // width):
            rows.append(_row(order, left, width, layout))
        made.append(rows)
    return made


def _row(order: list[int], left: list[int], width: int, layout: Layout) -> list[int]:
    """Remove the members of one row from `order` and `left`, which go from short to long, and return their indices."""
    row: list[int] = []
    while left and left[0] <= width and not (row and layout == "padded"):
        place = bisect_right(left, width) - 1
        width -= left.pop(place)
        row.append(order.pop(place))
    return row


def _collate(
    examples: Sequence[TokenExample], rows: Sequence[Sequence[int]], weights: Sequence[float], numbers: dict[Owner, int]
) -> MicroBatch:
    width = max(sum(examples[index].length for index in row) for row in rows)
    ids, positions = np.zeros((len(rows), width), np.int32), np.tile(np.arange(width, dtype=np.int32), (len(rows), 1))
    flat: list[tuple[npt.NDArray[np.generic], ...]] = []
    calls = 0
    for number, row in enumerate(rows):
        start = 0
        for index in row:
            one = examples[index]
            middle, end = start + len(one.prompt), start + one.length
            ids[number, start:middle], ids[number, middle:end] = one.prompt, one.response
            positions[number, start:] = np.arange(width - start, dtype=np.int32)
            trained = np.flatnonzero(one.mask)
            size = len(trained)
            flat.append(
                (
                    np.full(size, number, np.intp), middle + trained, np.full(size, weights[index], np.float32),
                    one.advantages[trained], one.behaviour[trained],
                    calls + 1 + one.sequences[trained].astype(np.intp), np.full(size, numbers[one.owner], np.intp),
                )
            )  # fmt: skip
            calls += 2 + int(one.sequences.max(initial=-1))
            start = end
    return MicroBatch(ids, positions, *(np.concatenate(column) for column in zip(*flat, strict=True)))


def passes(count: int, size: int, times: int, seed: int) -> list[list[int]]:
    """Return indices of `count` items in steps of at most `size`: `times` passes, each in an order of its own. It
    depends on the arguments alone, so an interrupted run finds its place by the number of steps done."""
    random = np.random.default_rng(seed)
    orders = [random.permutation(count).tolist() for _ in range(times)]
    return [order[start : start + size] for order in orders for start in range(0, count, size)]


# Deals the micro-batches of a step to ranks that go through the model together, and collects the results.
#
# Ranks take turns in rounds: in each, every rank has one micro-batch. Whole micro-batches are dealt as long as there
# is one for every rank; the rest are split by their rows, so that no rank is idle if there are rows enough. A rank
# without a row in a round gets a filler, which weighs nothing: ranks hold the model together and all must go through
# it.
#
# Every token keeps its weight, so the sum over all ranks is the loss of the step, however the tokens are dealt.

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
