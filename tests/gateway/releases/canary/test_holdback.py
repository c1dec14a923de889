"""The holdback: when no loss was found, nearly all rollouts get the candidate, and harm still takes it back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from fakes.trials import Trial, steady

from penstock.gateway.model.release_policy import (
    CONSTANTS,
    HOLDBACK_ALPHA,
    CanaryStage,
    Guards,
    Holdback,
    ReleasePolicy,
)
from penstock.gateway.releases.canary.decision import Canary, Verdict, figures
from penstock.gateway.releases.canary.evidence import CanaryObservation
from penstock.gateway.releases.canary.verification import verify

ROLLOUTS = 600
POLICY = ReleasePolicy(
    stages=[CanaryStage(split=0.5, rollouts=10)],
    guards=Guards(margin=0.3),
    holdback=Holdback(rollouts=ROLLOUTS),
)
GUARDED: dict[str, float | None] = {"error": 1.0, "violation": 1.0}
Rates = Callable[[bool], tuple[float, float]]
"""Success rates of (stable, candidate), in the holdback or before it."""


@pytest.fixture(autouse=True)
def a_large_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rollouts are needed to see harm."""
    monkeypatch.setitem(CONSTANTS["holdback"], "share", 0.2)


def rollouts(canary: Canary, rates: Rates, seed: int = 1) -> Iterator[CanaryObservation]:
    """Rollouts as the canary assigns them."""
    rng, number = random.Random(seed), 0
    while True:
        number, step = number + 1, canary.policy.ramp[canary.stage]
        arm = int(rng.random() < step.split)
        reward = float(rng.random() < rates(step.name == "holdback")[arm])
        yield CanaryObservation(number, step.name, arm, step.split, reward, GUARDED)


def until(canary: Canary, observations: Iterator[CanaryObservation], enough: Callable[[Verdict], bool]) -> Verdict:
    """The first verdict that is enough."""
    while not enough(verdict := canary.step(next(observations))):
        pass
    return verdict


def ended(canary: Canary, rates: Rates, seed: int = 1) -> Verdict:
    """How it ends, holdback and all."""
    return until(canary, rollouts(canary, rates, seed), lambda _: canary.ended)


def good(_: bool) -> tuple[float, float]:
    """Equal all the time."""
    return (0.7, 0.7)


def good_then_worse(later: bool) -> tuple[float, float]:
    """Equal at first; in the holdback it loses most."""
    return (0.7, 0.2 if later else 0.7)


def test_what_would_be_promoted_is_held_back_first_and_promoted_when_nothing_happens() -> None:
    canary = Canary(POLICY, 0.3)
    observations = rollouts(canary, good)
    moved = until(canary, observations, lambda verdict: verdict.action != "continue")
    assert (moved.action, moved.cause, canary.stage, canary.ended) == ("advance", "non-inferiority", 1, False)
    assert not any(name.startswith("holdback.") for name in moved.figures)
    seen = canary.evidence.seen
    promoted = until(canary, observations, lambda _: canary.ended)
    assert (promoted.action, promoted.cause) == ("promote", "holdback")
    assert (canary.evidence.seen, promoted.figures["holdback.seen"]) == (seen, ROLLOUTS)
    on_it = int(promoted.figures["holdback.candidate.assigned"])
    assert promoted.reason == f"holdback: no harm after {ROLLOUTS} rollouts ({on_it} on the candidate) in the holdback"
    assert on_it / ROLLOUTS == pytest.approx(0.8, abs=0.06)


def test_what_turns_bad_in_the_holdback_is_rolled_back_by_its_own_evidence() -> None:
    canary = Canary(POLICY, 0.3)
    end = ended(canary, good_then_worse)
    assert (end.action, end.cause) == ("roll_back", "harm")
    limit = 1 / (POLICY.alpha * POLICY.holdback_scale)
    assert end.figures["holdback.harm"] >= limit > 1 / POLICY.alpha > end.figures["harm"]
    assert end.reason.startswith(f"harm: e = {end.figures['holdback.harm']:.4g} >= {limit:.4g} after ")
    assert end.reason.endswith(" in the holdback")


def test_the_error_probabilities_of_the_holdback_add_up_to_its_own() -> None:
    every = [POLICY.alpha, *POLICY.guard_alphas.values()]
    assert sum(alpha * POLICY.holdback_scale for alpha in every) == pytest.approx(HOLDBACK_ALPHA)


def test_nearly_all_that_are_good_are_promoted_and_most_that_turn_bad_are_caught() -> None:
    equal = [ended(Canary(POLICY, 0.3), good, seed).action for seed in range(30)]
    assert equal.count("roll_back") <= 2
    worse = [ended(Canary(POLICY, 0.3), good_then_worse, seed).action for seed in range(15)]
    assert worse.count("roll_back") >= 14


def test_errors_that_begin_in_the_holdback_are_seen_early() -> None:
    canary = Canary(POLICY, 0.3)
    observations, number = rollouts(canary, good), 0
    while canary.stage == 0:
        one = next(observations)
        assert canary.step_early(one.number, one.arm, one.probability, 1.0) is None
        canary.step(one)
        number = one.number
    verdict, rng = None, random.Random(2)
    while verdict is None:
        number, arm = number + 1, int(rng.random() < 0.8)
        verdict = canary.step_early(number, arm, 0.8, 1.0 - arm)
    assert (verdict.action, verdict.cause) == ("roll_back", "guard:early_error")
    assert verdict.figures["holdback.candidate.early"] < 60
    assert verdict.reason.endswith(" in the holdback")


def test_rollouts_from_before_the_holdback_still_count_where_they_belong() -> None:
    """They were assigned before, and their outcomes come later; enough harm in them rolls back too."""
    canary = Canary(POLICY, 0.3)
    observations = rollouts(canary, good)
    until(canary, observations, lambda _: canary.stage == 1)
    number = canary.evidence.number
    late = (CanaryObservation(number + n, "50%", n % 2, 0.5, float(not n % 2), GUARDED) for n in range(1, 2000))
    end = until(canary, late, lambda _: canary.ended)
    assert (end.cause, canary.evidence.watch is not None and canary.evidence.watch.seen) == ("harm", 0)
    assert end.reason.endswith(" on the candidate)")


def test_rewards_that_stop_in_the_holdback_hold_it_and_a_hard_violation_ends_it() -> None:
    canary = Canary(POLICY, 0.3, srm_alpha=1e-9)
    observations = rollouts(canary, good)
    until(canary, observations, lambda _: canary.stage == 1)
    violated = replace(next(observations), arm=1, violations=1)
    silent = (replace(one, reward=None) for one in observations)
    other = Canary(POLICY, 0.3)
    until(other, rollouts(other, good), lambda _: other.stage == 1)
    assert other.step(violated).cause == "violations"
    held = until(canary, silent, lambda _: canary.ended)
    assert held.cause in ("missing", "guard:missing")


def test_without_a_holdback_and_in_a_plain_experiment_there_is_none() -> None:
    none = POLICY.model_copy(update={"holdback": Holdback(rollouts=0)})
    assert ended(Canary(none, 0.3), good).cause == "non-inferiority"
    assert [one.name for one in POLICY.model_copy(update={"hold_split": True}).ramp] == ["50%"]
    assert figures(Canary(none, 0.3).evidence).keys() == figures(Canary(POLICY, 0.3).evidence).keys()


def whole(rates: tuple[float, float]) -> Trial:
    """A release through its holdback, which has these rates; a person looks in between."""
    trial = Trial.of(POLICY, margin=0.3).prepare()
    while trial.release.step == 0:
        trial.run(1, steady(0.7, 0.7, trial.release.assigned))
    assert (trial.release.stage, trial.release.split) == ("canary", 0.8)
    return trial.run(ROLLOUTS, steady(*rates))


@pytest.mark.parametrize(("rates", "stage"), [((0.7, 0.7), "promoted"), ((0.7, 0.1), "rolled_back")])
def test_a_release_with_a_holdback_is_verified_bit_for_bit(rates: tuple[float, float], stage: str) -> None:
    trial = whole(rates)
    assert trial.release.stage == stage
    assert trial.assigned[-1].stage == "holdback"
    assert list(verify(trial.release, trial.assigned, trial.seen, trial.audit)) == []
    at = next(n for n, one in enumerate(trial.seen) if trial.assigned[n].stage == "holdback" and one.reward == 1.0)
    trial.seen[at] = trial.seen[at].model_copy(update={"reward": 0.0})
    assert list(verify(trial.release, trial.assigned, trial.seen, trial.audit))
