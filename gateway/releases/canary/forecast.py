"""Forecasts how long a release takes and how it ends, before its first rollout is assigned.

Releases with an equal candidate are played through the `Canary` that will judge the real one, with its policy and its
margins. Their rollouts are drawn from the past of the stable version, for both arms. `STEPS` bounds the work to less
than a second, so the shares are rough; the forecast says how many releases were played. The random numbers follow from
the release's salt, so the forecast is the same each time.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from statistics import median
from typing import Final

from penstock.gateway.model.release import Forecast, Release
from penstock.gateway.model.release_policy import EARLY, ReleasePolicy
from penstock.gateway.releases.canary.baseline import Baseline
from penstock.gateway.releases.canary.decision import Canary
from penstock.gateway.releases.canary.evidence import CanaryObservation

STEPS: Final = 36_000
"""Rollouts that are played in all releases together."""
ENOUGH: Final = 20
"""Minimum number of past rollouts for a forecast."""
MOST: Final = 60
"""Maximum number of releases that are played."""


def forecast(release: Release, past: Baseline) -> Forecast:
    """The forecast for a release with an equal candidate; without figures where the past says too little."""
    if len(past.rollouts) < ENOUGH or past.mean is None:
        return Forecast(past=len(past.rollouts))
    played = release.model_copy(update={"policy": played_policy(release.policy, past)})
    rng, steps, ends, seen = Random(release.salt), STEPS, Counter[str](), list[int]()
    while steps > 0 and len(seen) < MOST:
        canary = Canary.of(played)
        steps -= play(canary, past, rng)
        if not canary.ended:
            break
        ends[canary.verdict.action] += 1
        seen.append(canary.evidence.seen)
    return _told(past, ends, seen) if seen else Forecast(past=len(past.rollouts), mean=past.mean)


def played_policy(policy: ReleasePolicy, past: Baseline) -> ReleasePolicy:
    """The policy without the parts that take time and change nothing: people approve at once, stages last as long as
    their rollouts, there is no holdback, and guards that were never anything but good are taken to pass before the
    reward does."""
    made, spreads = policy.model_dump(mode="json"), past.spreads()
    made["holdback"]["rollouts"] = 0
    for stage in made["stages"]:
        stage |= {"approval": False, "seconds": 0.0}
    for name in policy.guard_alphas:
        if not spreads.get(name):
            made["guards"][name] = None if name in ("latency", "cost") else made["guards"][name] | {"alpha": 0.0}
    return ReleasePolicy.model_validate(made)


def play(canary: Canary, past: Baseline, rng: Random) -> int:
    """Plays one release to its end, or for `STEPS` rollouts at most; returns the number of rollouts it has taken."""
    stages, rollouts, early = canary.policy.stages, past.rollouts, EARLY in canary.evidence.guards
    number, count = 0, len(past.rollouts)
    while not canary.ended and number < STEPS:
        number += 1
        one, stage = rollouts[int(rng.random() * count)], stages[canary.stage]
        arm = 1 if rng.random() < stage.split else 0
        good = one.guards.get(EARLY)
        if early and good is not None and canary.step_early(number, arm, stage.split, good) is not None:
            break
        canary.step(CanaryObservation(number, stage.name, arm, stage.split, one.reward, one.guards))
    return number


def _told(past: Baseline, ends: Counter[str], seen: list[int]) -> Forecast:
    played, rollouts, per_day = len(seen), round(median(seen)), past.per_day
    return Forecast(
        played=played,
        past=len(past.rollouts),
        mean=past.mean,
        rollouts=rollouts,
        per_day=per_day,
        days=rollouts / per_day if per_day else None,
        promoted=ends["promote"] / played,
        rolled_back=ends["roll_back"] / played,
        held=ends["hold"] / played,
    )
