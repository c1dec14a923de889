"""Rows as verl wants them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fakes.tokens import Talk, logprob

from penstock.adapters.samples import Options, Sample, samples
from penstock.adapters.verl import data_proto


def two() -> list[Sample]:
    talk = Talk(reward=0.3)
    one = talk.call([11, 12], [(13, 14)], agent="a", versions={"m": "v1"})
    talk.call([*one.whole(), 15], [(16,)], agent="a", versions={"m": "v1"})
    talk.call([21], [(22,)], agent="b")
    return samples(talk.episode())[0]


def test_rows_are_padded_and_marked() -> None:
    tensors, others = data_proto(two(), prompt_length=3, response_length=5, pad=99)
    found = {name: tensor.tolist() for name, tensor in tensors.items()}
    assert found["prompts"] == [[99, 11, 12], [99, 99, 21]]
    assert found["responses"] == [[13, 14, 15, 16, 99], [22, 99, 99, 99, 99]]
    assert found["input_ids"] == [p + r for p, r in zip(found["prompts"], found["responses"], strict=True)]
    assert found["attention_mask"] == [[0, 1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0, 0]]
    assert found["position_ids"] == [[0, 0, 1, 2, 3, 4, 5, 5], [0, 0, 0, 1, 1, 1, 1, 1]]
    assert found["response_mask"] == [[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]]
    assert np.allclose(tensors["token_level_scores"], [[0, 0, 0, 0.3, 0], [0.3, 0, 0, 0, 0]])
    # Exact: half precision would not tell 0.3 from 0.2998.
    assert tensors["token_level_scores"].dtype == tensors["rollout_log_probs"].dtype == np.float32
    assert tensors["token_level_scores"].max() == np.float32(0.3)
    expected = [[logprob(13, 0), logprob(14, 1), 0, logprob(16, 0), 0], [logprob(22, 0), 0, 0, 0, 0]]
    assert found["rollout_log_probs"] == expected
    assert all(tensors[name].dtype == np.int64 for name in found.keys() - {"token_level_scores", "rollout_log_probs"})
    assert {name: list(values) for name, values in others.items()} == {
        "uid": ["g1", "g1"],
        "rollout": ["r1", "r1"],
        "attempt": ["a1", "a1"],
        "agent": ["a", "b"],
        "versions": [("v1", "v1"), (None,)],
    }


def test_objects_of_equal_length_stay_objects() -> None:
    first, *_ = two()
    assert data_proto([first, first], 3, 5, 0)[1]["versions"].shape == (2,)


def test_logprobs_are_all_there_or_not_at_all() -> None:
    talk = Talk()
    talk.call([1], [(2,)], logprobs=False)
    made = samples(talk.episode(), Options(allow=frozenset({"no_logprobs"})))[0]
    assert "rollout_log_probs" not in data_proto([*two(), *made], 3, 5, 0)[0]


@pytest.mark.parametrize(
    ("about", "error"),
    [
        ({"prompt_length": 1}, "a prompt of 2 tokens is not 1 to prompt_length=1"),
        ({"response_length": 3}, "a response of 4 tokens is not 1 to response_length=3"),
    ],
)
def test_what_does_not_fit_is_refused(about: dict[str, int], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        data_proto(two(), **({"prompt_length": 3, "response_length": 5, "pad": 0} | about))


def test_a_row_needs_a_reward() -> None:
    talk = Talk(reward=None)
    talk.call([1], [(2,)])
    made: Any = samples(talk.episode(), Options(allow=frozenset({"no_reward"})))[0]
    assert math.isnan(made[0].reward)
    with pytest.raises(ValueError, match="its reward is nan"):
        data_proto(made, 3, 5, 0)


def test_no_rows() -> None:
    tensors, others = data_proto([], 3, 5, 0)
    assert tensors["input_ids"].shape == (0, 8)
    assert others["uid"].shape == (0,)
