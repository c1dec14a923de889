"""Samples and examples by hand, for tests of the trainer; numpy is all that they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.adapters.samples import Sample, Segment
from penstock.trainer.mathematics.batch import TokenExample


def sample(
    rollout: str,
    reward: float,
    prompt: Sequence[int],
    *parts: Sequence[int],
    group: str = "g",
    first: int = 1,
    rewards: Sequence[float | None] = (),
    logprobs: Sequence[float] | float = -1.0,
) -> Sample:
    """A sample whose `parts` are sampled, told, sampled … `first` is the sequence of its first call, `rewards` are
    those of its calls, `logprobs` those of its sampled tokens."""
    response = np.array([token for part in parts for token in part], np.int32)
    mask = np.concatenate([np.full(len(part), place % 2 == 0) for place, part in enumerate(parts)])
    ends = np.cumsum([len(part) for part in parts]).tolist()
    spans = [(end - len(part), end) for part, end in zip(parts, ends, strict=True)][::2]
    given = np.zeros(len(response), np.float32)
    given[mask] = logprobs
    segments = tuple(
        Segment(first + number, 0, start, end, None, (*rewards, *[None] * len(spans))[number], False, False)
        for number, (start, end) in enumerate(spans)
    )
    ids = np.array(prompt, np.int32)
    return Sample(rollout, "a1", group, None, "policy", ids, response, mask, given, segments, reward, {})


def example(
    owner: str, prompt: Sequence[int], response: Sequence[int], mask: Sequence[int], **more: Any
) -> TokenExample:
    """An example of one call; `advantages` and `behaviour` are given or 1 and -1."""
    size = len(response)
    return TokenExample(
        (owner, "a1"),
        np.array(prompt, np.int32),
        np.array(response, np.int32),
        np.array(mask, np.bool_),
        np.array(more.get("behaviour", np.full(size, -1.0)), np.float32),
        np.array(more.get("advantages", np.ones(size)), np.float32),
        np.array(more.get("sequences", np.zeros(size)), np.int32),
    )


def random_examples(count: int, vocabulary: int, seed: int = 0, longest: int = 12) -> list[TokenExample]:
    """Examples of `count` rollouts, one or two each, of random lengths, some of several calls."""
    random = np.random.default_rng(seed)
    made: list[TokenExample] = []
    for number in range(count):
        for _ in range(1 + number % 2):
            prompt, size = random.integers(1, longest), int(random.integers(2, longest))
            mask = random.random(size) < 0.6
            mask[0] = True
            made.append(
                example(
                    f"r{number}", random.integers(vocabulary, size=prompt).tolist(),
                    random.integers(vocabulary, size=size).tolist(), mask.tolist(),
                    behaviour=-3 + random.random(size), advantages=np.full(size, random.normal()),
                    sequences=np.arange(size) // 4,
                )
            )  # fmt: skip
    return made
