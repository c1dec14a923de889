"""Candidates are known by their texts; the pool counts each trial once, and leaves out those without a reward."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.apo.protocol import Candidate, Pool, Trial, TrialSpec

names = st.text(min_size=1, max_size=5)
texts = st.dictionaries(names, st.text(max_size=20), min_size=1, max_size=4)
SEED = Candidate({"desk": "Answer."})


def trial(candidate: Candidate, reward: float | None, task: str = "t0", number: int = 0) -> Trial:
    return Trial(candidate.id, task, number, reward)


# --- candidates ---


@given(texts=texts)
def test_the_same_texts_are_the_same_candidate_whoever_made_it(texts: dict[str, str]) -> None:
    turned = dict(reversed(texts.items()))
    one, other = Candidate(texts), Candidate(turned, "parent", "a claim", ("r1",))
    assert one.id == other.id
    assert re.fullmatch("[0-9a-f]{12}", one.id)
    assert one.length == sum(len(text) for text in texts.values())


@given(one=texts, other=texts)
def test_other_texts_are_another_candidate(one: dict[str, str], other: dict[str, str]) -> None:
    assert (Candidate(one).id == Candidate(other).id) == (one == other)


def test_names_of_candidates_do_not_change_between_versions_of_penstock() -> None:
    # A run that goes on finds its rollouts by this name.
    assert SEED.id == "e85ab20b5be5"


# --- the pool ---


def test_a_pool_begins_with_the_seed_and_keeps_the_first_of_candidates_that_are_the_same() -> None:
    pool = Pool(SEED)
    again = Candidate(SEED.texts, "somebody", "new")
    assert pool.add(again) is SEED
    assert list(pool.candidates.values()) == [SEED]
    assert pool.mean(SEED.id) is None
    assert pool.of("nobody") == []


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["t0", "t1"])), max_size=30))
def test_no_order_is_given_twice_and_numbers_count_from_0(asked: list[tuple[str, str]]) -> None:
    pool = Pool(SEED)
    orders = [pool.next_trial(candidate, task) for candidate, task in asked]
    assert len(set(orders)) == len(orders)
    for at, order in enumerate(orders):
        assert order.number == asked[:at].count(order[:2])


@given(st.lists(st.none() | st.floats(0, 1), max_size=20))
def test_a_trial_without_a_reward_is_left_out_of_the_mean(rewards: list[float | None]) -> None:
    pool = Pool(SEED)
    pool.keep(trial(SEED, reward, number=at) for at, reward in enumerate(rewards))
    judged = [reward for reward in rewards if reward is not None]
    assert len(pool.trials) == len(rewards)
    assert [one.reward for one in pool.of(SEED.id)] == judged
    assert pool.mean(SEED.id) == (sum(judged) / len(judged) if judged else None)


def test_an_order_names_candidate_task_and_number() -> None:
    pool = Pool(SEED)
    assert [pool.next_trial(SEED.id, "t0"), pool.next_trial(SEED.id, "t0")] == [
        TrialSpec(SEED.id, "t0", 0),
        TrialSpec(SEED.id, "t0", 1),
    ]
