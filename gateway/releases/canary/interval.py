"""An interval for the difference between the arms: for display only, no decision reads it.

An asymptotic confidence sequence (Waudby-Smith, Arbour, Sinha, Kennedy & Ramdas, "Time-uniform central limit theory and
asymptotic confidence sequences", 2021) over the scores psi of `gateway.releases.canary.evidence`; one side each:

    [S +- sqrt(2 (V r2 + 1) / r2 * ln(1 + sqrt(V r2 + 1) / (2 a)))] / W       S = sum psi, V = sum psi^2, W = sum w
    r2 = (-2 ln(2 a) + ln(-2 ln(2 a) + 1)) / V*                                a: error of one side

It may be looked at at any time, but it relies on a central limit: if successes or failures are rare, it is too narrow.
The betting tests do not have this weakness, so they decide. The interval uses `math.log`, whose last place differs
between machines, so it never enters an audit.
"""

from __future__ import annotations

import math

from penstock.gateway.releases.canary.evidence import RewardTest

TUNED_FOR = 50.0
"""V*: the sum of psi^2 at which the interval is narrowest; about 1,000 rollouts at 50 % with a success rate of 0.7."""


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
