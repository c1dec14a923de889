"""Chooses the conversations to train on, in the model's own tokens. Pure; everything left out is counted.

A *lesson* is one unit of an update: for supervised fine-tuning a rollout that was good enough, for preferences the
better and the worse of a group. Groups, not lessons, are held out: a task that is evaluated was never trained on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.adapters.chat import ChatConversation
from penstock.adapters.preferences import pairing_advice, pairs
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import SftSettings, TrainConfig
from penstock.trainer.data.chat_template import Tokenizer, tokenise
from penstock.trainer.mathematics.batch import TokenExample, admit


@dataclass(frozen=True, slots=True)
class AttemptConversations:
    """An attempt at a rollout, with all its conversations."""

    rollout: str
    attempt: str
    group: str
    reward: float | None
    chats: tuple[ChatConversation, ...]


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """One unit of an update: a rollout, or a pair."""

    group: str
    """Group of its rollouts, which is its task."""
    sides: tuple[tuple[TokenExample, ...], ...]
    """The examples: of a rollout one tuple; of a pair two, the chosen one first."""


@dataclass(slots=True)
class TrainingSet:
    """Everything that a run learns from, and counts of what was left out."""

    training: list[TrainingExample] = field(default_factory=list[TrainingExample])
    """Lessons to train on."""
    held_out: list[TrainingExample] = field(default_factory=list[TrainingExample])
    """Lessons to evaluate only."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Number left out by kind and reason, such as `rollouts_reward`."""
    hints: list[str] = field(default_factory=list[str])
    """Advice that would give more pairs."""
    trouble: str | None = None
    """Why the model's template could not render a conversation: the first such error. None without one."""


def group_by_attempt(chats: Iterable[ChatConversation]) -> list[AttemptConversations]:
    """Group conversations by attempt, in the order of the attempts' first conversations. In a shuffled file the
    conversations of an attempt need not be adjacent."""
    by_attempt: dict[tuple[str, str, str, float | None], list[ChatConversation]] = defaultdict(list)
    for one in chats:
        by_attempt[one.rollout, one.attempt, one.group, one.reward].append(one)
    return [AttemptConversations(*key, tuple(own)) for key, own in by_attempt.items()]


def select_best(
    given: Sequence[AttemptConversations], wanted: SftSettings, dropped: Counter[str]
) -> list[AttemptConversations]:
    """Return the attempts with a reward of at least `sft.reward`, and of each group the `sft.best` highest, in their
    order. Of equal rewards the first count."""
    if wanted.reward is None and wanted.best is None:
        return list(given)
    rated = [(one.reward, one) for one in given if one.reward is not None]
    good = [(reward, one) for reward, one in rated if wanted.reward is None or reward >= wanted.reward]
    groups: dict[str, list[AttemptConversations]] = defaultdict(list)
    for _, one in sorted(good, key=lambda it: it[0], reverse=True):
        groups[one.group].append(one)
    kept = {id(one) for group in groups.values() for one in group[: wanted.best]}
    dropped.update(
        rollouts_no_reward=len(given) - len(rated), rollouts_reward=len(rated) - len(good),
        rollouts_beaten=len(good) - len(kept),
    )  # fmt: skip
    return [one for one in given if id(one) in kept]


class ExampleBuilder:
    def __init__(self, config: TrainConfig, tokenizer: Tokenizer) -> None:
        self.lessons = TrainingSet()
        self._config, self._tokenizer = config, tokenizer

    def from_rollouts(self, given: Sequence[AttemptConversations]) -> TrainingSet:
        """Make lessons for supervised fine-tuning. Raises `ConfigError` when nothing is left."""
        chosen = select_best(given, self._config.sft, self.lessons.dropped)
        made = [TrainingExample(one.group, (examples,)) for one in chosen if (examples := self._encoded(one)[0])]
        return self._divided(made)

    def from_pairs(self, given: Sequence[AttemptConversations]) -> TrainingSet:
        """Make lessons for preferences: whole attempts, all of whose conversations must be usable. Raises `ConfigError`
        when nothing is left."""
        wanted = self._config.dpo
        found, unpaired = pairs(given, wanted.margin, wanted.pairs)
        self.lessons.dropped.update(f"groups_{reason}" for reason in unpaired.values())
        rollouts = {(one.group, one.rollout) for one in given}
        self.lessons.hints = pairing_advice(unpaired, Counter(group for group, _ in rollouts), wanted.margin)
        sides = {id(one): one for pair in found for one in (pair.chosen, pair.rejected)}
        encoded = {key: self._encoded(one) for key, one in sides.items()}
        made: list[TrainingExample] = []
        for pair in found:
            (chosen, whole), (rejected, other) = encoded[id(pair.chosen)], encoded[id(pair.rejected)]
            if whole and other:
                made.append(TrainingExample(pair.group, (chosen, rejected)))
        self.lessons.dropped["pairs_incomplete"] += len(found) - len(made)
        return self._divided(made)

    def _encoded(self, one: AttemptConversations) -> tuple[tuple[TokenExample, ...], bool]:
        """Return (the examples of an attempt, True if none of it was left out)."""
        made, unusable = tokenise(one.chats, self._tokenizer)
        kept, refused = admit(made, self._config.engine.batch_tokens)
        self.lessons.dropped.update(f"chats_{it.reason}" for it in (*unusable, *refused))
        if unusable and self.lessons.trouble is None:
            self.lessons.trouble = f"{one.rollout}: {unusable[0].detail}"
        return tuple(kept), not (unusable or refused)

    def _divided(self, made: Sequence[TrainingExample]) -> TrainingSet:
        lessons, data = self.lessons, self._config.data
        lessons.dropped = +lessons.dropped
        if not made:
            why = ", ".join(f"{name} {count}" for name, count in lessons.dropped.most_common()) or "nothing was read"
            trouble = [lessons.trouble] if lessons.trouble else []
            raise ConfigError("; ".join([f"data: there is nothing to learn from ({why})", *trouble, *lessons.hints]))
        out = held_out([one.group for one in made], data.held_out, self._config.run.seed)
        lessons.training = [one for one in made if one.group not in out]
        lessons.held_out = [one for one in made if one.group in out]
        return lessons


def held_out(groups: Sequence[str], share: float, seed: int) -> frozenset[str]:
    """Return the groups that are held out: at least one if `share` is above 0, and never all. Raises `ConfigError`."""
    names = sorted(set(groups))
    if share and len(names) == 1:
        raise ConfigError(f"data.held_out: there is one group only ({names[0]}); nothing of it can be held out")
    count = min(max(round(share * len(names)), 1), len(names) - 1) if share else 0
    order = np.random.default_rng(seed).permutation(len(names))
    return frozenset(names[place] for place in order[:count])
