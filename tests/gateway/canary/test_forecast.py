"""What a release is likely to take, played with the past of its stable version."""

from __future__ import annotations

from random import Random

import pytest

from penstock.gateway.canary.forecast import ENOUGH, MOST, STEPS, forecast, played_policy
from penstock.gateway.canary.past import DAY_NS, Past, PastRollout
from penstock.gateway.display.releases import foretold
from penstock.gateway.model.policy import Policy, Stage
from penstock.gateway.model.release import Forecast, Release


def past(rate: float, rollouts: int = 1000, errors: float = 0.0, a_day: float = 500.0) -> Past:
    """Rollouts that succeed at this rate."""
    rng = Random(3)
    return Past([
        PastRollout(int(number * DAY_NS / a_day), float(rng.random() < rate), guards(rng.random() < errors))
        for number in range(rollouts)
    ])  # fmt: skip


def guards(failed: bool) -> dict[str, float | None]:
    return {"early_error": 1.0 - failed, "error": 1.0 - failed, "violation": 1.0}


def made(of: Past, policy: Policy | None = None, salt: str = "s") -> Release:
    policy = policy or Policy()
    mean = of.mean or 0.0
    return Release(
        id="x-1", resource="x", kind="prompt", stable="v1", candidate="v2", policy=policy, margin=policy.d(mean),
        guard_margins=policy.guard_margins(of.spreads()), salt=salt,
    )  # fmt: skip


def test_a_usual_success_rate_is_decided_and_a_rare_one_is_often_held() -> None:
    usual, rare = (forecast(made(of), of) for of in (past(0.7), past(0.05)))
    assert usual.rollouts is not None
    assert usual.days is not None
    assert usual.promoted is not None
    assert rare.held is not None
    assert 1000 < usual.rollouts < 3000
    assert usual.days == pytest.approx(usual.rollouts / 500, rel=0.01)
    assert usual.promoted > 0.8
    assert rare.held > 0.4
    assert (usual.past, usual.mean) == (1000, past(0.7).mean)


def test_a_forecast_is_the_same_when_it_is_asked_again() -> None:
    of = past(0.9, errors=0.02)
    assert forecast(made(of), of) == forecast(made(of), of)


def test_its_work_is_bounded() -> None:
    of, quick = past(0.3), past(0.9)
    found = forecast(made(of, Policy(horizon=6000, alpha_promote=1e-9)), of)
    assert found.played <= STEPS // 1000
    assert found.held == pytest.approx(1.0, abs=0.15)
    margin = Policy(stages=[Stage(split=0.5, rollouts=1)], margin_absolute=0.9)
    assert forecast(made(quick, margin), quick).played == MOST


def test_a_release_that_is_longer_than_what_is_played_foretells_nothing() -> None:
    of = past(0.7)
    release = made(of, Policy(horizon=10_000_000, hold_split=True))
    found = forecast(release, of)
    assert found == Forecast(past=1000, mean=of.mean)
    assert foretold(release, found).startswith("No forecast: with this policy")


def test_a_short_past_foretells_nothing() -> None:
    assert forecast(made(past(0.7)), past(0.7, ENOUGH - 1)) == Forecast(past=ENOUGH - 1)
    silent = Past([PastRollout(0, None, {}) for _ in range(100)])
    assert forecast(made(past(0.7)), silent) == Forecast(past=100)


def test_people_and_guards_that_never_varied_are_not_played() -> None:
    stages = [Stage(split=0.5, approval=True, seconds=60)]
    policy = Policy.model_validate({"stages": stages, "guards": {"latency": {"slo_s": 5}}})
    assert list(policy.guard_alphas) == ["early_error", "error", "violation", "latency", "missing"]
    played = played_policy(policy, past(0.7, errors=0.02))
    assert list(played.guard_alphas) == ["early_error", "error"]
    assert (played.stages[0].approval, played.stages[0].seconds) == (False, 0.0)
    found = forecast(made(past(0.7), policy), past(0.7))
    assert found.promoted is not None
    assert found.promoted > 0.8
