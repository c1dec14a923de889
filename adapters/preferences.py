"""Preferences: pairs of a better and a worse rollout of a group, for DPO (Rafailov et al., 2023).

    found, left = pairs(of_rollouts(samples), margin=0.5)      # tokens: trainer
    found, left = pairs(conversations, margin=0.5)             # text: export, see `row`

Both sides of a pair are whole rollouts of one group whose rewards differ by at least the margin. `best` pairs the best
with the worst, `all` every two. This is the one definition, for files and for `penstock train dpo`: the two
conversations need not begin alike, because users and tools answer each rollout differently. A group without a pair is
reported with its reason, and `pairing_advice` gives advice.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from penstock.adapters.chat import ChatConversation, Wire
from penstock.adapters.selection import Unpaired

if TYPE_CHECKING:
    from penstock.adapters.samples import Sample

PairChoice = Literal["best", "all"]


class PreferenceItem(Protocol):
    """An item that can be preferred to another: a conversation or a trajectory."""

    @property
    def rollout(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def reward(self) -> float | None: ...


R = TypeVar("R", bound=PreferenceItem)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All samples of a rollout, for preferences over tokens."""

    rollout: str
    group: str
    reward: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class PreferencePair(Generic[R]):
    """A preferred and a rejected item of a group."""

    group: str
    """The task that both repeat."""
    chosen: R
    """The item with the higher reward."""
    rejected: R
    """The item with the lower reward."""
    margin: float
    """The difference of their rewards."""


def of_rollouts(samples: Iterable[Sample]) -> list[Trajectory]:
    """Samples grouped by rollout, in the order of each one's first sample."""
    by: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        by[sample.rollout, sample.group].append(sample)
    return [Trajectory(rollout, group, own[0].reward, tuple(own)) for (rollout, group), own in by.items()]


def pairs(
    items: Iterable[R], margin: float = 0.0, which: PairChoice = "best"
) -> tuple[list[PreferencePair[R]], dict[str, Unpaired]]:
    """The pairs of each group, and the groups without one, with the reason. Items with equal rewards are never a pair,
    whatever the margin. Of several items of one rollout the first counts. Raises ValueError for a negative margin.
    """
    if not margin >= 0:
        raise ValueError(f"margin is {margin}: it must not be negative")
    groups: dict[str, dict[str, R]] = defaultdict(dict)
    for item in items:
        groups[item.group].setdefault(item.rollout, item)
    found, left = list[PreferencePair[R]](), dict[str, Unpaired]()
    for group, by_rollout in groups.items():
        made, why = _of_group(group, list(by_rollout.values()), margin, which)
        found += made
        left |= {group: why} if why is not None else {}
    return found, left


def _of_group(
    group: str, items: Sequence[R], margin: float, which: PairChoice
) -> tuple[list[PreferencePair[R]], Unpaired | None]:
    rated = [(item.reward, item) for item in items if item.reward is not None and math.isfinite(item.reward)]
    if len(rated) < 2:
        return [], "alone" if len(items) < 2 else "no_reward"
    ordered = sorted(rated, key=lambda one: one[0], reverse=True)
    two = [(ordered[0], ordered[-1])] if which == "best" else combinations(ordered, 2)
    made = [
        PreferencePair(group, b, w, high - low) for (high, b), (low, w) in two if high > low and high - low >= margin
    ]
    return made, None if made else "equal" if ordered[0][0] == ordered[-1][0] else "too_close"


def pairing_advice(left: Mapping[str, Unpaired], sizes: Mapping[str, int], margin: float) -> list[str]:
    """Advice to the user for more pairs. `left`: groups without a pair, with the reason. `sizes`: number of rollouts of
    each.
    """
    counts = Counter(left.values())
    equal = [sizes.get(group, 0) for group, why in left.items() if why == "equal"]
    said: dict[Unpaired, str] = {
        "equal": f"the rewards of {counts['equal']:,} groups are all equal: run these tasks more often than "
        f"{_about(equal)} times each, take tasks that are sometimes solved, or give rewards that tell more apart "
        "(partial credit, weights of dimensions)",
        "too_close": f"the rewards of {counts['too_close']:,} groups differ by less than the margin, {margin:g}: a "
        "smaller margin takes them",
        "alone": f"{counts['alone']:,} groups have one rollout: run each task several times, as a group",
        "no_reward": f"{counts['no_reward']:,} groups have fewer than two rollouts with a reward: penstock reward",
    }
    return [text for why, text in said.items() if counts[why]]


def _about(sizes: Sequence[int]) -> str:
    mean = sum(sizes) / max(1, len(sizes))
    return f"{mean:.3g}"


def row(pair: PreferencePair[ChatConversation]) -> dict[str, Any]:
    """A pair in the form of TRL and OpenAI: `prompt`, the messages that both begin with, and the continuation of each.
    If the shared beginning reaches an answer of both, the continuations begin with that answer. Else, when users or
    systems said different things first, they begin at the first difference, with any message; the prompt may then be
    empty.
    """
    good, bad = _plain(pair.chosen), _plain(pair.rejected)
    differ = next((at for at, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b), min(len(good), len(bad)))
    shared = min(differ, len(good) - 1, len(bad) - 1)
    cut = next((at for at in range(shared, 0, -1) if _answers(good, at) and _answers(bad, at)), shared)
    return {
        "group": pair.group,
        "chosen_rollout": pair.chosen.rollout,
        "rejected_rollout": pair.rejected.rollout,
        "prompt": good[:cut],
        "chosen": good[cut:],
        "rejected": bad[cut:],
        "tools": pair.chosen.tools,
        "chosen_reward": pair.chosen.reward,
        "rejected_reward": pair.rejected.reward,
        "margin": pair.margin,
    }


def _answers(messages: Sequence[Wire], at: int) -> bool:
    return messages[at]["role"] == "assistant"


def _plain(conversation: ChatConversation) -> list[Wire]:
    return [{key: value for key, value in wire.items() if key != "weight"} for wire in conversation.messages]
