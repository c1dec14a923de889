"""Releases whose rollouts come from users: some have many, and those of one user are alike.

Each user succeeds with a probability of its own, drawn from a beta distribution: `ALIKE` of the variance lies between
users. The number of rollouts of a user is Pareto-distributed. `ACTIVE` users take turns; a user without further
rollouts is replaced by another. Rollouts are observed as they come; a user at the end of its window, in the order in
which users came, with the rollouts that it has had by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal, NamedTuple

from penstock.gateway.model.release_policy import EARLY, RampStep, ReleasePolicy
from penstock.gateway.releases.canary.decision import Canary
from penstock.gateway.releases.canary.evidence import CanaryObservation
from penstock.gateway.releases.canary.outcomes import MOST

ALIKE: Final = 0.3
ACTIVE: Final = 50
WINDOW: Final = 500
"""Length of a window in rollouts of all users."""
TAIL: Final = 1.1
"""Exponent of the Pareto distribution: the mean is about 5 rollouts, half of the users have one."""

Way = Literal["rollout", "mistake", "unit"]
"""Assigned and counted by rollout; assigned by user and counted by rollout; assigned and counted by user."""


class Spent(NamedTuple):
    """Rollouts that a release has taken, and how many of them were on the candidate."""

    rollouts: int
    exposed: int


@dataclass(slots=True)
class User:
    """A user with an arm, a skill and the number of its rollouts to come."""

    number: int
    skill: float
    left: int
    arm: int
    stage: RampStep
    began: int
    rewards: list[float] = field(default_factory=list[float])
    errors: list[float] = field(default_factory=list[float])


class Users:
    """Draws rollouts of users, for one release."""

    def __init__(self, rates: tuple[float, float], errors: tuple[float, float], rng: Random) -> None:
        self._rates, self._errors, self._rng = rates, errors, rng
        self._active: list[User] = []
        self._known = 0

    def next(self, stage: RampStep, now: int) -> User:
        """Return the user of the next rollout; a new one is assigned in this stage. `now`: number of earlier
        rollouts."""
        if len(self._active) < ACTIVE:
            self._known += 1
            a = self._rates[0] * (1 / ALIKE - 1)
            skill = self._rng.betavariate(a, 1 / ALIKE - 1 - a) / self._rates[0]
            count = min(MOST, int(self._rng.paretovariate(TAIL)))
            self._active.append(User(self._known, skill, count, int(self._rng.random() < stage.split), stage, now))
            return self._active[-1]
        return self._active[int(self._rng.random() * ACTIVE)]

    def rollout(self, user: User, arm: int) -> None:
        """Draw a rollout of a user on an arm."""
        chance = self._rng.random
        user.rewards.append(1.0 if chance() < self._rates[arm] * user.skill else 0.0)
        user.errors.append(0.0 if chance() < self._errors[arm] else 1.0)
        user.left -= 1
        if not user.left:
            self._active.remove(user)


def play(
    canary: Canary,
    policy: ReleasePolicy,
    way: Way,
    rates: tuple[float, float],
    errors: tuple[float, float],
    rng: Random,
) -> Spent:
    """Simulate one release to its end."""
    users, rollouts, exposed = Users(rates, errors, rng), 0, 0
    waiting: deque[User] = deque()
    early = EARLY in canary.evidence.guards
    while not canary.ended:
        stage = policy.ramp[canary.stage]
        user = users.next(stage, rollouts)
        # With `rollout` each rollout is assigned anew.
        arm, at = (int(rng.random() < stage.split), stage) if way == "rollout" else (user.arm, user.stage)
        new = not user.rewards
        users.rollout(user, arm)
        rollouts, exposed = rollouts + 1, exposed + arm
        if way == "unit":
            if new:
                waiting.append(user)
                if early and canary.step_early(user.number, user.arm, user.stage.split, user.errors[0]):
                    break
            for one in _over(waiting, rollouts):
                canary.step(one)
                if canary.ended:
                    break
        else:
            guards = {"error": user.errors[-1], "violation": 1.0}
            canary.step(CanaryObservation(rollouts, at.name, arm, at.split, user.rewards[-1], guards))
    return Spent(rollouts, exposed)


def _over(waiting: deque[User], now: int) -> Iterator[CanaryObservation]:
    """Remove the users at the head whose window is over, and yield each as one observation."""
    while waiting and now >= waiting[0].began + WINDOW:
        one = waiting.popleft()
        reward, error = (sum(values) / len(values) for values in (one.rewards, one.errors))
        yield CanaryObservation(
            one.number, one.stage.name, one.arm, one.stage.split, reward, {"error": error, "violation": 1.0}
        )
