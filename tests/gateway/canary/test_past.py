"""What the stable version did before: which rollouts say something of it, and what margins follow."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
from fakes.judged import FakeTape

from penstock.gateway.canary.past import DAY_NS, Past, PastReader, PastRollout
from penstock.gateway.model.attributes import REPLAY_OF
from penstock.gateway.model.policy import Policy
from penstock.gateway.model.release import Pin
from penstock.gateway.model.rollout import Attempt, Rollout, RolloutStatus, Totals

NOW = 10 * 3600 * 10**9


def past(tape: FakeTape, version: str = "v1", names: list[str] | None = None, **policy: Any) -> Past:
    """As a release of x reads it."""
    reader = PastReader(tape, tape.pins, Policy.model_validate(policy), "x", version, NOW)
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
    assert past(tape).mean == 0.5
    tape.given = [Pin(resource="x", version="v1")]
    assert past(tape).mean == 0.25
    assert past(tape, "v2").mean == 0.625
    assert past(tape, names=[rehearsal]).mean is None


def test_what_may_still_get_a_reward_says_nothing_and_what_never_got_one_is_missing() -> None:
    tape = FakeTape()
    rollout(tape, "young", None, created_ns=NOW - 3599 * 10**9)
    rollout(tape, "old", None)
    rollout(tape, "gone", None, status=RolloutStatus.CANCELLED)
    rollout(tape, "failed", None, status=RolloutStatus.FAILED)
    assert [one.reward for one in past(tape).rollouts] == [None, 0.0]
    assert past(tape).spreads()["missing"] == 0.5
    rollout(tape, "good", 1.0)
    assert (past(tape).mean, past(tape, missing="worst").mean) == (0.5, pytest.approx(1 / 3))


def test_margins_of_guards_follow_from_how_much_they_varied() -> None:
    tape = FakeTape()
    for number in range(100):
        rollout(tape, f"r{number}", 1.0, errors=int(number < 10))
    spreads = past(tape).spreads()
    assert spreads == {"early_error": spreads["error"], "error": pytest.approx(0.3), "violation": 0.0, "missing": 0.0}
    assert Policy().guard_margins(spreads) == {"error": pytest.approx(0.045), "violation": 0.02, "missing": 0.02}
    assert Policy().guard_margins({}) == {"error": 0.02, "violation": 0.02, "missing": 0.02}
    fixed = Policy.model_validate({"guards": {"margin": 0.01, "latency": {"slo_s": 5}}})
    assert set(fixed.guard_margins(spreads).values()) == {0.01}
    assert set(fixed.guard_margins(spreads)) == {"error", "violation", "latency", "missing"}
    assert Policy(hold_split=True).guard_margins(spreads) == {}


def test_a_policy_says_whether_it_needs_the_past() -> None:
    assert Policy().needs_the_past
    assert Policy(margin_absolute=0.1).needs_the_past
    assert not Policy(hold_split=True).needs_the_past
    assert not Policy.model_validate({"margin_absolute": 0.1, "guards": {"margin": 0.1}}).needs_the_past
    assert Policy.model_validate({"guards": {"margin": 0.1}}).needs_the_past
    off = {name: {"alpha": 0} for name in ("early_error", "error", "violation", "missing")}
    assert not Policy.model_validate({"margin_absolute": 0.1, "guards": off}).needs_the_past


def test_its_traffic_is_its_rollouts_over_its_time() -> None:
    def made(*days: float) -> Past:
        return Past([PastRollout(int(day * DAY_NS), 1.0, {}) for day in days])

    assert made(3.0, 1.0, 1.5, 2.0, 2.5).per_day == pytest.approx(2.0)
    assert (made().per_day, made(1.0).per_day, made(1.0, 1.0).per_day, made().mean) == (None, None, None, None)


def test_a_spread_is_a_standard_deviation() -> None:
    tape = FakeTape()
    for number in range(8):
        rollout(tape, f"r{number}", 1.0 if number % 4 else None)
    assert past(tape).spreads()["missing"] == pytest.approx(sqrt(0.25 * 0.75))
