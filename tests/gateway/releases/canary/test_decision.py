"""Verdicts: each rule, their order, people's part, and that many canaries keep their error rates."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice

import pytest
from fakes.mistakes import tells

from penstock.gateway.model.release_policy import CanaryStage, Guards, Holdback, ReleasePolicy
from penstock.gateway.releases.canary.decision import Canary, Verdict, decide, figures, hard_stop
from penstock.gateway.releases.canary.evidence import CanaryEvidence, CanaryObservation

NO_HOLDBACK = Holdback(rollouts=0)
WATCHED = ReleasePolicy().with_guards([])
PLAIN = WATCHED.model_copy(update={"holdback": NO_HOLDBACK})
HALF = PLAIN.model_copy(update={"stages": [CanaryStage(split=0.5, rollouts=10)]})


def rollouts(
    canary: Canary, rates: tuple[float, float], seed: int = 1, *, second_ns: int = 1_000_000_000, lost: float = 0.0
) -> Iterator[CanaryObservation]:
    """Rollouts as the stage of the canary assigns them, one a second, that succeed at the rate of their arm."""
    rng = random.Random(seed)
    number = 0
    while True:
        stage = canary.policy.ramp[canary.stage]
        arm = int(rng.random() < stage.split)
        reward = None if arm and rng.random() < lost else float(rng.random() < rates[arm])
        yield CanaryObservation(number, stage.name, arm, stage.split, reward, {}, assigned_ns=number * second_ns)
        number += 1


def played(canary: Canary, observations: Iterator[CanaryObservation]) -> list[Verdict]:
    """All verdicts up to the end."""
    verdicts: list[Verdict] = []
    while not canary.ended:
        verdicts.append(canary.step(next(observations)))
    return verdicts


def moves(verdicts: list[Verdict]) -> list[str]:
    """Actions other than going on."""
    return [verdict.action for verdict in verdicts if verdict.action != "continue"]


def run(policy: ReleasePolicy, d: float, observations: Iterable[CanaryObservation]) -> Iterator[Verdict]:
    """A verdict after every rollout, up to the one that ends the release."""
    canary = Canary(policy, d)
    for observation in observations:
        yield canary.step(observation)
        if canary.ended:
            return


def test_a_good_candidate_climbs_the_ramp_and_is_promoted() -> None:
    canary = Canary(PLAIN, 0.07)
    verdicts = played(canary, rollouts(canary, (0.7, 0.8)))
    assert moves(verdicts) == ["advance", "advance", "promote"]
    end = verdicts[-1]
    assert end.cause == "non-inferiority"
    assert end.reason == (
        f"no worse (margin 0.07): mean reward {end.figures['candidate.reward']:.3f} against "
        f"{end.figures['stable.reward']:.3f} after {end.number + 1} rollouts "
        f"({canary.evidence.assigned[1]} on the candidate)"
    )
    assert [one.figures["candidate.assigned"] for one in verdicts if one.action == "advance"] == [20, 100]


def test_a_bad_candidate_is_rolled_back_with_a_sentence_and_figures() -> None:
    canary = Canary(PLAIN, 0.07)
    end = played(canary, rollouts(canary, (0.7, 0.3)))[-1]
    assert (end.action, end.cause) == ("roll_back", "harm")
    assert end.reason.startswith(f"harm: e = {end.figures['harm']:.4g} >= 50 after {end.number + 1} rollouts (")
    assert end.figures == figures(canary.evidence)
    assert end.figures["candidate.reward"] < end.figures["stable.reward"]


def test_whoever_replays_the_rollouts_gets_the_same_verdicts() -> None:
    canary = Canary(PLAIN, 0.07)
    taken: list[CanaryObservation] = []

    def noted() -> Iterator[CanaryObservation]:
        for one in rollouts(canary, (0.7, 0.55)):
            taken.append(one)
            yield one

    verdicts = played(canary, noted())
    assert list(run(PLAIN, 0.07, taken)) == verdicts
    again = ReleasePolicy.model_validate_json(PLAIN.model_dump_json()).with_guards([])
    assert list(run(again, 0.07, taken)) == verdicts


def test_it_stops_at_the_first_rollout_that_decides() -> None:
    canary = Canary(HALF, 0.07)
    observations = list(islice(rollouts(canary, (0.9, 0.1)), 400))
    verdicts = list(run(HALF, 0.07, observations))
    evidence = CanaryEvidence(0.07)
    for one in observations[: len(verdicts) - 1]:
        evidence.add(one)
        assert evidence.harm < 50
    assert verdicts[-1].figures["harm"] >= 50


def test_a_guard_rolls_back_though_the_reward_is_fine() -> None:
    rng = random.Random(3)
    policy = ReleasePolicy(stages=[CanaryStage(split=0.5)], holdback=NO_HOLDBACK)
    observations = (
        CanaryObservation(n, "50%", arm, 0.5, 1.0, {"error": float(rng.random() > 0.3 * arm), "violation": 1.0})
        for n in range(2000)
        for arm in [rng.randrange(2)]
    )
    end = list(run(policy, 0.0, observations))[-1]
    assert (end.action, end.cause) == ("roll_back", "guard:error")
    assert end.figures["guard.error"] >= 100 > end.figures["guard.violation"]


def test_a_candidate_whose_calls_all_fail_is_rolled_back_by_a_handful_of_early_looks() -> None:
    """Nothing was counted with its outcome yet: no reward has come."""
    for seed in range(20):
        canary, rng, number, verdict = Canary(ReleasePolicy(), 0.07), random.Random(seed), 0, None
        while verdict is None:
            number += 1
            arm = int(rng.random() < 0.05)
            verdict = canary.step_early(number, arm, 0.05, 1.0 - arm)
        assert (canary.verdict.action, canary.verdict.cause) == ("roll_back", "guard:early_error")
        assert canary.verdict is verdict
        figured = canary.verdict.figures
        assert figured["candidate.early"] <= 8
        assert (figured["candidate.early_error"], figured["stable.early_error"], figured["seen"]) == (0, 1, 0)
        looked = figured["candidate.early"] + figured["stable.early"]
        assert f"after an early look at {looked} rollouts" in canary.verdict.reason
        with pytest.raises(ValueError, match=f"rollout {number + 1}: the release has ended: guard early_error"):
            canary.step_early(number + 1, 0, 0.05, 1.0)


def test_early_errors_that_both_arms_have_roll_nothing_back() -> None:
    rolled_back = 0
    for seed in range(100):
        canary, rng = (
            Canary(ReleasePolicy(stages=[CanaryStage(split=0.5)], holdback=NO_HOLDBACK), 0.07),
            random.Random(seed),
        )
        looks = ((n, rng.randrange(2), 0.5, float(rng.random() > 0.3)) for n in range(500))
        rolled_back += any(canary.step_early(*look) for look in looks)
    assert rolled_back <= 3


def test_early_looks_are_in_order_and_bounds() -> None:
    canary = Canary(ReleasePolicy(), 0.07)
    canary.step_early(5, 1, 0.5, 1.0)
    before = figures(canary.evidence)
    for look, message in (((5, 1, 0.5, 1.0), "rollout 5 comes after rollout 5"), ((6, 1, 1.0, 1.0), "probability 1.0")):
        with pytest.raises(ValueError, match=message):
            canary.step_early(*look)
    assert figures(canary.evidence) == before


def promotable(canary: Canary, errors: tuple[float, float], seed: int) -> str:
    """How a canary with equal rewards ends, whose arms have these rates of errors."""
    rng, number = random.Random(seed), 0
    while not canary.ended:
        number, arm = number + 1, rng.randrange(2)
        guards = {"error": float(rng.random() >= errors[arm]), "violation": 1.0}
        canary.step(CanaryObservation(number, "50%", arm, 0.5, float(rng.random() < 0.7), guards))
    return canary.verdict.action


def test_a_candidate_with_more_errors_is_not_promoted_though_its_reward_is_equal() -> None:
    """From 1 to 3 %, which is the margin of the guard, and to 5 %; the promise is at most 5 % of promotions."""
    policy = ReleasePolicy(stages=[CanaryStage(split=0.5)], holdback=NO_HOLDBACK, horizon=3000)
    for rate in (0.03, 0.05):
        ends = [promotable(Canary(policy, 0.1), (0.01, rate), seed) for seed in range(12)]
        assert ends.count("promote") <= 2
    ends = [promotable(Canary(policy, 0.1), (0.01, 0.01), seed) for seed in range(6)]
    assert ends.count("promote") >= 4


def test_a_promotion_waits_for_every_guard_and_says_so() -> None:
    policy = ReleasePolicy(stages=[CanaryStage(split=0.5)], holdback=NO_HOLDBACK, horizon=400)
    canary, rng = Canary(policy, 0.3), random.Random(3)
    for number in range(400):
        guards = {"error": 1.0, "violation": None if number < 399 else 1.0}
        canary.step(CanaryObservation(number, "50%", rng.randrange(2), 0.5, float(rng.random() < 0.7), guards))
    verdict = canary.verdict
    assert (verdict.action, verdict.cause) == ("hold", "horizon")
    assert verdict.figures["non_inferiority"] > 20
    assert verdict.figures["guard.violation.non_inferiority"] < 20
    assert "guard violation e = 1" in verdict.reason
    assert "guard early_error" not in verdict.reason
    canary = Canary(policy.model_copy(update={"horizon": 6000}), 0.3, margins={"error": 0.1, "violation": 0.1})
    assert promotable(canary, (0.0, 0.0), 1) == "promote"
    assert tells(canary.verdict.reason, "no worse (margin 0.3): mean reward", "all 2 guards hold after")
    assert canary.evidence.seen < 400


def test_a_hard_violation_on_the_candidate_ends_it_at_once() -> None:
    canary = Canary(HALF, 0.07)
    assert canary.step(CanaryObservation(0, "50%", 0, 0.5, 1.0, {}, violations=3)).action == "continue"
    verdict = canary.step(CanaryObservation(1, "50%", 1, 0.5, 1.0, {}, violations=1))
    assert (verdict.action, verdict.cause, verdict.reason) == ("roll_back", "violations", hard_stop(1))
    assert tells(verdict.reason, "1 hard violations")
    assert hard_stop(0) is None


def test_violations_come_before_harm_and_harm_before_a_lopsided_split() -> None:
    evidence = CanaryEvidence(0.07)
    for number in range(199):
        arm = number % 4 != 0
        evidence.add(CanaryObservation(number, "50%", int(arm), 0.5, float(not arm), {}))
    lopsided = decide(HALF, 0, evidence)
    assert (lopsided.cause, lopsided.figures["srm.50%"] > 100) == ("harm", True)
    evidence.add(CanaryObservation(199, "50%", 1, 0.5, 0.0, {}, violations=1))
    assert decide(HALF, 0, evidence).cause == "violations"


def test_a_lopsided_split_holds_and_can_be_set_aside() -> None:
    canary = Canary(HALF.model_copy(update={"alpha_promote": 1e-9}), 0.07)
    observations = iter([CanaryObservation(n, "50%", int(n % 4 != 0), 0.5, 1.0, {}) for n in range(1000)])
    held = played(canary, observations)[-1]
    assert (held.action, held.cause) == ("hold", "srm:50%")
    assert tells(held.reason, "rollouts with a reward", "candidate")
    with pytest.raises(ValueError, match=r"has ended: sample ratio"):
        canary.step(next(observations))
    with pytest.raises(ValueError, match="nothing is left to approve"):
        canary.approve()
    assert canary.resume().action == "continue"
    assert canary.step(next(observations)).action == "continue"
    with pytest.raises(ValueError, match="only a release that is held"):
        canary.resume()


def test_a_release_without_rewards_is_held() -> None:
    verdicts = list(run(HALF, 0.1, (CanaryObservation(n, "50%", n % 2, 0.5, None, {}) for n in range(1000))))
    assert len(verdicts) == 50
    end = verdicts[-1]
    assert (end.cause, tells(end.reason, "50 of 50 rollouts", "more than 50%")) == ("missing", True), end.reason


def silent_failures(canary: Canary, rates: tuple[float, float], seed: int) -> Iterator[CanaryObservation]:
    """Rollouts of which failures give no reward."""
    for one in rollouts(canary, rates, seed):
        guards = {"error": 1.0, "violation": 1.0}
        yield CanaryObservation(one.number, one.stage, one.arm, one.probability, one.reward or None, guards)


def test_failures_that_are_silent_in_both_arms_are_seen_where_missing_is_the_worst() -> None:
    """Whoever gets a reward has succeeded: left out, the arms look equal however much one fails."""
    policy = ReleasePolicy(
        stages=[CanaryStage(split=0.5, rollouts=10)],
        missing_limit=1.0,
        guards=Guards(margin=0.3),
        horizon=3000,
        holdback=NO_HOLDBACK,
    ).with_guards(["early_error", "error", "violation"])
    ends: dict[str, list[str]] = {"leave_out": [], "worst": []}
    for missing, found in ends.items():
        for seed in range(10):
            canary = Canary(policy.model_copy(update={"missing": missing}), 0.1, srm_alpha=1e-9)
            found.append(played(canary, silent_failures(canary, (0.7, 0.55), seed))[-1].action)
    assert ends["leave_out"].count("promote") == 10
    assert ends["worst"].count("roll_back") >= 9


def test_where_missing_is_the_worst_it_is_still_known_what_is_missing() -> None:
    policy = HALF.model_copy(update={"missing": "worst", "alpha": 1e-9})
    canary = Canary(policy, 0.1)
    held = played(canary, (CanaryObservation(n, "50%", n % 2, 0.5, None, {}) for n in range(1000)))[-1]
    assert (held.cause, held.figures["candidate.missing"], held.figures["candidate.reward"]) == ("missing", 25, 0.0)


def test_outcomes_that_only_the_candidate_loses_roll_it_back() -> None:
    policy = ReleasePolicy(stages=[CanaryStage(split=0.5)], holdback=NO_HOLDBACK)
    canary = Canary(policy, 0.07, srm_alpha=1e-9)
    end = played(canary, rollouts(canary, (0.7, 0.7), lost=0.3))[-1]
    assert (end.action, end.cause) == ("roll_back", "guard:missing")


def test_the_horizon_holds_and_resuming_goes_on_past_it() -> None:
    policy = HALF.model_copy(update={"horizon": 300, "alpha": 1e-9, "alpha_promote": 1e-9})
    canary = Canary(policy, 0.07)
    observations = rollouts(canary, (0.7, 0.66))
    held = played(canary, observations)[-1]
    assert (held.action, held.cause, held.number) == ("hold", "horizon", 299)
    assert tells(held.reason, "undecided at the horizon, after 300 rollouts", "neither harm", "a loss of 0.07 or more")
    assert canary.resume().action == "continue"
    assert canary.step(next(observations)).action == "continue"


def test_a_stage_that_wants_approval_waits_for_it() -> None:
    policy = PLAIN.model_copy(
        update={"stages": [CanaryStage(split=0.2, rollouts=5, approval=True), CanaryStage(split=0.5)]}
    )
    canary = Canary(policy, 0.07)
    observations = rollouts(canary, (0.7, 0.8))
    while (verdict := canary.step(next(observations))).cause != "approval":
        assert verdict.action == "continue"
    assert tells(verdict.reason, "stage 20% is complete", "a person must approve")
    assert canary.step(next(observations)).cause == "approval"
    assert canary.stage == 0
    approved = canary.approve()
    assert (approved.action, approved.number, canary.stage) == ("advance", canary.evidence.number, 1)
    assert played(canary, observations)[-1].action == "promote"


def test_the_last_stage_may_want_approval_too_and_harm_does_not_wait_for_it() -> None:
    policy = PLAIN.model_copy(update={"stages": [CanaryStage(split=0.5, approval=True)]})
    canary = Canary(policy, 0.3)
    good = rollouts(canary, (0.7, 0.8))
    while (verdict := canary.step(next(good))).cause != "approval":
        pass
    assert verdict.reason.startswith("no worse (margin 0.3): mean reward ")
    start = canary.evidence.number + 1
    bad = (CanaryObservation(start + n, "50%", n % 2, 0.5, float(not n % 2), {}) for n in range(1000))
    assert played(canary, bad)[-1].cause == "harm"


def test_an_early_approval_counts_when_the_stage_is_complete() -> None:
    canary = Canary(HALF.model_copy(update={"stages": [CanaryStage(split=0.5, rollouts=3, approval=True)]}), 0.3)
    assert canary.approve().action == "continue"
    assert played(canary, rollouts(canary, (0.7, 0.9)))[-1].action == "promote"


def test_a_stage_lasts_its_seconds() -> None:
    stages = [CanaryStage(split=0.2, rollouts=1, seconds=120), CanaryStage(split=0.5, seconds=600)]
    canary = Canary(PLAIN.model_copy(update={"stages": stages}), 0.5)
    verdicts = played(canary, rollouts(canary, (0.7, 0.8)))
    assert [verdict.number for verdict in verdicts if verdict.action != "continue"] == [120, 721]


def test_rollouts_of_an_earlier_stage_do_not_count_for_a_later_one() -> None:
    stages = [CanaryStage(split=0.2, rollouts=2), CanaryStage(split=0.5, rollouts=2)]
    canary = Canary(PLAIN.model_copy(update={"stages": stages}), 0.5)
    late = [CanaryObservation(n, "20%", int(n % 5 == 4), 0.2, 1.0, {}) for n in range(60)]
    assert moves([canary.step(one) for one in late]) == ["advance"]
    assert canary.evidence.assigned[1] == 12
    assert canary.evidence.non_inferiority > 20


def test_only_rewarded_rollouts_complete_a_stage() -> None:
    canary = Canary(
        PLAIN.model_copy(update={"stages": [CanaryStage(split=0.3), CanaryStage(split=0.5)]}), 0.07, srm_alpha=1e-9
    )
    observations = rollouts(canary, (0.7, 0.8), lost=0.4)
    while (verdict := canary.step(next(observations))).action != "advance":
        pass
    assert canary.evidence.stages["30%"].outcomes[1] == 20
    assert verdict.figures["candidate.assigned"] > 25


def test_an_experiment_with_a_held_split_is_never_promoted() -> None:
    policy = PLAIN.model_copy(update={"hold_split": True})
    canary = Canary(policy, policy.d(0.7))
    verdicts = played(canary, rollouts(canary, (0.5, 0.9)))
    assert moves(verdicts) == ["advance", "advance", "hold"]
    assert verdicts[-1].figures["d"] == 0.0
    assert verdicts[-1].figures["non_inferiority"] > 1000


def test_many_identical_candidates_are_rolled_back_no_more_often_than_promised() -> None:
    """A look after every rollout: the promise is 2 %; a t-test looked at as often would fail this test by far."""
    policy = PLAIN.model_copy(update={"hold_split": True})
    rolled_back = peeked = 0
    for seed in range(80):
        canary = Canary(policy, 0.0)
        arms = [[0.0, 0.0], [0.0, 0.0]]
        crossed = False
        for one in islice(rollouts(canary, (0.7, 0.7), 1000 + seed), 1000):
            count = arms[one.arm]
            count[0] += 1
            count[1] += one.reward or 0.0
            crossed = crossed or _t_test_alarms(arms)
            if not canary.ended:
                canary.step(one)
        rolled_back += canary.ended
        peeked += crossed
    assert rolled_back <= 4
    assert peeked > 12


def _t_test_alarms(arms: list[list[float]]) -> bool:
    (n0, s0), (n1, s1) = arms
    if n0 < 20 or n1 < 20:
        return False
    p0, p1 = s0 / n0, s1 / n1
    return p1 - p0 < -1.645 * (p0 * (1 - p0) / n0 + p1 * (1 - p1) / n1) ** 0.5


def test_many_worse_candidates_are_promoted_no_more_often_than_promised() -> None:
    ends: list[str] = []
    for seed in range(30):
        canary = Canary(HALF, 0.15)
        ends.append(played(canary, rollouts(canary, (0.7, 0.55), 5000 + seed))[-1].action)
    assert ends.count("promote") <= 4
    assert ends.count("roll_back") >= 25
