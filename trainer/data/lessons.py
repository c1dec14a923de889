"""Chooses the conversations that are learnt from, in the model's own tokens. Pure; everything left out is counted.

A *lesson* is what counts once in an update: for supervised fine-tuning a rollout that was good enough, for preferences
the better and the worse of a group. Groups, not lessons, are held out: a task that is evaluated was never trained on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.adapters.chat import Conversation
from penstock.adapters.preferences import more, pairs
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import Config, Sft
from penstock.trainer.data.chat_template import Tokenizer, tokenise
from penstock.trainer.mathematics.batch import admit
from penstock.trainer.mathematics.examples import Example


@dataclass(frozen=True, slots=True)
class Told:
    """An attempt at a rollout, with all its conversations."""

    rollout: str
    attempt: str
    group: str
    reward: float | None
    chats: tuple[Conversation, ...]


@dataclass(frozen=True, slots=True)
class Lesson:
    """What counts once in an update."""

    group: str
    """The task that it is of."""
    sides: tuple[tuple[Example, ...], ...]
    """Of a rollout one; of a pair two, the chosen one first."""


@dataclass(slots=True)
class Lessons:
    """Everything that a run learns from, and what was left out."""

    taught: list[Lesson] = field(default_factory=list[Lesson])
    """Trained on."""
    held_out: list[Lesson] = field(default_factory=list[Lesson])
    """Only evaluated."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """What was left out, by what it is and why, such as `rollouts_reward`."""
    hints: list[str] = field(default_factory=list[str])
    """What would give more pairs."""
    trouble: str | None = None
    """Why the model's template could not be used for the first such conversation."""


def told(chats: Iterable[Conversation]) -> list[Told]:
    """Conversations by their attempts, in the order of their first ones. In a file that was shuffled they need not
    stand together."""
    by_attempt: dict[tuple[str, str, str, float | None], list[Conversation]] = defaultdict(list)
    for one in chats:
        by_attempt[one.rollout, one.attempt, one.group, one.reward].append(one)
    return [Told(*key, tuple(own)) for key, own in by_attempt.items()]


def best(given: Sequence[Told], wanted: Sft, dropped: Counter[str]) -> list[Told]:
    """Those with at least `sft.reward`, and of each group the `sft.best` with the highest, in their order. Of equal
    ones the first count."""
    if wanted.reward is None and wanted.best is None:
        return list(given)
    rated = [(one.reward, one) for one in given if one.reward is not None]
    good = [(reward, one) for reward, one in rated if wanted.reward is None or reward >= wanted.reward]
    groups: dict[str, list[Told]] = defaultdict(list)
    for _, one in sorted(good, key=lambda it: it[0], reverse=True):
        groups[one.group].append(one)
    kept = {id(one) for group in groups.values() for one in group[: wanted.best]}
    dropped.update(
        rollouts_no_reward=len(given) - len(rated), rollouts_reward=len(rated) - len(good),
        rollouts_beaten=len(good) - len(kept),
    )  # fmt: skip
    return [one for one in given if id(one) in kept]


class Maker:
    """Makes lessons of attempts."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self.lessons = Lessons()
        self._config, self._tokenizer = config, tokenizer

    def of_rollouts(self, given: Sequence[Told]) -> Lessons:
        """For supervised fine-tuning. Raises `ConfigError` when nothing is left."""
        chosen = best(given, self._config.sft, self.lessons.dropped)
        made = [Lesson(one.group, (examples,)) for one in chosen if (examples := self._encoded(one)[0])]
        return self._divided(made)

    def of_pairs(self, given: Sequence[Told]) -> Lessons:
        """For preferences: whole attempts, all of whose conversations must be usable. Raises `ConfigError` when nothing
        is left."""
        wanted = self._config.dpo
        found, unpaired = pairs(given, wanted.margin, wanted.pairs)
        self.lessons.dropped.update(f"groups_{reason}" for reason in unpaired.values())
        rollouts = {(one.group, one.rollout) for one in given}
        self.lessons.hints = more(unpaired, Counter(group for group, _ in rollouts), wanted.margin)
        sides = {id(one): one for pair in found for one in (pair.chosen, pair.rejected)}
        encoded = {key: self._encoded(one) for key, one in sides.items()}
        made: list[Lesson] = []
        for pair in found:
            (chosen, whole), (rejected, other) = encoded[id(pair.chosen)], encoded[id(pair.rejected)]
            if whole and other:
                made.append(Lesson(pair.group, (chosen, rejected)))
        self.lessons.dropped["pairs_incomplete"] += len(found) - len(made)
        return self._divided(made)

    def _encoded(self, one: Told) -> tuple[tuple[Example, ...], bool]:
        """(its examples, whether they are all of it)."""
        made, unusable = tokenise(one.chats, self._tokenizer)
        kept, refused = admit(made, self._config.engine.batch_tokens)
        self.lessons.dropped.update(f"chats_{it.reason}" for it in (*unusable, *refused))
        if unusable and self.lessons.trouble is None:
            self.lessons.trouble = f"{one.rollout}: {unusable[0].detail}"
        return tuple(kept), not (unusable or refused)

    def _divided(self, made: Sequence[Lesson]) -> Lessons:
        lessons, data = self.lessons, self._config.data
        lessons.dropped = +lessons.dropped
        if not made:
            why = ", ".join(f"{name} {count}" for name, count in lessons.dropped.most_common()) or "nothing was read"
            trouble = [lessons.trouble] if lessons.trouble else []
            raise ConfigError("; ".join([f"data: there is nothing to learn from ({why})", *trouble, *lessons.hints]))
        out = held_out([one.group for one in made], data.held_out, self._config.run.seed)
        lessons.taught = [one for one in made if one.group not in out]
        lessons.held_out = [one for one in made if one.group in out]
        return lessons


def held_out(groups: Sequence[str], share: float, seed: int) -> frozenset[str]:
    """Which of the groups are held out: at least one where any are wanted, and never all. Raises `ConfigError`."""
    names = sorted(set(groups))
    if share and len(names) == 1:
        raise ConfigError(f"data.held_out: there is one group only ({names[0]}); nothing of it can be held out")
    count = min(max(round(share * len(names)), 1), len(names) - 1) if share else 0
    order = np.random.default_rng(seed).permutation(len(names))
    return frozenset(names[place] for place in order[:count])
