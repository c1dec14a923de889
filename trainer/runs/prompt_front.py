"""The front of a run that trains prompts and weights together: the few prompts that its rollouts have. Pure.

The prompt that the run began with is always among them. The *leader* is the one with the highest mean reward when they
were compared last; it is what is evaluated, and at the end released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.data.collect import Variant


@dataclass(frozen=True, slots=True)
class Member:
    """A prompt of the front: the texts of all resources that are optimised."""

    candidate: Candidate
    """The texts, and how they came about."""
    versions: Mapping[str, str]
    """Their versions, by resource."""
    mean: float | None = None
    """Mean reward, between 0 and 1, when the front was chosen; None before."""

    @property
    def variant(self) -> Variant:
        """What rollouts that have it are given."""
        return Variant(self.candidate.id, self.versions)


@dataclass(frozen=True, slots=True)
class Front:
    """All of them, the leader first."""

    seed: str
    """The prompt that the run began with; its id."""
    members: Sequence[Member]
    """The leader first, the seed among them."""
    rounds: int = 0
    """Rounds that were held."""
    spent: Mapping[str, float] = field(default_factory=dict[str, float])
    """What reflections have used of the run's budget: `reflections`, `tokens`, `money`."""

    @property
    def leader(self) -> Member:
        """The best."""
        return self.members[0]

    @property
    def first(self) -> Member:
        """The seed."""
        return next(one for one in self.members if one.candidate.id == self.seed)

    @property
    def places(self) -> Mapping[str, str]:
        """What each is called in figures, by its id: `seed`, and the others `1`, `2` ... by their rank."""
        others = [one.candidate.id for one in self.members if one.candidate.id != self.seed]
        return {self.seed: "seed"} | {name: str(rank) for rank, name in enumerate(others, 1)}

    def figures(self, rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Means of a step's rewards, which are given by id."""
        found = {"front/size": float(len(self.members))}
        for name, place in self.places.items():
            if mine := rewards.get(name):
                found[f"front/{place}"] = sum(mine) / len(mine)
        return found

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "seed": self.seed,
            "rounds": self.rounds,
            "spent": dict(self.spent),
            "members": list(map(_kept, self.members)),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Front:
        """Of a checkpoint."""
        return cls(state["seed"], list(map(_read, state["members"])), state["rounds"], state["spent"])


def _kept(one: Member) -> dict[str, Any]:
    about = one.candidate
    made = {"texts": dict(about.texts), "parent": about.parent, "claim": about.claim, "causes": list(about.causes)}
    return {**made, "versions": dict(one.versions), "mean": one.mean}


def _read(kept: Mapping[str, Any]) -> Member:
    about = Candidate(kept["texts"], kept["parent"], kept["claim"], tuple(kept["causes"]))
    return Member(about, kept["versions"], kept["mean"])


def chosen(seed: str, contestants: Sequence[Member], most: int) -> list[Member]:
    """At most so many of these, the best first; equal ones are in the order of their length. The seed is among them,
    and none that is below the seed or has no mean."""
    ranked = sorted(contestants, key=lambda one: (-_mean(one), one.candidate.length, one.candidate.id))
    first = next(one for one in ranked if one.candidate.id == seed)
    others = [one for one in ranked if one is not first and one.mean is not None and one.mean >= _mean(first)]
    kept = {one.candidate.id for one in (first, *others[: most - 1])}
    return [one for one in ranked if one.candidate.id in kept]


def _mean(one: Member) -> float:
    return float("-inf") if one.mean is None else one.mean
