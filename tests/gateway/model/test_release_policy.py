"""Policies: defaults that work, and refusals that name the field, the value and the way out."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.mistakes import tells

from penstock.gateway.config import ConfigError
from penstock.gateway.model.release_policy import (
    HOLDBACK_ALPHA,
    CanaryStage,
    CostGuard,
    Guards,
    LatencyGuard,
    ReleasePolicy,
    freeze_policy,
    thaw_policy,
)


def test_an_empty_policy_is_the_default_ramp() -> None:
    policy = ReleasePolicy.load("")
    stages = [(stage.name, stage.split, stage.rollouts) for stage in policy.stages]
    assert stages == [("5%", 0.05, 20), ("20%", 0.2, 80), ("50%", 0.5, 20)]
    assert policy.guard_alphas == {"early_error": 0.005, "error": 0.005, "violation": 0.005, "missing": 0.005}
    assert [(step.name, round(step.split, 9), step.rollouts) for step in policy.ramp[3:]] == [("holdback", 0.95, 4000)]

    policy = ReleasePolicy.load("[guards]\nlatency = {slo_s = 30}\ncost = {cap = 0.5}")
    assert list(policy.guard_alphas) == ["early_error", "error", "violation", "latency", "cost", "missing"]
    # A candidate that is no worse in anything is rolled back with this probability at most.
    assert policy.alpha + sum(policy.guard_alphas.values()) + HOLDBACK_ALPHA == pytest.approx(0.05)


def test_a_policy_is_the_same_after_it_was_stored() -> None:
    policy = ReleasePolicy.load(
        'margin_absolute = 0.2\nreward = "solved"\nreward_range = [-1, 1]\n[[stages]]\nsplit = 0.125\n'
        "approval = true\n[guards.latency]\nslo_s = 30\n[shadow]\nshare = 1\n"
    )
    assert ReleasePolicy.model_validate_json(policy.model_dump_json()) == policy
    assert ReleasePolicy.model_validate(policy.model_dump(mode="json")) == policy


def test_the_tape_has_what_nobody_can_set_too() -> None:
    """A release of before says it all, and its hash is of all of it."""
    policy = ReleasePolicy.load('judge = "module:judge"\n[[stages]]\nsplit = 0.125\n[guards]\nlatency = {slo_s = 30}')
    kept = freeze_policy(policy)
    assert (kept["failed"], kept["hard_violations"], kept["srm_alpha"], kept["adaptive"]) == (0.0, 0, 0.01, False)
    assert (kept["replay"]["judge"], kept["shadow"]["judge"], kept["replay"]["alpha"]) == (*["module:judge"] * 2, 0.05)
    assert (kept["stages"][0]["name"], kept["reward_low"], kept["reward_high"]) == ("12.5%", 0.0, 1.0)
    assert (kept["guards"]["latency"], kept["guards"]["cost"]) == ({"alpha": 0.0025, "slo_s": 30.0}, None)
    assert kept["guards"]["early_error"] == {"alpha": 0.005, "deadline_s": 30.0}
    assert (kept["replay"]["budget"], kept["shadow"]["budget"], kept["holdback"]["share"]) == (400, 500, 0.05)
    assert thaw_policy(kept, ReleasePolicy.model_validate) == policy
    assert freeze_policy(thaw_policy(kept, ReleasePolicy.model_validate)) == kept
    for other in ({"srm_alpha": 0.02}, {"shadow": kept["shadow"] | {"judge": "exact"}}):
        with pytest.raises(ValueError, match="Extra inputs"):
            _ = thaw_policy(kept | other, ReleasePolicy.model_validate)


def test_a_release_of_before_goes_by_the_values_that_it_began_with() -> None:
    kept = freeze_policy(ReleasePolicy())
    guards = kept["guards"] | {"early_error": {"alpha": 0.0, "deadline_s": 5.0}, "error": {"alpha": 0.01}}
    more: dict[str, Any] = {"alpha": 0.03, "guards": guards, "holdback": {"share": 0.2, "rollouts": 9}}
    more |= {"replay": kept["replay"] | {"budget": 60, "margin": 0.3}, "shadow": kept["shadow"] | {"budget": 7}}
    policy = thaw_policy(kept | more, ReleasePolicy.model_validate)
    assert freeze_policy(policy) == kept | more
    assert (policy.alpha, policy.alpha_promote, policy.early_deadline_s) == (0.03, 0.05, 5.0)
    assert policy.guard_alphas == {"error": 0.01, "violation": 0.005, "missing": 0.005}
    assert (policy.ramp[-1].split, policy.ramp[-1].rollouts) == (0.8, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("margn = 0.1", "policy: margn: unknown key; did you mean 'margin'?"),
        ("alpha = 0.02", "policy: alpha: unknown key"),
        ("zzz = 1", "policy: zzz: unknown key; known keys: stages, checked"),
        ("[[stages]]\nsplit = 0.5\nrollout = 3", "stages 1: rollout: unknown key; did you mean 'rollouts'?"),
        ("[guards.error]\nalpha = 0", "guards.error: unknown key; known keys: margin, latency, cost"),
        ("[guards.latency]", "guards.latency.slo_s: it is missing"),
        ("[[stages]]\nsplit = 1.0", "stages 1: split: 1.0 is not less than 1"),
        ("[[stages]]\nsplit = 0.0", "stages 1: split: 0.0 is not more than 0"),
        ("margin = '5%'", "margin: '5%' is not a number"),
        ("horizon = 100.5", "horizon: 100.5 is not a whole number"),
        ("missing_limit = nan", "missing_limit: nan is not a finite number"),
        ("checked = 'maybe'", "checked: 'maybe' is not 'required', 'report' or 'skip'"),
        ("replay = 'skip'", "replay: 'skip' is not an object; did you mean 'replayed'?"),
        ("stages = []", "stages: it has 0 items, not 1 or more"),
        ("[[stages]]\nsplit = 0.5\n[[stages]]\nsplit = 0.2", "splits must rise, since no rollout may change its arm"),
        ("[guards.latency]\nslo_s = 1\nalpha = 0.01", "guards.latency.alpha: unknown key; known keys: slo_s"),
        ("horizon = 500", "horizon: 500 rollouts, but the stages take about 840"),
        ("stages = [{split = 5e-324}]", "horizon: 6000 rollouts, but the stages take about inf"),
        ("[[stages]]\nsplit = 0.96", "stages: the last split, 0.96, must be below 0.95, that of the holdback"),
        ("holdback = {share = 0.1}", "holdback.share: unknown key; known keys: rollouts"),
        ("reward_range = [1, 1]", "reward_range: the worst, 1, must be below the best, 1"),
        ("reward_range = [-1, 1]", "needs rewards that start at 0, and reward_range starts at -1; give"),
        ("margin_absolute = 1.0", "margin_absolute: 1 must be below 1, the width of reward_range"),
        ("margin =", "policy cannot be read as TOML"),
    ],
)
def test_what_is_wrong_is_refused_with_a_way_out(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ReleasePolicy.load(text)
    assert message in str(refused.value)


def test_every_wrong_key_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        ReleasePolicy.load("margn = 1\nmargin = 2", "canary.toml")
    assert tells(str(refused.value), "canary.toml: margin: 2", "less than 1", "margn: unknown key", "'margin'")


def test_the_margin_is_fixed_from_the_baseline_before_the_start() -> None:
    assert ReleasePolicy().d(0.6) == pytest.approx(0.06)
    assert [ReleasePolicy().d(mean) for mean in (0.36, 0.1)] == pytest.approx([0.0543, 0.02], abs=1e-4)
    assert [ReleasePolicy(margin=0.05).d(mean) for mean in (1.0, 0.6)] == [0.05, pytest.approx(0.03)]
    assert [ReleasePolicy().d(0.0), ReleasePolicy(margin=0).d(0.3)] == [0.0, 0.0]
    assert ReleasePolicy(margin_absolute=0.5, reward_range=(0, 10)).d(None) == 0.05
    assert ReleasePolicy(hold_split=True).d(None) == 0.0
    assert ReleasePolicy(hold_split=True, reward_range=(-1, 1)).d(0.3) == 0.0
    with pytest.raises(ConfigError, match="no reward of it has been recorded; give margin_absolute"):
        ReleasePolicy().d(None)


def test_goodness_is_within_bounds() -> None:
    policy = ReleasePolicy(reward_range=(-1, 3), margin_absolute=0.1)
    assert [policy.goodness(reward) for reward in (-5, -1, 0, 3, 9)] == [0, 0, 0.25, 1, 1]
    assert [LatencyGuard(slo_s=2).goodness(seconds) for seconds in (1, 2, 2.1)] == [1, 1, 0]
    assert [CostGuard(cap=4).goodness(cost) for cost in (0, 1, 4, 9)] == [1, 0.75, 0, 0]


def test_a_policy_is_played_with_fewer_guards() -> None:
    assert ReleasePolicy().with_guards(["missing"]).guard_alphas == {"missing": 0.005}
    assert Guards().latency is None
    assert [CanaryStage(split=split).name for split in (0.05, 0.125, 0.5)] == ["5%", "12.5%", "50%"]
