"""Forecasts how long a release takes and how it ends, before its first rollout is assigned.

Releases with an equal candidate are played through the `Canary` that will judge the real one, with its policy and its
margins. Their rollouts are drawn from the past of the stable version, for both arms. `STEPS` bounds the work to less
than a second, so the shares are rough; the forecast says how many releases were played. The random numbers follow from
the release's salt, so the forecast is the same each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from statistics import median
from typing import Final, NamedTuple

from penstock.gateway.model.facts import is_release_call
from penstock.gateway.model.release import AssignmentEvidence, Forecast, Release
from penstock.gateway.model.release_policy import EARLY, MISSING, Holdback, ReleasePolicy
from penstock.gateway.model.rollout import Rollout, RolloutStatus
from penstock.gateway.releases.canary.decision import Canary
from penstock.gateway.releases.canary.evidence import CanaryObservation
from penstock.gateway.releases.canary.outcomes import RolloutReader, fill_outcome

# Outcomes of the stable version before a release starts: the release's margins and forecast are taken from them.
#
# Rollouts are judged as the release would judge them (`gateway.releases.canary.outcomes`): those that were given the
# stable version, or all of them where none was, because the resource is new. A rollout that has no reward yet and
# whose deadline has not passed is left out; so are calls and runs that were made for a release.

DAY_NS = 86_400 * 10**9


class BaselineRollout(NamedTuple):
    """A rollout of the stable version."""

    created_ns: int
    reward: float | None
    """Goodness in [0, 1]; None when none had come by the deadline."""
    guards: Mapping[str, float | None]
    """Goodness by guard."""


class Baseline(NamedTuple):
    """Rollouts of the stable version, in any order."""

    rollouts: Sequence[BaselineRollout] = ()
    worst: bool = False
    """Whether a missing reward counts as 0."""

    @property
    def mean(self) -> float | None:
        """Mean goodness of its rewards; None without one."""
        values = [one.reward for one in self.rollouts if one.reward is not None]
        if values and self.worst:
            values += [0.0] * (len(self.rollouts) - len(values))
        return sum(values) / len(values) if values else None

    @property
    def per_day(self) -> float | None:
        """Rollouts a day; None where there are too few to tell."""
        times = [one.created_ns for one in self.rollouts]
        if len(times) < 2 or max(times) == min(times):
            return None
        return (len(times) - 1) / ((max(times) - min(times)) / DAY_NS)

    def spreads(self) -> dict[str, float]:
        """Standard deviation of the goodness, by guard."""
        names = {name for one in self.rollouts for name in one.guards}
        found = {
            name: [value for one in self.rollouts if (value := one.guards.get(name)) is not None] for name in names
        }
        found[MISSING] = [0.0 if one.reward is None else 1.0 for one in self.rollouts]
        return {name: _spread(values) for name, values in found.items() if values}


def _spread(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5


class BaselineReader(NamedTuple):
    """Reads the past of a version from the tape."""

    tape: RolloutReader
    policy: ReleasePolicy
    resource: str
    version: str
    now_ns: int

    def read(self, rollouts: Iterable[Rollout]) -> Baseline:
        """The past made of those of these rollouts that can be judged."""
        given, others = list[BaselineRollout](), list[BaselineRollout]()
        for rollout in rollouts:
            one = self._judged(rollout)
            if one is None:
                continue
            pins = [pin for pin in self.tape.pins(rollout.id) if pin.resource == self.resource]
            if not pins:
                others.append(one)
            elif all(pin.version == self.version and not pin.mixed for pin in pins):
                given.append(one)
        return Baseline(given or others, self.policy.missing == "worst")

    def _judged(self, rollout: Rollout) -> BaselineRollout | None:
        if rollout.status == RolloutStatus.CANCELLED or any(
            is_release_call(span) for span in self.tape.spans(rollout.id)
        ):
            return None
        seen = AssignmentEvidence(number=0, rollout=rollout.id, seen_ns=self.now_ns)
        fill_outcome(self.tape, self.policy, rollout, seen)
        overdue = self.now_ns >= rollout.created_ns + int(self.policy.outcome_deadline_s * 1e9)
        if seen.reward is None and not overdue:
            return None
        guards = seen.guards | {EARLY: seen.guards.get("error")}
        return BaselineRollout(rollout.created_ns, seen.reward, guards)


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
    spreads = past.spreads()
    stages = [one.model_copy(update={"approval": False, "seconds": 0.0}) for one in policy.stages]
    made = policy.model_copy(update={"stages": stages, "holdback": Holdback(rollouts=0)})
    return made.with_guards([name for name in policy.guard_alphas if spreads.get(name)])


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
