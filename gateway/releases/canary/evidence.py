"""The evidence on a release: pure, one observation at a time, the same bits on every machine.

*Test.* Rollouts come in the order of their assignment. Rollout i has the arm A (1: candidate), the probability pi of
that arm, fixed before the assignment, and a goodness Y in [0, 1]; m is a guess of Y made from the past only:

    psi = (A - pi) (Y - m)      E[psi | past] = w Delta,  w = pi (1 - pi),  Delta = E[Y | candidate] - E[Y | stable]

A bet (below, with sources and why the bits are the same everywhere) is against a hypothesis on Delta:

    harm             against Delta >= 0:   mean_k prod_i (1 - l psi)            l = min(lam_k, 0.9 / u)
                                           u = max((1 - pi)(1 - m), pi m)
    non-inferiority  against Delta <= -d:  mean_k prod_i (1 + l (psi + w d))    l = min(lam_k, 0.9 / v)
                                           v = max((1 - pi) m, pi (1 - m))
    superiority      is non-inferiority with d = 0

Guards are tested for harm; for a promotion each, with a margin of its own, is tested for non-inferiority as well. All
of these tests must say yes, so each may have the whole error probability: a candidate that is worse by its margin in
any one of them is promoted with that probability at most.

That holds whatever the past made of pi and m (a ramp may be steered by the results) and however rewards drift. It
needs the order of assignment: in the order of completion an arm whose failures end sooner looks worse than it is.

*Guess.* m = (2 * 1/2 + sum of past Y) / (2 + their number); with a group (the task that the rollout repeats) it is
(2 m + sum of the group's past Y) / (2 + their number). A wrong guess costs speed, never validity.

*Missing.* A rollout without a reward at its deadline bets nothing on the reward, or bets with 0 where the policy says
`worst`. The guard `missing` is the test on 1 (came) and 0 (did not).

*Early.* The guard `early_error` is the same test on the early look at a rollout, long before its outcome. It too takes
rollouts in their order, but runs ahead of the rest: it has a number of its own. Errors up to the outcome are the guard
`error`.

*Holdback.* Its rollouts are tested for harm anew, from wealth 1 (`watch`). A candidate that was good until then and is
worse from then on is seen sooner so, because bets that were lost while it was good do not count.

*Sample ratio.* Per stage, over rollouts whose reward counts: the Bayes factor of "the split is drawn from Beta(100 pi,
100 (1 - pi))" against "it is pi". Each candidate multiplies it by (100 pi + n1) / (100 + n) / pi, each stable by
(100 (1 - pi) + n0) / (100 + n) / (1 - pi). It too ever reaches 1/alpha with probability alpha at most (Lindon & Malek,
"Anytime-valid inference for multinomial count data", 2022).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from penstock.gateway.model.release_policy import EARLY, MISSING

# A test as a bet: wealth that grows only while a hypothesis is false. Pure; the same bits on every machine.
#
# A bettor stakes a share of its wealth, observation by observation, against a hypothesis; gains multiply the wealth.
# If the hypothesis holds, no bet wins on average, so the wealth is a supermartingale from 1, and by Ville's
# inequality (1939) it ever reaches 1/alpha with probability alpha at most, however often one looks. Betting on means
# of bounded values: Waudby-Smith & Ramdas, "Estimating means of bounded random variables by betting" (2024). Twelve
# bettors with fixed rates share the stake, because the best rate depends on an effect that nobody knows; their mean
# is the e-value:
#
#     mean_k prod_i (1 + l x_i)      l = min(lam_k, 0.9 / worst_i),   x_i >= -worst_i,   E[x_i | past] <= 0
#
# lam_k: 12 points, geometric from 0.03 to 3. Every factor is at least 0.1.
#
# *Bits.* Only + - * / and powers of two are used, which IEEE 754 rounds in one way. `log1p`, `lgamma` and vector units
# differ in the last place between machines, and `sum` between versions of Python (3.12 compensates). So a decision can
# be recomputed anywhere and agrees to the last bit.

RATES = (0.03, 0.0455973, 0.0693039, 0.105336, 0.160101, 0.243339, 0.369854, 0.562145, 0.854411, 1.29863, 1.9738, 3.0)
"""lam_k, as literals so that they are the same on every machine."""

_BLOCK = 64
_SCALE = 2.0**256
_READ = {-512: 2.0**-512, -256: 2.0**-256, 0: 1.0, 256: 2.0**256, 512: 2.0**512}


class Wealth:
    """Twelve bettors against one hypothesis. Wealth neither overflows nor underflows: each bettor's has its own power
    of two."""

    __slots__ = ("_bets", "_scales", "_shares", "_shifts")

    def __init__(self) -> None:
        self._shares = [1.0] * len(RATES)
        self._shifts = [0] * len(RATES)
        self._scales: list[float] | None = None
        self._bets = 0

    def bet(self, gain: float, worst: float) -> None:
        """Multiplies every share by 1 + l * `gain`; `worst` > 0 is the most that a gain can fall below 0."""
        limit = 0.9 / worst
        rates = RATES
        if limit < RATES[-1]:
            at = bisect_left(RATES, limit)
            rates = (*RATES[:at], *(limit,) * (len(RATES) - at))
        # Written out: less than half the time of a comprehension, and this is all that a rollout costs.
        a, b, c, d, e, f, g, h, i, j, k, m = self._shares
        ra, rb, rc, rd, re, rf, rg, rh, ri, rj, rk, rm = rates
        self._shares = [
            a * (1.0 + ra * gain),
            b * (1.0 + rb * gain),
            c * (1.0 + rc * gain),
            d * (1.0 + rd * gain),
            e * (1.0 + re * gain),
            f * (1.0 + rf * gain),
            g * (1.0 + rg * gain),
            h * (1.0 + rh * gain),
            i * (1.0 + ri * gain),
            j * (1.0 + rj * gain),
            k * (1.0 + rk * gain),
            m * (1.0 + rm * gain),
        ]
        self._bets += 1
        if not self._bets % _BLOCK:
            self._rescale()

    @property
    def value(self) -> float:
        """The e-value. Below 1e-150 it may read as 0 and above 1e150 as too small: the shares themselves are exact."""
        a, b, c, d, e, f, g, h, i, j, k, m = self._shares
        if self._scales is None:
            return (a + b + c + d + e + f + g + h + i + j + k + m) / 12.0
        ra, rb, rc, rd, re, rf, rg, rh, ri, rj, rk, rm = self._scales
        low = a * ra + b * rb + c * rc + d * rd + e * re + f * rf
        return (low + g * rg + h * rh + i * ri + j * rj + k * rk + m * rm) / 12.0

    @property
    def shares(self) -> list[tuple[float, int]]:
        """Wealth of each bettor as (x, n): x times 2**n."""
        return list(zip(self._shares, self._shifts, strict=True))

    def _rescale(self) -> None:
        """Factors lie within 0.1 and 5: a block of 64 moves a share by less than 2**213."""
        if min(self._shares) > 1 / _SCALE and max(self._shares) < _SCALE:
            return
        for k, share in enumerate(self._shares):
            if share >= _SCALE:
                self._shares[k], self._shifts[k] = share / _SCALE, self._shifts[k] + 256
            elif share <= 1 / _SCALE:
                self._shares[k], self._shifts[k] = share * _SCALE, self._shifts[k] - 256
        self._scales = [_READ.get(shift, _READ[512] if shift > 0 else 0.0) for shift in self._shifts]


class PairedTest:
    """The tests for replay, without assignment: both versions answer the same question, with scores in [0, 1].

    D = (candidate - incumbent + 1) / 2. Harm is against E[D] >= 1/2, non-inferiority against E[D] <= 1/2 - d/2.
    """

    def __init__(self, d: float) -> None:
        self._worst = 0.5 - d / 2
        self._harm, self._not_worse = Wealth(), Wealth()

    def add(self, candidate: float, incumbent: float) -> None:
        """Takes one pair of scores, each in [0, 1]."""
        difference = (candidate - incumbent + 1.0) / 2
        self._harm.bet(0.5 - difference, 0.5)
        self._not_worse.bet(difference - self._worst, self._worst)

    @property
    def harm(self) -> float:
        """e-value against "the candidate scores no lower"."""
        return self._harm.value

    @property
    def non_inferiority(self) -> float:
        """e-value against "the candidate scores lower by d or more"."""
        return self._not_worse.value


NO_MARGINS: Mapping[str, float] = {}
CONCENTRATION = 100.0
"""Concentration of the sample-ratio alternative around pi: the weight of its prior in rollouts."""


@dataclass(frozen=True, slots=True)
class CanaryObservation:
    """One rollout whose outcome is known, or was not known at its deadline."""

    number: int
    """Its place in the order of assignment; grows, with gaps where rollouts are left out."""
    stage: str
    """The stage in which it was assigned."""
    arm: int
    """0 stable, 1 candidate."""
    probability: float
    """Probability of the candidate's arm at the assignment; above 0 and below 1."""
    reward: float | None
    """The mapped reward in [0, 1]; None when none had come by the deadline."""
    guards: Mapping[str, float | None]
    """Goodness by guard, in [0, 1]; None or absent where it is not known."""
    group: str | None = None
    """The task that the rollout repeats; rewards of a group have their own history."""
    assigned_ns: int = 0
    """When it was assigned, nanoseconds since the epoch."""
    violations: int = 0
    """Hard violations seen in it."""


class RunningMean:
    """The number of values and their sum."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0

    @property
    def mean(self) -> float | None:
        """The mean of the values; None when there are none."""
        return self.total / self.count if self.count else None


class GuardTest:
    """One goodness: its arms, its past, the test for harm and, with a margin `d`, the test for non-inferiority."""

    __slots__ = ("_groups", "_harm", "_not_worse", "arms", "d")

    def __init__(self, d: float | None = None) -> None:
        self.arms = (RunningMean(), RunningMean())
        self.d = d or 0.0
        self._groups: dict[str, RunningMean] = {}
        self._harm = Wealth()
        self._not_worse = None if d is None else Wealth()

    @property
    def harm(self) -> float:
        """e-value against "the candidate is not worse"."""
        return self._harm.value

    @property
    def has_margin(self) -> bool:
        """True if the guard is tested for non-inferiority."""
        return self._not_worse is not None

    @property
    def non_inferiority(self) -> float:
        """e-value against "the candidate is worse by d or more"; 1 without a margin."""
        return 1.0 if self._not_worse is None else self._not_worse.value

    def add(self, arm: int, pi: float, value: float, group: str | None) -> float:
        """Bets on the value, then learns it; returns the guess that the bet was made with."""
        guess = self._guess(group)
        psi = (arm - pi) * (value - guess)
        above, below = (1.0 - pi) * (1.0 - guess), pi * guess
        self._harm.bet(-psi, above if above > below else below)
        if self._not_worse is not None:
            lost, gained = (1.0 - pi) * guess, pi * (1.0 - guess)
            self._not_worse.bet(psi + pi * (1.0 - pi) * self.d, lost if lost > gained else gained)
        self._learn(arm, value, group)
        return guess

    def _guess(self, group: str | None) -> float:
        stable, candidate = self.arms
        guess = (1.0 + (stable.total + candidate.total)) / (2 + stable.count + candidate.count)
        if group is not None and (own := self._groups.get(group)) is not None:
            return (2.0 * guess + own.total) / (2 + own.count)
        return guess

    def _learn(self, arm: int, value: float, group: str | None) -> None:
        tally = self.arms[arm]
        tally.count += 1
        tally.total += value
        if group is not None:
            own = self._groups.setdefault(group, RunningMean())
            own.count += 1
            own.total += value


class RewardTest(GuardTest):
    """The reward: a guard with a margin, and the sums behind its displayed interval."""

    __slots__ = ("scores", "squares", "weights")

    def __init__(self, d: float) -> None:
        super().__init__(d)
        self.scores = self.squares = self.weights = 0.0

    def add(self, arm: int, pi: float, value: float, group: str | None) -> float:
        guess = super().add(arm, pi, value, group)
        psi = (arm - pi) * (value - guess)
        self.scores += psi
        self.squares += psi * psi
        self.weights += pi * (1.0 - pi)
        return guess


class StageCount:
    """The assignments and outcomes of one stage, by arm, and the Bayes factor of its sample ratio."""

    __slots__ = ("_priors", "assigned", "bayes", "began_ns", "outcomes")

    def __init__(self, pi: float, began_ns: int) -> None:
        self._priors = (CONCENTRATION * (1.0 - pi), CONCENTRATION * pi)
        self.assigned = [0, 0]
        self.outcomes = [0, 0]
        self.bayes = 1.0
        self.began_ns = began_ns

    def add(self, arm: int, pi: float, came: bool) -> None:
        """Counts a rollout; the Bayes factor stops growing at 1e100."""
        self.assigned[arm] += 1
        if not came:
            return
        stable, candidate = self.outcomes
        predicted = (self._priors[arm] + self.outcomes[arm]) / (CONCENTRATION + (stable + candidate))
        if self.bayes < 1e100:
            self.bayes *= predicted / (pi if arm else 1.0 - pi)
        self.outcomes[arm] += 1


class CanaryEvidence:
    """All that has been seen of a release, in assignment order."""

    __slots__ = (
        "_holdback", "_worst", "assigned", "assigned_ns", "counts", "early", "guards", "missing", "number", "reward",
        "rewarded", "seen", "stages", "violations", "watch",
    )  # fmt: skip

    def __init__(
        self,
        d: float,
        guards: Sequence[str] = (),
        margins: Mapping[str, float] = NO_MARGINS,
        worst: bool = False,
        holdback: float | None = None,
        counts: str = "rollouts",
    ) -> None:
        """`d`: the margin, absolute, 0 <= d < 1. `guards`: names to test; `missing` is worked out here. `margins`:
        those of guards that are tested for non-inferiority too. `worst`: a missing reward counts as 0. `holdback`:
        probability of the candidate in the holdback; None where there is none. `counts`: the word for observations
        (`rollouts` or units)."""
        self._worst = worst
        self._holdback = holdback
        self.counts = counts
        self.watch = None if holdback is None else CanaryEvidence(d, guards, worst=worst, counts=counts)
        """Evidence of the holdback. Its rollouts count nowhere else here, except in `number` and `early`."""
        self.reward = RewardTest(_margin(d))
        self.guards = {name: GuardTest(_margin(margins[name]) if name in margins else None) for name in guards}
        self.stages: dict[str, StageCount] = {}
        self.assigned = [0, 0]
        self.violations = [0, 0]
        self.missing = [0, 0]
        """Rollouts without a reward: (stable, candidate)."""
        self.seen = self.rewarded = self.assigned_ns = 0
        self.number = self.early = -1
        """Numbers of the last rollouts that were counted with their outcome, and with their early look."""

    @property
    def books(self) -> tuple[CanaryEvidence, ...]:
        """This evidence, which tests the ramp, and that of the holdback, if the policy has one."""
        return (self,) if self.watch is None else (self, self.watch)

    @property
    def latest(self) -> CanaryEvidence:
        """The evidence of the holdback, once it has begun; else of the ramp."""
        return self.watch if self.watch is not None and self.watch.seen else self

    @property
    def harm(self) -> float:
        """e-value against "the candidate's reward is not lower"."""
        return self.reward.harm

    @property
    def non_inferiority(self) -> float:
        """e-value against "the candidate's reward is lower by d or more"."""
        return self.reward.non_inferiority

    def add(self, one: CanaryObservation) -> None:
        """Takes the next rollout. Raises `ValueError` for one out of order or bounds, of which nothing is kept."""
        _refuse(one, self.number)
        arm, pi, group = one.arm, one.probability, one.group
        self.number = one.number
        if self.watch is not None and pi == self._holdback:
            self.watch.add(one)
            return
        self.seen += 1
        self.assigned[arm] += 1
        self.violations[arm] += one.violations
        self.assigned_ns = max(self.assigned_ns, one.assigned_ns)
        if one.reward is None:
            self.missing[arm] += 1
        else:
            self.rewarded += 1
        reward = 0.0 if one.reward is None and self._worst else one.reward
        self._count(one, reward is not None)
        if reward is not None:
            self.reward.add(arm, pi, reward, group)
        for name, guard in self.guards.items():
            value = one.guards.get(name)
            if name == MISSING and value is None:
                value = 0.0 if one.reward is None else 1.0
            if value is not None:
                guard.add(arm, pi, value, group)

    def add_early(self, number: int, arm: int, probability: float, good: float) -> None:
        """Takes the early look at the next rollout. Raises `ValueError` for one out of order or bounds."""
        _refuse_place(number, self.early, arm, probability)
        self.early = number
        if self.watch is not None and probability == self._holdback:
            self.watch.add_early(number, arm, probability, good)
        else:
            self.guards[EARLY].add(arm, probability, good, None)

    def _count(self, one: CanaryObservation, judged: bool) -> None:
        count = self.stages.get(one.stage)
        if count is None:
            count = self.stages[one.stage] = StageCount(one.probability, one.assigned_ns)
        count.add(one.arm, one.probability, judged)


def _margin(d: float) -> float:
    if not 0.0 <= d < 1.0:
        raise ValueError(f"the margin d must be at least 0 and below 1, found {d}")
    return d


def _refuse_place(number: int, last: int, arm: int, probability: float) -> None:
    if number <= last:
        raise ValueError(f"rollout {number} comes after rollout {last}: observations must be in assignment order")
    if arm not in (0, 1) or not 0.0 < probability < 1.0:
        raise ValueError(
            f"rollout {number}: arm {arm} at probability {probability}: "
            "the arm must be 0 or 1 and the probability between them"
        )


def _refuse(one: CanaryObservation, last: int) -> None:
    _refuse_place(one.number, last, one.arm, one.probability)
    if one.reward is not None and not 0.0 <= one.reward <= 1.0:
        raise ValueError(f"rollout {one.number}: reward {one.reward} is not in [0, 1]: map it with Policy.goodness")
    for name, value in one.guards.items():
        if value is not None and not 0.0 <= value <= 1.0:
            raise ValueError(f"rollout {one.number}: guard {name} {value} is not in [0, 1]")


# -- the test of many compared answers --------------------------------------------------------------------------------

T = TypeVar("T")
PassVerdict = Literal["pass", "fail", "undecided"]


class ReorderBuffer(Generic[T]):
    """Results in the order in which their calls began, so that quick failures are not seen first."""

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, T] = {}

    def put(self, number: int, result: T) -> Iterator[T]:
        """Takes the result of this number, from 0; yields the results whose turn has come."""
        self._held[number] = result
        while self._next in self._held:
            self._next += 1
            yield self._held.pop(self._next - 1)


class PassTest:
    """Decides whether a candidate passes, from many compared answers.

    A replayed call is asked again of the candidate and of the incumbent, and both answers are scored against the
    recorded one. Models seldom say the same twice, so only what the candidate loses *against the incumbent* counts. The
    scores go into a `PairedTest`, in the order in which the calls were drawn:

    * **pass**: a loss of the margin or more is excluded (e >= 1/alpha), and the incumbent itself agrees often enough
      for such a loss to be seen at all;
    * **fail**: the candidate is worse (e >= 1/alpha) and its mean lower by more than the margin, or, when all calls are
      used, worse at all;
    * **undecided**: neither, when all calls or the budget are used. That shows no harm; it says nothing more.

    A candidate that is no worse fails with probability alpha at most, one that is worse by the margin passes with
    probability alpha at most, however early it ends.
    """

    def __init__(self, margin: float, alpha: float) -> None:
        self.calls = 0
        self.sums = [0.0, 0.0]
        """Sums of the scores of candidate and incumbent."""
        self._margin, self._limit = margin, 1 / alpha
        self._test = PairedTest(margin)

    def add(self, candidate: float, incumbent: float) -> None:
        """Takes one pair of scores, each in [0, 1]."""
        self.calls += 1
        self.sums[0] += candidate
        self.sums[1] += incumbent
        self._test.add(candidate, incumbent)

    @property
    def candidate(self) -> float:
        """Mean score of the candidate; 0 before the first call."""
        return self.sums[0] / self.calls if self.calls else 0.0

    @property
    def incumbent(self) -> float:
        """Mean score of the incumbent; 0 before the first call."""
        return self.sums[1] / self.calls if self.calls else 0.0

    @property
    def blind(self) -> bool:
        """True while the incumbent agrees so seldom that a loss of the margin could not be seen."""
        return self.incumbent <= self._margin

    def verdict(self, used_up: bool = False) -> PassVerdict | None:
        """The trial's result; None while it continues. `used_up`: whether no call is left."""
        if self._test.non_inferiority >= self._limit and not self.blind:
            return "pass"
        lower = self.candidate - self.incumbent < -self._margin
        if self._test.harm >= self._limit and (lower or used_up):
            return "fail"
        return "undecided" if used_up else None

    def figures(self) -> dict[str, float]:
        """Counts, means and e-values for the audit."""
        return {
            "calls": self.calls,
            "candidate": self.candidate,
            "incumbent": self.incumbent,
            "harm": self._test.harm,
            "non_inferiority": self._test.non_inferiority,
        }

    def sentence(self, verdict: PassVerdict, what: str = "next action", unit: str = "calls") -> str:
        """The verdict for a person. `what` was compared in each `unit`."""
        seen = (
            f"the candidate's {what} agrees with the recorded one in {self.candidate:.1%} of {self.calls} {unit}, "
            f"the incumbent's in {self.incumbent:.1%}"
        )
        harm, not_worse = self._test.harm, self._test.non_inferiority
        if verdict == "pass":
            return f"{seen}: a loss of {self._margin:g} is excluded (e = {not_worse:.4g} >= {self._limit:.4g})"
        if verdict == "fail":
            return f"{seen}: it is worse (e = {harm:.4g} >= {self._limit:.4g})"
        why = f"undecided (harm e = {harm:.4g}, non-inferiority e = {not_worse:.4g} of {self._limit:.4g})"
        if self.blind:
            why += "; with an incumbent that seldom agrees with itself a loss cannot be seen: use another judge"
        return f"{seen}: {why}; no harm is shown"
