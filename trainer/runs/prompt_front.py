"""The front of a run that trains prompts and weights together: the few prompts of its rollouts. Pure.

The prompt that the run began with is always a member. The *leader* has the highest mean reward of the last comparison;
it is evaluated, and released at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.trainer.apo.protocol import Candidate
from penstock.trainer.data.collector import Variant


@dataclass(frozen=True, slots=True)
class FrontMember:
    """A prompt of the front: the texts of all optimised resources."""

    candidate: Candidate
    """The texts, and their origin."""
    versions: Mapping[str, str]
    """Versions of the texts, by resource."""
    mean: float | None = None
    """Mean reward, between 0 and 1, at the choice of the front; None before."""

    @property
    def variant(self) -> Variant:
        return Variant(self.candidate.id, self.versions)


@dataclass(frozen=True, slots=True)
class PromptFront:
    """All prompts of the front, and the state of the rounds."""

    seed: str
    """Id of the prompt that the run began with."""
    members: Sequence[FrontMember]
    """The prompts, best first; the seed is one of them."""
    rounds: int = 0
    """Number of rounds held."""
    spent: Mapping[str, float] = field(default_factory=dict[str, float])
    """Use of the run's budget by reflections: `reflections`, `tokens`, `money`."""

    @property
    def leader(self) -> FrontMember:
        """The first member, which is the best."""
        return self.members[0]

    @property
    def first(self) -> FrontMember:
        """The prompt that the run began with."""
        return next(one for one in self.members if one.candidate.id == self.seed)

    @property
    def labels(self) -> Mapping[str, str]:
        """Names of the prompts in metrics, by id: `seed`, and the others `1`, `2` ... by their rank."""
        others = [one.candidate.id for one in self.members if one.candidate.id != self.seed]
        return {self.seed: "seed"} | {name: str(rank) for rank, name in enumerate(others, 1)}

    def figures(self, rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return metrics: the means of a step's rewards, which are given by id."""
        found = {"front/size": float(len(self.members))}
        for name, place in self.labels.items():
            if mine := rewards.get(name):
                found[f"front/{place}"] = sum(mine) / len(mine)
        return found

    def state(self) -> dict[str, Any]:
        """Return the front for a checkpoint."""
        return {
            "seed": self.seed,
            "rounds": self.rounds,
            "spent": dict(self.spent),
            "members": list(map(_kept, self.members)),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PromptFront:
        """Return the front of a checkpoint."""
        return cls(state["seed"], list(map(_read, state["members"])), state["rounds"], state["spent"])


def _kept(one: FrontMember) -> dict[str, Any]:
    about = one.candidate
    made = {"texts": dict(about.texts), "parent": about.parent, "claim": about.claim, "causes": list(about.causes)}
    return {**made, "versions": dict(one.versions), "mean": one.mean}


def _read(kept: Mapping[str, Any]) -> FrontMember:
    about = Candidate(kept["texts"], kept["parent"], kept["claim"], tuple(kept["causes"]))
    return FrontMember(about, kept["versions"], kept["mean"])


def choose_front(seed: str, contestants: Sequence[FrontMember], most: int) -> list[FrontMember]:
    """Return at most `most` contestants, best first; of equal ones the shorter first. The seed is always among them;
    prompts that are worse than the seed or have no mean are not."""
    ranked = sorted(contestants, key=lambda one: (-_mean(one), one.candidate.length, one.candidate.id))
    first = next(one for one in ranked if one.candidate.id == seed)
    others = [one for one in ranked if one is not first and one.mean is not None and one.mean >= _mean(first)]
    kept = {one.candidate.id for one in (first, *others[: most - 1])}
    return [one for one in ranked if one.candidate.id in kept]


def _mean(one: FrontMember) -> float:
    return float("-inf") if one.mean is None else one.mean
