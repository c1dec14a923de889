"""The scenarios of simulated releases (`bench.releases`), and the promises for each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bench.release_users import Way
from penstock.gateway.model.release_policy import (
    SRM_ALPHA,
    CanaryStage,
    Holdback,
    ReleasePolicy,
    freeze_policy,
    thaw_policy,
)

HORIZON = 6000
RATE = 0.7

NO_HOLDBACK = Holdback(rollouts=0)
PLAIN = ReleasePolicy(hold_split=True, horizon=HORIZON).with_guards([]).model_copy(update={"alpha": 0.05})
HALF = PLAIN.model_copy(update={"stages": [CanaryStage(split=0.5)]})
ERRORS = ReleasePolicy(hold_split=True, horizon=HORIZON)
WHOLE = ReleasePolicy(horizon=HORIZON, holdback=NO_HOLDBACK)
WORST = WHOLE.model_copy(update={"missing": "worst"})
HELD_BACK = ReleasePolicy(horizon=HORIZON)
HELD_BACK_MORE = thaw_policy(
    freeze_policy(HELD_BACK) | {"holdback": {"share": 0.1, "rollouts": 2000}}, ReleasePolicy.model_validate
)


@dataclass(frozen=True)
class Scenario:
    """The properties of a simulated release and its rollouts."""

    policy: ReleasePolicy = PLAIN
    srm_alpha: float = SRM_ALPHA
    rates: tuple[float, float] = (RATE, RATE)
    """Mean reward of (stable, candidate)."""
    errors: tuple[float, float] | None = None
    """Error rates of (stable, candidate), if there is a guard on them."""
    silent: float = 0.0
    """Share of the failures without a reward."""
    drift: float = 0.0
    """Share of both rates that is lost from the first to the last rollout."""
    worse_from: int | None = None
    """The rollout from which the candidate's rate is lower by `worse_by`, a share of it."""
    worse_by: float = 0.3
    checks: int = 1
    """The reward is the share of so many checks that pass."""
    tasks: int = 0
    """Number of repeated tasks; half of the variance lies between them."""
    running: float = 0.0
    """Number of rollouts that run at the same time; durations are exponential."""
    haste: float = 1.0
    """Factor by which a failure of the candidate ends earlier."""
    by_completion: bool = False
    """True to observe rollouts in the order of their ends: the mistake that assignment order avoids."""
    peers: str = ""
    """Rules that see the same rollouts: `ramp` or `half`."""
    users: Way | None = None
    """How users are assigned and counted (`bench.release_users`); None if rollouts do not come from users."""
    part: float = 1.0
    """Share of `--canaries` that is simulated."""

    @property
    def mean(self) -> float:
        """Mean reward of the stable before the start, as its release sees it."""
        rate = self.rates[0]
        seen = 1.0 if self.policy.missing == "worst" else 1 - (1 - rate) * self.silent
        return rate / seen

    @property
    def spreads(self) -> dict[str, float]:
        """Standard deviations of the stable's guards before the start."""
        bad = {"error": (self.errors or (0.0, 0.0))[0], "missing": (1 - self.rates[0]) * self.silent}
        return {name: (share * (1 - share)) ** 0.5 for name, share in bad.items()}


DROPS = {"5 %": 0.05, "10 %": 0.10, "20 %": 0.20, "40 %": 0.40}
FEWER = 0.2
"""Part of the releases that is simulated where no target depends on the figure."""


def _worse(share: float, policy: ReleasePolicy = PLAIN, part: float = 1.0, **changes: Any) -> Scenario:
    return Scenario(policy.model_copy(update=changes), rates=(RATE, RATE * (1 - share)), part=part)


def _drop(share: float, policy: ReleasePolicy = PLAIN, part: float = 1.0, **changes: Any) -> Scenario:
    """Return a scenario without the alarm about the split, which holds about one sound release in 200."""
    return replace(_worse(share, policy, part, **changes), srm_alpha=1e-9)


def _whole(share: float, part: float = 1.0, **changes: Any) -> Scenario:
    return replace(_worse(share, WHOLE, part), **{"errors": (0.01, 0.01)} | changes)


def _low(rate: float, worse: bool = False) -> Scenario:
    """Return a scenario with few successes; the candidate is equal, or worse by the margin."""
    return _whole(0, FEWER, rates=(rate, rate - WHOLE.d(rate) * worse))


def _later(at: int, by: float = 0.3) -> Scenario:
    """Return a scenario whose candidate is equal until a rollout, and worse from then on."""
    return replace(_whole(0, FEWER), policy=HELD_BACK, worse_from=at, worse_by=by)


def _users(way: Way, share: float = 0) -> Scenario:
    return replace(_drop(share, part=FEWER), users=way)


SCENARIOS: dict[str, Scenario] = {
    "A/A": Scenario(),
    "A/A, rewards drift by -30 %": Scenario(drift=0.3),
    "A/A, mean reward 0.1": Scenario(rates=(0.1, 0.1)),
    "A/A, 1 % errors": Scenario(ERRORS, errors=(0.01, 0.01)),
    "A/A, failures 5x faster, assignment order": Scenario(running=200, haste=5),
    "A/A, failures 5x faster, completion order": Scenario(running=200, haste=5, by_completion=True, part=FEWER),
    "drop of 5 %": _drop(DROPS["5 %"], part=FEWER),
    "drop of 10 %": _drop(DROPS["10 %"]),
    "drop of 20 %": _drop(DROPS["20 %"]),
    "drop of 40 %": _drop(DROPS["40 %"]),
    "drop of 10 %, 50/50 from the start": _drop(0.1, HALF),
    "drop of 10 %, alpha 0.02": _drop(0.1, part=FEWER, alpha=0.02),
    "drop of 10 %, 200 tasks": replace(_drop(0.1, part=FEWER), tasks=200),
    "whole, equal": _whole(0),
    "whole, worse by 2.5 %": _whole(0.025, FEWER),
    "whole, worse by 5 %": _whole(0.05, FEWER),
    "whole, worse by 7.5 %": _whole(0.075, FEWER),
    "whole, worse by the margin, 10 %": _whole(0.1),
    "whole, worse by 20 %": _whole(0.2, FEWER),
    "guarded, errors 1 % -> 3 %": _whole(0, FEWER, errors=(0.01, 0.03)),
    "guarded, errors 1 % -> 5 %": _whole(0, FEWER, errors=(0.01, 0.05)),
    "guarded, errors 1 % -> 5 %, reward better by 5 %": _whole(-0.05, FEWER, errors=(0.01, 0.05)),
    "guarded, errors 5 % in both": _whole(0, FEWER, errors=(0.05, 0.05)),
    "low, success rate 0.36, equal": _low(0.36),
    "low, success rate 0.36, worse by the margin": _low(0.36, worse=True),
    "low, success rate 0.30, equal": _low(0.3),
    "low, success rate 0.10, equal": _low(0.1),
    "low, success rate 0.10, worse by the margin": _low(0.1, worse=True),
    "silent, equal, left out": _whole(0, FEWER, silent=0.6),
    "silent, worse by 10 %, left out": _whole(0.1, FEWER, silent=0.6),
    "silent, equal, worst": replace(_whole(0, FEWER, silent=0.6), policy=WORST),
    "silent, worse by 10 %, worst": replace(_whole(0.1, FEWER, silent=0.6), policy=WORST),
    "held back, equal": replace(_whole(0, FEWER), policy=HELD_BACK),
    "held back, good for 1,200, then -30 %": _later(1200),
    "held back, good for 2,500, then -30 %": _later(2500),
    "held back, good for 2,500, then -15 %": _later(2500, 0.15),
    "held back with 10 % for 2,000, good for 2,500, then -30 %": replace(_later(2500), policy=HELD_BACK_MORE),
    "no holdback, good for 1,200, then -30 %": replace(_later(1200), policy=WHOLE),
    "no holdback, good for 2,500, then -30 %": replace(_later(2500), policy=WHOLE),
    "beside, equal": Scenario(peers="ramp", part=FEWER),
    "beside, rewards drift by -30 %": Scenario(drift=0.3, peers="ramp", part=FEWER),
    "beside, worse by 10 %": replace(_worse(0.1, part=FEWER), peers="ramp"),
    "beside, graded, equal, 50/50": Scenario(HALF, checks=5, peers="half", part=FEWER),
    "beside, graded, worse by 5 %, 50/50": replace(_worse(0.05, HALF, FEWER), checks=5, peers="half"),
    "users, A/A, by rollout": _users("rollout"),
    "users, A/A, assigned by user, counted by rollout": _users("mistake"),
    "users, A/A, by user": _users("unit"),
    "users, drop of 10 %, by rollout": _users("rollout", 0.1),
    "users, drop of 10 %, by user": _users("unit", 0.1),
    "users, drop of 20 %, by rollout": _users("rollout", 0.2),
    "users, drop of 20 %, by user": _users("unit", 0.2),
    "users, whole, equal, by user": _whole(0, FEWER, users="unit"),
    "users, whole, worse by the margin, by user": _whole(0.1, FEWER, users="unit"),
}

PROMISED = {
    ("users, whole, equal, by user", "roll_back"): 5.0,
    ("users, whole, worse by the margin, by user", "promote"): 5.0,
    ("whole, equal", "roll_back"): 5.0,
    ("whole, worse by the margin, 10 %", "promote"): 5.0,
    ("guarded, errors 1 % -> 3 %", "promote"): 5.0,
    ("guarded, errors 1 % -> 5 %", "promote"): 5.0,
    ("guarded, errors 5 % in both", "roll_back"): 5.0,
    ("low, success rate 0.36, equal", "roll_back"): 5.0,
    ("low, success rate 0.36, equal", "hold"): 15.0,
    ("low, success rate 0.36, worse by the margin", "promote"): 5.0,
    ("low, success rate 0.30, equal", "roll_back"): 5.0,
    ("low, success rate 0.10, equal", "roll_back"): 5.0,
    ("low, success rate 0.10, worse by the margin", "promote"): 5.0,
    ("silent, equal, worst", "roll_back"): 5.0,
    ("held back, equal", "roll_back"): 5.0,
    ("silent, worse by 10 %, worst", "promote"): 5.0,
}
"""Highest percentage, by scenario and ending."""
CAUGHT: dict[str, tuple[float | None, float | None, float | None]] = {
    "drop of 10 %": (99.0, 1900, None),
    "drop of 10 %, 50/50 from the start": (99.0, 1350, None),
    "drop of 20 %": (99.0, 850, 120),
    "drop of 40 %": (99.0, 450, 30),
}
"""(lowest percentage rolled back; highest median of rollouts; highest median of rollouts on the candidate)."""
