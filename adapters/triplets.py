"""Triplets in Agent Lightning's format: a prompt, a response and a reward for each model call.

    {"prompt": {"token_ids": [...]}, "response": {"token_ids": [...], "logprobs": [...]}, "reward": 1.0, "metadata": {}}

A call has its own reward; the last call of an attempt has the terminal one added. As in Agent Lightning, calls without
a reward have null. Unlike there, all calls with equal prompts are kept, and so is every choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from penstock.adapters.samples import Sample


def triplets(samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """Triplets of the samples of any number of rollouts, merged or not, in their order; arrays are numpy's."""
    last: dict[tuple[str, str], int] = {}
    for sample in samples:
        name, newest = (sample.rollout, sample.attempt), max(segment.sequence for segment in sample.segments)
        last[name] = max(newest, last.get(name, 0))
    for sample in samples:
        yield from _of_sample(sample, last[sample.rollout, sample.attempt])


def _of_sample(sample: Sample, last: int) -> Iterator[dict[str, Any]]:
    for segment in sample.segments:
        here = slice(segment.start, segment.end)
        yield {
            "prompt": {"token_ids": np.concatenate([sample.prompt, sample.response[: segment.start]])},
            "response": {"token_ids": sample.response[here], "logprobs": sample.logprobs[here]},
            "reward": _reward(segment.reward, sample.reward if segment.sequence == last else None),
            "metadata": {
                "rollout_id": sample.rollout,
                "attempt_id": sample.attempt,
                "data_id": sample.group,
                "agent_name": sample.agent,
                "model": sample.model,
                "sequence_id": segment.sequence,
                "choice": segment.choice,
                "version": segment.version,
            },
        }


def _reward(own: float | None, terminal: float | None) -> float | None:
    given = [reward for reward in (own, terminal) if reward is not None]
    return sum(given) if given else None
