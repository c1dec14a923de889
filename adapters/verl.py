"""Samples as the rows of verl's `DataProto`, without verl: numpy arrays under the names that verl 0.9 uses.

    tensors, others = data_proto(samples, prompt_length=1024, response_length=2048, pad=0)
    DataProto.from_dict({k: torch.from_numpy(v) for k, v in tensors.items()}, non_tensors=others)

Prompts are padded on the left and responses on the right, so that all responses begin at one column. Every sample of a
rollout is a row with the rollout's reward; an average over rows must be weighted by `rollout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.adapters.samples import Sample

Tensors = dict[str, npt.NDArray[Any]]


def data_proto(
    samples: Sequence[Sample], prompt_length: int, response_length: int, pad: int
) -> tuple[Tensors, dict[str, npt.NDArray[np.object_]]]:
    """(tensors, non-tensors) of B samples, in their order, with P = `prompt_length` and R = `response_length` tokens.

    int64: prompts [B, P], responses [B, R], input_ids, attention_mask and position_ids [B, P+R], response_mask [B, R]
    (1 where the policy sampled). float32: token_level_scores [B, R], the reward at the last token of the response, and
    rollout_log_probs [B, R], which is left out unless the engine gave all of them. Objects [B]: uid (the group),
    rollout, attempt, agent, versions. Raises ValueError for a sample that does not fit, is empty, or has no reward."""
    for sample in samples:
        _check(sample, prompt_length, response_length)
    prompts, before = _padded([s.prompt for s in samples], prompt_length, pad, left=True)
    responses, after = _padded([s.response for s in samples], response_length, pad)
    attention = np.concatenate([before, after], axis=1)
    tensors: Tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": np.maximum(np.cumsum(attention, axis=1) - 1, 0),
        "response_mask": _padded([s.mask for s in samples], response_length, 0)[0],
        "token_level_scores": _scores(samples, response_length),
    }
    logprobs = _padded([s.logprobs for s in samples], response_length, 0, dtype=np.float32)[0]
    if not np.isnan(logprobs).any():
        tensors["rollout_log_probs"] = logprobs
    others = {
        "uid": [s.group for s in samples],
        "rollout": [s.rollout for s in samples],
        "attempt": [s.attempt for s in samples],
        "agent": [s.agent for s in samples],
        "versions": [tuple(segment.version for segment in s.segments) for s in samples],
    }
    return tensors, {name: _objects(values) for name, values in others.items()}


def _check(sample: Sample, prompt_length: int, response_length: int) -> None:
    sizes = (("prompt", len(sample.prompt), prompt_length), ("response", len(sample.response), response_length))
    for name, size, limit in sizes:
        if not 0 < size <= limit:
            raise ValueError(f"rollout {sample.rollout}: a {name} of {size} tokens is not 1 to {name}_length={limit}")
    if not np.isfinite(sample.reward):
        raise ValueError(f"rollout {sample.rollout}: its reward is {sample.reward}")


def _padded(
    rows: Sequence[npt.NDArray[Any]], width: int, fill: int, left: bool = False, dtype: Any = np.int64
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Rows padded to one width, and an array with 1 for each element that is no padding."""
    made, there = np.full((len(rows), width), fill, dtype), np.zeros((len(rows), width), np.int64)
    for at, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        made[at, place], there[at, place] = row, 1
    return made, there


def _scores(samples: Sequence[Sample], width: int) -> npt.NDArray[np.float32]:
    made = np.zeros((len(samples), width), np.float32)
    made[np.arange(len(samples)), [len(s.response) - 1 for s in samples]] = [s.reward for s in samples]
    return made


def _objects(values: Sequence[Any]) -> npt.NDArray[np.object_]:
    """An array with one object for each row: from a list of tuples numpy would make a second axis."""
    made = np.empty(len(values), np.object_)
    for at, value in enumerate(values):
        made[at] = value
    return made
