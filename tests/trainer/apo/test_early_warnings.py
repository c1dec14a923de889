"""What makes a run worthless is said after its first rollouts, with the way out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.mistakes import tells

from penstock.trainer.apo.gateway_laboratory import FIRST_ROLLOUTS, RolloutFacts, common_problem, missing_texts
from penstock.trainer.apo.protocol import Candidate, Pool, SearchBudget, Trial
from penstock.trainer.apo.search import SearchResult
from penstock.trainer.apo.session import search_warnings

GOOD = RolloutFacts("r", 2, {"shop"}, rewarded=True)
BAD = {
    "have failed, such as r: no key": replace(GOOD, rewarded=False, failure="no key"),
    "has made a call of a model through the gateway": replace(GOOD, calls=0, versions=()),
    "shop: not found in any call": replace(GOOD, versions={"other"}),
    "none of the first 8 rollouts has a reward": replace(GOOD, rewarded=False),
}


@pytest.mark.parametrize("said", BAD)
def test_what_all_of_the_first_rollouts_lack_is_said(said: str) -> None:
    assert common_problem([BAD[said]] * (FIRST_ROLLOUTS - 1), ["shop"]) == ""
    assert said in common_problem([BAD[said]] * FIRST_ROLLOUTS, ["shop"])


@pytest.mark.parametrize("said", BAD)
def test_one_good_rollout_is_enough_to_go_on(said: str) -> None:
    assert common_problem([BAD[said]] * FIRST_ROLLOUTS + [GOOD], ["shop"]) == ""


def test_a_failure_with_a_reward_is_something_to_learn_from() -> None:
    assert common_problem([replace(GOOD, failure="timeout")] * FIRST_ROLLOUTS, ["shop"]) == ""


def test_one_of_several_prompts_may_be_missing_and_is_named() -> None:
    assert common_problem([GOOD] * FIRST_ROLLOUTS, ["shop", "worker"]) == ""
    assert missing_texts([GOOD] * FIRST_ROLLOUTS, ["shop", "worker"]) == ["worker"]


def searched(rewards: list[float | None], reflections: int = 0) -> SearchResult:
    seed = Candidate({"shop": "text"})
    result = SearchResult(Pool(seed), SearchBudget(100, used_reflections=reflections))
    result.pool.keep(Trial(seed.id, f"t{at}", 0, reward) for at, reward in enumerate(rewards))
    return result


def test_a_judge_that_always_says_the_same_is_named() -> None:
    assert "all 3 rewards were 0.5" in search_warnings(searched([0.5, 0.5, 0.5]), "apo")[0]
    assert search_warnings(searched([0.5, 0.4, 0.5]), "apo") == []


def test_rollouts_without_a_reward_are_counted() -> None:
    assert tells(search_warnings(searched([0.1, None, 0.2, None]), "apo")[0], "2 of 4 rollouts", "no reward")


def test_reflections_that_led_to_nothing_are_named() -> None:
    assert tells(search_warnings(searched([0.1, 0.2], 12), "apo")[0], "none of 12 reflections")
