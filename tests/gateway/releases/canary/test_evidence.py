"""The tests as bets: held against hand-made arithmetic, a reference in log space, and exact enumeration."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.releases.canary.decision import interval
from penstock.gateway.releases.canary.evidence import RATES, CanaryEvidence, CanaryObservation, PairedTest, Wealth

UNIT = st.floats(0, 1, allow_nan=False)
SPLIT = st.floats(0.001, 0.999)


def seen(number: int, arm: int, reward: float | None, pi: float = 0.5, **more: object) -> CanaryObservation:
    """An observation without guards unless given."""
    return CanaryObservation(number, str(more.pop("stage", "s")), arm, pi, reward, **({"guards": {}} | more))  # pyright: ignore[reportArgumentType]


def filled(observations: Sequence[CanaryObservation], d: float = 0.1, guards: Sequence[str] = ()) -> CanaryEvidence:
    """The evidence of all of them."""
    evidence = CanaryEvidence(d, guards)
    for one in observations:
        evidence.add(one)
    return evidence


def drawn(count: int, rates: tuple[float, float], pi: float = 0.5, seed: int = 1) -> list[CanaryObservation]:
    """Rollouts that succeed at the rate of their arm."""
    rng = random.Random(seed)
    arms = [int(rng.random() < pi) for _ in range(count)]
    return [seen(number, arm, float(rng.random() < rates[arm]), pi) for number, arm in enumerate(arms)]


def reference(observations: Sequence[CanaryObservation], d: float) -> tuple[float, float]:
    """(log harm, log non-inferiority) written down a second time, in log space."""
    harm, worse = [0.0] * 12, [0.0] * 12
    total, count = 0.0, 0
    for one in observations:
        if one.reward is None:
            continue
        pi, m = one.probability, (1 + total) / (2 + count)
        psi = (one.arm - pi) * (one.reward - m)
        u, v = max((1 - pi) * (1 - m), pi * m), max((1 - pi) * m, pi * (1 - m))
        for k, rate in enumerate(RATES):
            harm[k] += math.log1p(-min(rate, 0.9 / u) * psi)
            worse[k] += math.log1p(min(rate, 0.9 / v) * (psi + pi * (1 - pi) * d))
        total, count = total + one.reward, count + 1
    return mean_of_logs(harm), mean_of_logs(worse)


def mean_of_logs(logs: Sequence[float]) -> float:
    """Logarithm of the mean of what has these logarithms."""
    top = max(logs)
    return top + math.log(math.fsum(math.exp(one - top) for one in logs) / len(logs))


def log_of(wealth: Wealth) -> float:
    """Logarithm of an e-value, however large or small."""
    return mean_of_logs([math.log(share) + shift * math.log(2) for share, shift in wealth.shares])


def test_rates_are_geometric_from_three_hundredths_to_three() -> None:
    assert [pytest.approx(0.03 * 100 ** (k / 11), rel=1e-4) for k in range(12)] == list(RATES)


def test_three_rollouts_by_hand() -> None:
    """m is 1/2, then 2/3, then 1/2; psi is 1/4, 1/3, -1/4; nothing is clipped for rates up to 0.9 / (1/3) = 2.7."""
    evidence = filled([seen(0, 1, 1.0), seen(1, 0, 0.0), seen(2, 1, 0.0)], d=0.1)
    harm = [
        (1 - rate * Fraction(1, 4)) * (1 - min(rate, Fraction(27, 10)) * Fraction(1, 3)) * (1 + rate * Fraction(1, 4))
        for rate in map(Fraction, RATES)
    ]
    shift = Fraction(1, 40)
    better = [
        (1 + rate * (Fraction(1, 4) + shift))
        * (1 + min(rate, Fraction(27, 10)) * (Fraction(1, 3) + shift))
        * (1 + rate * (shift - Fraction(1, 4)))
        for rate in map(Fraction, RATES)
    ]
    assert evidence.harm == pytest.approx(float(sum(harm) / 12), rel=1e-12)
    assert evidence.non_inferiority == pytest.approx(float(sum(better) / 12), rel=1e-12)
    assert evidence.reward.scores == pytest.approx(1 / 3)
    assert evidence.reward.weights == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    ("rates", "pi"), [((0.7, 0.7), 0.05), ((0.7, 0.5), 0.5), ((0.1, 0.12), 0.2), ((0.3, 0.9), 0.9)]
)
def test_it_is_what_a_reference_in_log_space_says(rates: tuple[float, float], pi: float) -> None:
    observations = drawn(3000, rates, pi)
    harm, worse = reference(observations, 0.07)
    evidence = filled(observations, 0.07)
    assert math.log(evidence.harm) == pytest.approx(harm, rel=1e-9, abs=1e-9)
    assert math.log(evidence.non_inferiority) == pytest.approx(worse, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("arms", [(0.0, 1.0), (1.0, 0.0)])
def test_many_rollouts_neither_overflow_nor_underflow(arms: tuple[float, float]) -> None:
    observations = drawn(25_000, arms)
    evidence = filled(observations)
    harm, worse = reference(observations, 0.1)
    assert max(harm, worse) > 1500
    assert log_of(evidence.reward._harm) == pytest.approx(harm, rel=1e-9)
    assert evidence.reward._not_worse is not None
    assert log_of(evidence.reward._not_worse) == pytest.approx(worse, rel=1e-9)
    assert all(0 <= e < math.inf for e in (evidence.harm, evidence.non_inferiority))
    assert (evidence.harm > 1e150) == (harm > 0)


def test_wealth_that_was_out_of_range_comes_back() -> None:
    wealth = Wealth()
    for gain in (-0.25, 0.25):
        for _ in range(8000):
            wealth.bet(gain, 0.25)
    expected = [8000 * (math.log1p(-rate / 4) + math.log1p(rate / 4)) for rate in RATES]
    assert min(expected) < -6000
    for (share, shift), log in zip(wealth.shares, expected, strict=True):
        assert math.log(share) + shift * math.log(2) == pytest.approx(log, rel=1e-9)
    assert wealth.value == pytest.approx(math.exp(mean_of_logs(expected)))


@given(st.lists(st.tuples(st.integers(0, 1), SPLIT, UNIT, UNIT, st.sampled_from([None, "a", "b"])), max_size=70), UNIT)
def test_every_factor_is_positive(rollouts: list[tuple[int, float, float, float, str | None]], d: float) -> None:
    evidence = CanaryEvidence(min(d, 0.99), ("error",), {"error": min(d, 0.99)})
    tested = [wealth for one in (evidence.reward, evidence.guards["error"]) for wealth in (one._harm, one._not_worse)]
    before = [[1.0] * 12] * 4
    for number, (arm, pi, reward, error, group) in enumerate(rollouts):
        evidence.add(CanaryObservation(number, "s", arm, pi, reward, {"error": error}, group))
        after = [[share * 2.0**shift for share, shift in wealth.shares] for wealth in tested if wealth is not None]
        for old, new in zip(before, after, strict=True):
            assert all(b >= a * 0.0999 and b < a * 5 for a, b in zip(old, new, strict=True))
        before = after


@pytest.mark.parametrize("pi", [0.2, 0.5])
@pytest.mark.parametrize("d", [0.0, 0.2])
def test_under_the_boundary_null_the_mean_over_all_outcomes_is_one(pi: float, d: float) -> None:
    """Exact enumeration of four rollouts, at Delta = 0 for harm and at Delta = -d for non-inferiority."""
    success = 0.6
    harm = worse = total = 0.0
    for outcome in itertools.product([(0, 0), (0, 1), (1, 0), (1, 1)], repeat=4):
        observations = [seen(number, arm, float(good), pi) for number, (arm, good) in enumerate(outcome)]
        evidence = filled(observations, d)
        chance, chance_at_d = (
            math.prod((pi if a else 1 - pi) * (q if g else 1 - q) for a, g in outcome for q in [success - loss * a])
            for loss in (0.0, d)
        )
        harm += chance * evidence.harm
        worse += chance_at_d * evidence.non_inferiority
        total += chance
    assert (total, harm, worse) == (pytest.approx(1), pytest.approx(1, rel=1e-12), pytest.approx(1, rel=1e-12))


def test_swapping_arms_and_outcomes_turns_harm_into_superiority() -> None:
    observations = drawn(500, (0.7, 0.4))
    swapped = [seen(one.number, 1 - one.arm, one.reward) for one in observations]
    straight, mirrored = filled(observations, 0.0), filled(swapped, 0.0)
    assert straight.harm == pytest.approx(mirrored.non_inferiority)
    assert straight.non_inferiority == pytest.approx(mirrored.harm)


def test_the_same_rollouts_give_the_same_bits() -> None:
    """On every machine and Python: these were found with 3.11, 3.12 and 3.13."""
    observations = drawn(700, (0.7, 0.6), 0.2)
    assert filled(observations).harm.hex() == "0x1.0d385785fa047p+7"
    assert filled(observations).non_inferiority.hex() == "0x1.dae86b636818dp-3"


def test_a_missing_reward_bets_nothing_and_is_counted() -> None:
    evidence = filled([seen(0, 1, 1.0), seen(1, 0, 0.0)], guards=["missing"])
    before = evidence.harm
    evidence.add(seen(2, 1, None))
    assert evidence.harm == before
    assert evidence.missing == [0, 1]
    assert evidence.assigned == [1, 2]
    assert evidence.guards["missing"].arms[1].mean == 0.5


def test_the_guard_on_missing_outcomes_sees_that_one_arm_loses_them() -> None:
    rng = random.Random(4)
    observations = [
        seen(number, arm, None if rng.random() < (0.25 if arm else 0.02) else 1.0)
        for number in range(600)
        for arm in [rng.randrange(2)]
    ]
    assert filled(observations, guards=["missing"]).guards["missing"].harm > 1000
    assert filled([seen(o.number, 0, o.reward) for o in observations], guards=["missing"]).guards["missing"].harm < 3


@pytest.mark.parametrize("pi", [0.2, 0.5])
def test_sample_ratio_sees_that_a_quarter_of_an_arm_is_lost(pi: float) -> None:
    rng = random.Random(6)
    whole, lossy = CanaryEvidence(0.1), CanaryEvidence(0.1)
    for number in range(4000):
        arm = int(rng.random() < pi)
        whole.add(seen(number, arm, 1.0, pi))
        lossy.add(seen(number, arm, None if arm and rng.random() < 0.25 else 1.0, pi))
    assert whole.stages["s"].bayes < 1
    assert lossy.stages["s"].bayes > 100
    assert lossy.stages["s"].assigned == whole.stages["s"].assigned


def test_sample_ratio_is_the_dirichlet_multinomial_bayes_factor() -> None:
    pi, (stable, candidate) = 0.2, (70, 30)
    evidence = filled([seen(number, int(number % 10 < 3), 1.0, pi) for number in range(100)])
    assert evidence.stages["s"].outcomes == [stable, candidate]

    def beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    log = beta(100 * pi + candidate, 100 * (1 - pi) + stable) - beta(100 * pi, 100 * (1 - pi))
    assert math.log(evidence.stages["s"].bayes) == pytest.approx(
        log - candidate * math.log(pi) - stable * math.log(1 - pi)
    )


def test_a_history_by_task_sharpens_the_test() -> None:
    """Tasks that always or never succeed: with their history a few failures of the candidate are evidence enough."""
    rng = random.Random(2)
    observations: list[CanaryObservation] = []
    for number in range(1500):
        task, arm = rng.randrange(40), rng.randrange(2)
        good = task % 2 and not (arm and rng.random() < 0.2)
        observations.append(seen(number, arm, float(good), group=f"task-{task}"))
    alone = filled([seen(one.number, one.arm, one.reward) for one in observations])
    assert filled(observations).harm > 1000 * alone.harm


def test_guards_have_histories_of_their_own() -> None:
    rng = random.Random(9)
    evidence = CanaryEvidence(0.1, ["error", "latency"])
    for number in range(2000):
        arm = rng.randrange(2)
        guards = {"error": float(rng.random() > (0.2 if arm else 0.02)), "latency": None if number % 2 else 1.0}
        evidence.add(CanaryObservation(number, "s", arm, 0.5, 1.0, guards))
    assert evidence.guards["error"].harm > 1000
    assert evidence.guards["latency"].harm < 3
    assert sum(arm.count for arm in evidence.guards["latency"].arms) == 1000


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (seen(4, 1, 1.0), "rollout 4 comes after rollout 4"),
        (seen(3, 1, 1.0), "assignment order"),
        (seen(5, 2, 1.0), "arm 2"),
        (seen(5, 1, 1.0, 1.0), "probability 1.0"),
        (seen(5, 1, 1.0, math.nan), "probability nan"),
        (seen(5, 1, 1.5), "reward 1.5"),
        (seen(5, 1, math.nan), "reward nan"),
        (seen(5, 1, 1.0, guards={"error": -0.1}), "guard error -0.1"),
    ],
)
def test_what_is_out_of_order_or_bounds_is_refused_and_leaves_nothing(bad: CanaryObservation, message: str) -> None:
    evidence = filled([seen(4, 0, 1.0)])
    before = evidence.harm, evidence.seen, evidence.number
    with pytest.raises(ValueError, match=message):
        evidence.add(bad)
    assert (evidence.harm, evidence.seen, evidence.number) == before


@pytest.mark.parametrize("d", [-0.1, 1.0, math.nan])
def test_a_margin_out_of_bounds_is_refused(d: float) -> None:
    with pytest.raises(ValueError, match="margin d"):
        CanaryEvidence(d)


def test_the_interval_covers_the_difference_and_narrows() -> None:
    evidence = CanaryEvidence(0.1)
    assert interval(evidence.reward) is None
    widths: list[float] = []
    for one in drawn(8000, (0.7, 0.6), seed=8):
        evidence.add(one)
        if one.number in (100, 1000, 7999):
            low, high = interval(evidence.reward) or (1.0, -1.0)
            assert -1 <= low <= -0.1 <= high <= 1
            widths.append(high - low)
    assert widths[0] > widths[1] > widths[2]
    assert widths[2] < 0.1


def test_pairs_under_the_boundary_null_have_mean_one() -> None:
    d = 0.2
    harm = worse = 0.0
    for outcome in itertools.product([1.0, 0.0], repeat=5):
        equal, behind = PairedTest(d), PairedTest(d)
        for better in outcome:
            equal.add(better, 1 - better)
            behind.add(better, 1 - better)
        ones = sum(outcome)
        harm += equal.harm / 32
        worse += behind.non_inferiority * 0.4**ones * 0.6 ** (5 - ones)
    assert (harm, worse) == (pytest.approx(1), pytest.approx(1))


def test_pairs_tell_a_worse_candidate_from_an_equal_one() -> None:
    rng = random.Random(5)
    worse, equal = PairedTest(0.1), PairedTest(0.1)
    for _ in range(500):
        worse.add(float(rng.random() < 0.6), float(rng.random() < 0.9))
        equal.add(1.0, 1.0)
    assert worse.harm > 1000 > worse.non_inferiority
    assert equal.non_inferiority > 1000 > equal.harm
