"""Warnings to read before trusting the figures of a release. Pure; no decision follows from them.

Missing rewards are the weak point of every canary: a candidate may look equal because its failures are silent. A
warning is given from 50 counted rollouts on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.gateway.model.release_policy import ReleasePolicy
from penstock.gateway.releases.canary.decision import FEW
from penstock.gateway.releases.canary.evidence import CanaryEvidence

MANY: Final = 0.1
"""Share of missing rewards from which they may hide a loss as large as a usual margin."""
GAP_LIMIT: Final = 12.0
"""Square of the difference between the arms in standard errors, from which a warning is given: about 3.5 of them,
because one looks often."""


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
