"""Triplets as Agent Lightning writes them."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.tokens import Talk, logprob

from penstock.adapters.samples import Options, samples, triplets


@pytest.mark.parametrize("merge", [True, False])
def test_a_triplet_for_each_choice(merge: bool) -> None:
    talk = Talk(reward=None)
    one = talk.call([1], [(2, 3), (4,)], agent="a", versions={"m": "v1"})
    talk.call([1], [(2, 3)], agent="a", versions={"m": "v1"})
    talk.call([*one.whole(), 5], [(6,)], agent="a", versions={"m": "v1"})
    talk.judge(value=1.0)
    talk.judge(value=0.5, span=1)
    found = sorted(triplets(samples(talk.episode(), Options(merge=merge))[0]), key=place)
    assert [place(it) for it in found] == [(1, 0), (1, 1), (2, 0), (3, 0)]
    assert [it["prompt"]["token_ids"].tolist() for it in found] == [[1], [1], [1], [1, 2, 3, 5]]
    assert [it["response"]["token_ids"].tolist() for it in found] == [[2, 3], [4], [2, 3], [6]]
    assert found[0]["response"]["logprobs"].tolist() == [logprob(2, 0), logprob(3, 1)]
    # The terminal reward is the last call's; the second call was not judged.
    assert [it["reward"] for it in found] == [0.5, 0.5, None, 1.0]
    about = {"rollout_id": "r1", "attempt_id": "a1", "data_id": "g1", "agent_name": "a", "model": "m"}
    assert found[3]["metadata"] == about | {"sequence_id": 3, "choice": 0, "version": "v1"}


def place(triplet: dict[str, Any]) -> tuple[int, int]:
    return triplet["metadata"]["sequence_id"], triplet["metadata"]["choice"]


def test_a_last_call_with_a_reward_of_its_own_has_both() -> None:
    talk = Talk(reward=None)
    talk.call([1], [(2,)])
    talk.judge(value=1.0)
    talk.judge(value=0.25, span=1)
    (found,) = triplets(samples(talk.episode())[0])
    assert found["reward"] == 1.25
