"""Outcomes of the stable version before a release starts: the release's margins and forecast are taken from them.

Rollouts are judged as the release would judge them (`gateway.releases.canary.outcomes`): those that were given the
stable version, or all of them where none was, because the resource is new. A rollout that has no reward yet and whose
deadline has not passed is left out; so are calls and runs that were made for a release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.gateway.model.release import AssignmentEvidence
from penstock.gateway.model.release_calls import is_release_call
from penstock.gateway.model.release_policy import EARLY, MISSING, ReleasePolicy
from penstock.gateway.model.rollout import Rollout, RolloutStatus
from penstock.gateway.releases.canary.outcomes import RolloutReader, fill_outcome

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
        guards = (
            seen.guards if EARLY not in self.policy.guard_alphas else seen.guards | {EARLY: seen.guards.get("error")}
        )
        return BaselineRollout(rollout.created_ns, seen.reward, guards)
