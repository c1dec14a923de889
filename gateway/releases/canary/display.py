"""An interval and warnings, which people see beside the figures of a release. Pure; no decision reads them.

*Interval.* For the difference between the arms, an asymptotic confidence sequence (Waudby-Smith, Arbour, Sinha, Kennedy
& Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", 2021) over the scores psi of
`gateway.releases.canary.evidence`; one side each:

    [S +- sqrt(2 (V r2 + 1) / r2 * ln(1 + sqrt(V r2 + 1) / (2 a)))] / W       S = sum psi, V = sum psi^2, W = sum w
    r2 = (-2 ln(2 a) + ln(-2 ln(2 a) + 1)) / V*                                a: error of one side

It may be looked at at any time, but it relies on a central limit: if successes or failures are rare, it is too narrow.
The betting tests do not have this weakness, so they decide. The interval uses `math.log`, whose last place differs
between machines, so it never enters an audit.

*Warnings.* Missing rewards are the weak point of every canary: a candidate may look equal because its failures are
silent. A warning is given from 50 counted rollouts on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from penstock.gateway.model.release_policy import ReleasePolicy
from penstock.gateway.releases.canary.decision import FEW
from penstock.gateway.releases.canary.evidence import CanaryEvidence, RewardTest

TUNED_FOR: Final = 50.0
"""V*: the sum of psi^2 at which the interval is narrowest; about 1,000 rollouts at 50 % with a success rate of 0.7."""
MANY: Final = 0.1
"""Share of missing rewards from which they may hide a loss as large as a usual margin."""
GAP_LIMIT: Final = 12.0
"""Square of the difference between the arms in standard errors, from which a warning is given: about 3.5 of them,
because one looks often."""


def interval(reward: RewardTest, coverage: float = 0.95) -> tuple[float, float] | None:
    """(low, high) of candidate minus stable, in units of the reward mapped to [0, 1]; None before the first rollout."""
    if not reward.weights:
        return None
    side = (1.0 - coverage) / 2
    tuning = (-2 * math.log(2 * side) + math.log(-2 * math.log(2 * side) + 1)) / TUNED_FOR
    spread = reward.squares * tuning + 1
    reach = math.sqrt(2 * spread / tuning * math.log(1 + math.sqrt(spread) / (2 * side)))
    low, high = (reward.scores - reach) / reward.weights, (reward.scores + reach) / reward.weights
    return max(-1.0, low), min(1.0, high)


def warnings(policy: ReleasePolicy, evidence: CanaryEvidence) -> Iterator[str]:
    """The warnings, a sentence each, without a full stop."""
    if evidence.seen < FEW:
        return
    missing = evidence.seen - evidence.rewarded
    if policy.missing != "worst" and missing > MANY * evidence.seen:
        yield (
            f"{missing:,} of {evidence.seen:,} counted {policy.observation_noun} ({missing / evidence.seen:.0%}) "
            "have no reward, "
            'and it is not known how they went: if they are failures, start it with missing = "worst"; if their '
            "rewards come later, with a longer outcome_deadline_s"
        )
    if missing_reward_gap(evidence) > GAP_LIMIT:
        stable, candidate = (lost / max(1, n) for lost, n in zip(evidence.missing, evidence.assigned, strict=True))
        more = "more" if candidate > stable else "less"
        yield f"rewards are missing {more} often on the candidate: {candidate:.0%}, on the stable version {stable:.0%}"


def missing_reward_gap(evidence: CanaryEvidence) -> float:
    """Square of the difference between the shares of missing rewards, in standard errors; 0 while an arm is empty."""
    (n0, n1), (lost0, lost1) = evidence.assigned, evidence.missing
    share = (lost0 + lost1) / max(1, n0 + n1)
    if not n0 or not n1 or not 0.0 < share < 1.0:
        return 0.0
    return (lost1 / n1 - lost0 / n0) ** 2 / (share * (1 - share) * (1 / n0 + 1 / n1))
