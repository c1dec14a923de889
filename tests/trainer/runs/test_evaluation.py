"""What the rollouts of a held-out suite come to: mean, interval, pass@k."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import comb
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

from penstock.gateway.model.rollout import RolloutStatus
from penstock.trainer.config import SuiteSettings as Settings
from penstock.trainer.data.collector import RolloutBatch
from penstock.trainer.data.tasks import RolloutTask
from penstock.trainer.runs.evaluation import EvaluationSuite, pass_at, suite_metrics, wilson


def suite(tasks: int, **given: object) -> EvaluationSuite:
    settings = Settings.model_validate({"tasks": Path("hard.jsonl"), **given})
    return EvaluationSuite(settings, [RolloutTask(number, {}) for number in range(tasks)])


def test_pass_at_k_is_the_share_of_all_choices_of_k_with_one_that_passed() -> None:
    for samples in range(1, 8):
        for passed in range(samples + 1):
            outcomes = [number < passed for number in range(samples)]
            for k in range(1, samples + 1):
                every = [any(chosen) for chosen in combinations(outcomes, k)]
                assert len(every) == comb(samples, k)
                assert pass_at(samples, passed, k) == pytest.approx(fmean(every))
    with pytest.raises(ValueError, match=r"pass@5 of 1 in 4 rollouts is not defined"):
        pass_at(4, 1, 5)


def test_a_suite_reports_its_mean_its_interval_and_both_ks() -> None:
    rewards = {"a": [1.0, 0.0, 0.5, 1.0], "b": [0.0, 0.0, 0.0, 0.0], "c": [0.5, 0.9, 0.9, 0.9]}
    found = RolloutBatch(rewards=rewards, ended=Counter({RolloutStatus.SUCCEEDED: 11, RolloutStatus.FAILED: 1}))
    made = suite_metrics(suite(3, samples=4, passed=0.9), found)
    mean = (2.5 + 0.0 + 3.2) / 12
    low, high = wilson(mean, 3)
    assert made == pytest.approx(
        {
            "evaluation/hard/reward": mean,
            "evaluation/hard/tasks": 3.0,
            "evaluation/hard/reward_low": low,
            "evaluation/hard/reward_high": high,
            "evaluation/hard/pass@1": (2 / 4 + 0 + 3 / 4) / 3,
            "evaluation/hard/pass@4": 2 / 3,
            "evaluation/hard/failed": 1 / 12,
        }
    )


def test_a_task_without_a_reward_has_not_passed_and_one_sample_has_one_k() -> None:
    found = RolloutBatch(rewards={"a": [1.0]}, ended=Counter({RolloutStatus.SUCCEEDED: 1, RolloutStatus.CANCELLED: 1}))
    made = suite_metrics(suite(2), found)
    assert made["evaluation/hard/pass@1"] == 0.5
    assert [name for name in made if "pass@" in name] == ["evaluation/hard/pass@1"]
    assert suite_metrics(suite(2), RolloutBatch()) == {}


def test_rewards_beyond_0_and_1_have_no_interval() -> None:
    found = RolloutBatch(rewards={"a": [3.0]}, ended=Counter({RolloutStatus.SUCCEEDED: 1}))
    assert "evaluation/hard/reward_low" not in suite_metrics(suite(1), found)
