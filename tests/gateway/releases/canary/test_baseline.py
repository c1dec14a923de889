"""What the stable version did before: which rollouts say something of it, what margins follow, and what a release is
likely to take, played with that past."""

from __future__ import annotations

from math import sqrt
from random import Random
from typing import Any

import pytest
from fakes.judged import FakeTape

from penstock.console.views.releases import forecast_text
from penstock.gateway.model.facts import REPLAY_OF
from penstock.gateway.model.release import Forecast, Pin, Release
from penstock.gateway.model.release_policy import CanaryStage, ReleasePolicy
from penstock.gateway.model.rollout import Attempt, Rollout, RolloutStatus, Totals
from penstock.gateway.releases.canary.forecast import (
    DAY_NS,
    ENOUGH,
    MOST,
    STEPS,
    Baseline,
    BaselineReader,
    BaselineRollout,
    forecast,
    played_policy,
)

NOW = 10 * 3600 * 10**9


def read(tape: FakeTape, version: str = "v1", names: list[str] | None = None, **policy: Any) -> Baseline:
    """As a release of x reads it."""
    reader = BaselineReader(tape, ReleasePolicy.model_validate(policy), "x", version, NOW)
    return reader.read([one for name, one in tape.rollouts.items() if names is None or name in names])


def rollout(tape: FakeTape, name: str, reward: float | None, errors: int = 0, **more: Any) -> None:
    tape.rollouts[name] = Rollout(id=name, **more)
    tape.tries.append(Attempt(rollout=name, id="a1", totals=Totals(calls=2, errors=errors)))
    if reward is not None:
        tape.reward(reward, rollout=name)


def test_it_is_of_rollouts_that_were_given_the_version_and_of_nothing_made_for_a_release() -> None:
    tape, rehearsal = FakeTape(), "x-1-rehearsal-a2-1-candidate"
    for name, value in (("r1", 0.25), ("r2", 0.5), ("r3", 0.75), (rehearsal, 0.0), ("r4", 0.0)):
        rollout(tape, name, value)
    tape.said["r4"][0].attributes = {**(tape.said["r4"][0].attributes or {}), REPLAY_OF: "r1/a1"}
    assert read(tape).mean == 0.5
    tape.given = [Pin(resource="x", version="v1")]
    assert read(tape).mean == 0.25
    assert read(tape, "v2").mean == 0.625
    assert read(tape, names=[rehearsal]).mean is None


def test_what_may_still_get_a_reward_says_nothing_and_what_never_got_one_is_missing() -> None:
    tape = FakeTape()
    rollout(tape, "young", None, created_ns=NOW - 3599 * 10**9)
    rollout(tape, "old", None)
    rollout(tape, "gone", None, status=RolloutStatus.CANCELLED)
    rollout(tape, "failed", None, status=RolloutStatus.FAILED, origin="queued")
    assert [one.reward for one in read(tape).rollouts] == [None, 0.0]
    assert read(tape).spreads()["missing"] == 0.5
    rollout(tape, "good", 1.0)
    assert (read(tape).mean, read(tape, missing="worst").mean) == (0.5, pytest.approx(1 / 3))


def test_margins_of_guards_follow_from_how_much_they_varied() -> None:
    tape = FakeTape()
    for number in range(100):
        rollout(tape, f"r{number}", 1.0, errors=int(number < 10))
    spreads = read(tape).spreads()
    assert spreads == {"early_error": spreads["error"], "error": pytest.approx(0.3), "violation": 0.0, "missing": 0.0}
    assert ReleasePolicy().guard_margins(spreads) == {"error": pytest.approx(0.045), "violation": 0.02, "missing": 0.02}
    assert ReleasePolicy().guard_margins({}) == {"error": 0.02, "violation": 0.02, "missing": 0.02}
    fixed = ReleasePolicy.model_validate({"guards": {"margin": 0.01, "latency": {"slo_s": 5}}})
    assert set(fixed.guard_margins(spreads).values()) == {0.01}
    assert set(fixed.guard_margins(spreads)) == {"error", "violation", "latency", "missing"}
    assert ReleasePolicy(hold_split=True).guard_margins(spreads) == {}


def test_a_policy_says_whether_it_needs_the_past() -> None:
    assert ReleasePolicy().needs_baseline
    assert ReleasePolicy(margin_absolute=0.1).needs_baseline
    assert not ReleasePolicy(hold_split=True).needs_baseline
    assert not ReleasePolicy.model_validate({"margin_absolute": 0.1, "guards": {"margin": 0.1}}).needs_baseline
    assert ReleasePolicy.model_validate({"guards": {"margin": 0.1}}).needs_baseline


def test_its_traffic_is_its_rollouts_over_its_time() -> None:
    def made(*days: float) -> Baseline:
        return Baseline([BaselineRollout(int(day * DAY_NS), 1.0, {}) for day in days])

    assert made(3.0, 1.0, 1.5, 2.0, 2.5).per_day == pytest.approx(2.0)
    assert (made().per_day, made(1.0).per_day, made(1.0, 1.0).per_day, made().mean) == (None, None, None, None)


def test_a_spread_is_a_standard_deviation() -> None:
    tape = FakeTape()
    for number in range(8):
        rollout(tape, f"r{number}", 1.0 if number % 4 else None)
    assert read(tape).spreads()["missing"] == pytest.approx(sqrt(0.25 * 0.75))


# --- forecasts ---


def past(rate: float, rollouts: int = 1000, errors: float = 0.0, a_day: float = 500.0) -> Baseline:
    """Rollouts that succeed at this rate."""
    rng = Random(3)
    return Baseline([
        BaselineRollout(int(number * DAY_NS / a_day), float(rng.random() < rate), guards(rng.random() < errors))
        for number in range(rollouts)
    ])  # fmt: skip


def guards(failed: bool) -> dict[str, float | None]:
    return {"early_error": 1.0 - failed, "error": 1.0 - failed, "violation": 1.0}


def made(of: Baseline, policy: ReleasePolicy | None = None, salt: str = "s") -> Release:
    policy = policy or ReleasePolicy()
    mean = of.mean or 0.0
    return Release(
        id="x-1", resource="x", kind="prompt", stable="v1", candidate="v2", policy=policy, margin=policy.d(mean),
        guard_margins=policy.guard_margins(of.spreads()), salt=salt,
    )  # fmt: skip


def test_a_usual_success_rate_is_decided_and_a_rare_one_is_often_held() -> None:
    usual, again, rare = (forecast(made(of), of) for of in (past(0.7), past(0.7), past(0.05)))
    assert usual == again, "when it is asked again"
    assert usual.rollouts is not None
    assert usual.days is not None
    assert usual.promoted is not None
    assert rare.held is not None
    assert 1000 < usual.rollouts < 3000
    assert usual.days == pytest.approx(usual.rollouts / 500, rel=0.01)
    assert usual.promoted > 0.8
    assert rare.held > 0.4
    assert (usual.past, usual.mean) == (1000, past(0.7).mean)


def test_its_work_is_bounded() -> None:
    of, quick = past(0.3), past(0.9)
    found = forecast(made(of, ReleasePolicy(horizon=6000).model_copy(update={"alpha_promote": 1e-9})), of)
    assert found.played <= STEPS // 1000
    assert found.held == pytest.approx(1.0, abs=0.15)
    margin = ReleasePolicy(stages=[CanaryStage(split=0.5, rollouts=1)], margin_absolute=0.9)
    assert forecast(made(quick, margin), quick).played == MOST


def test_a_release_that_is_longer_than_what_is_played_foretells_nothing() -> None:
    of = past(0.7)
    release = made(of, ReleasePolicy(horizon=10_000_000, hold_split=True))
    found = forecast(release, of)
    assert found == Forecast(past=1000, mean=of.mean)
    assert forecast_text(release, found).startswith("No forecast: with this policy")


@pytest.mark.parametrize(
    ("held", "margin", "said"),
    [
        (0.1, 0.07, ": decided after about 12 rollouts; 6 of 60 simulated releases were held."),
        (1.0, 0.07, "held. A larger margin, a longer horizon or a reward that says more would decide more of them."),
        (
            1.0,
            0.0,
            "held. The margin is a share of the mean reward, which is near 0: set margin_absolute in the policy.",
        ),
    ],
)
def test_a_forecast_says_what_is_likely_and_what_to_do(held: float, margin: float, said: str) -> None:
    found = Forecast(played=60, past=100, mean=0.7, rollouts=12, held=held)
    text = forecast_text(made(past(0.7)).model_copy(update={"margin": margin}), found)
    assert text.endswith(said)
    assert (": held for a person after about 12 rollouts; 60 of 60" in text) == (held > 0.5)


def test_a_short_past_foretells_nothing() -> None:
    assert forecast(made(past(0.7)), past(0.7, ENOUGH - 1)) == Forecast(past=ENOUGH - 1)
    silent = Baseline([BaselineRollout(0, None, {}) for _ in range(100)])
    assert forecast(made(past(0.7)), silent) == Forecast(past=100)


def test_people_and_guards_that_never_varied_are_not_played() -> None:
    stages = [CanaryStage(split=0.5, approval=True, seconds=60)]
    policy = ReleasePolicy.model_validate({"stages": stages, "guards": {"latency": {"slo_s": 5}}})
    assert list(policy.guard_alphas) == ["early_error", "error", "violation", "latency", "missing"]
    played = played_policy(policy, past(0.7, errors=0.02))
    assert list(played.guard_alphas) == ["early_error", "error"]
    assert (played.stages[0].approval, played.stages[0].seconds) == (False, 0.0)
    found = forecast(made(past(0.7), policy), past(0.7))
    assert found.promoted is not None
    assert found.promoted > 0.8
