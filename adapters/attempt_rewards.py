"""The rewards of an attempt and its calls.

Rewards are spans: of the whole attempt (terminal), or of one call (per turn). Among several of one kind the newest
trusted one counts, even if it is late.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.adapters.episode import EpisodeAttempt
from penstock.adapters.report import Note, Reason
from penstock.gateway.model.rollout import Reward
from penstock.gateway.model.span import Span
from penstock.gateway.wire.dialects.loose_json import obj

K = TypeVar("K")

PREFIX = "penstock.reward."
VALUE = "reward"
"""Name that stands for a reward's value among its dimensions, unless a dimension has that name."""


@dataclass(frozen=True, slots=True)
class AttemptRewards:
    """The rewards of an attempt."""

    reward: float | None
    """The terminal reward; None when there is none, see `trouble`."""
    dimensions: Mapping[str, float]
    """Named scores of the whole attempt."""
    turns: Mapping[int, float]
    """Rewards of calls, by the call's sequence."""
    trouble: tuple[Reason, str] | None = None
    """The reason why there is no reward, as a code and in words; None when there is one."""
    notes: Counter[Note] = field(default_factory=Counter[Note])
    """Counts of odd rewards."""


def collect_rewards(one: EpisodeAttempt, weights: Mapping[str, float] | None = None) -> AttemptRewards:
    """The rewards of an attempt. With `weights` the terminal reward is the weighted sum of dimensions; the name
    `reward` stands for the value. If a dimension is missing, there is no reward yet.
    """
    given = [_reward(span) for span in one.spans if span.kind == "reward"]
    trusted = [reward for reward in given if reward.trusted]
    whole = [reward for reward in trusted if reward.span is None]
    value = next((reward.value for reward in reversed(whole) if reward.value is not None), None)
    turns = {reward.span: reward.value for reward in trusted if reward.span is not None and reward.value is not None}
    named: dict[str, float] = {}
    for reward in whole:
        named |= reward.dimensions
    scores = ({} if value is None else {VALUE: value}) | named
    terminal, trouble = _terminal(one, given, value, scores, turns, weights)
    notes: Counter[Note] = Counter({"late_reward": sum(reward.late for reward in trusted)})
    notes["turn_rewards_only"] = int(weights is None and value is None and bool(turns) and terminal is not None)
    notes["odd_reward"] = sum(not math.isfinite(it) for it in (*turns.values(), *named.values()))
    return AttemptRewards(terminal, _finite(named), _finite(turns), trouble, +notes)


def _finite(scores: Mapping[K, float]) -> dict[K, float]:
    return {name: score for name, score in scores.items() if math.isfinite(score)}


def _terminal(
    one: EpisodeAttempt,
    given: Sequence[Reward],
    value: float | None,
    scores: Mapping[str, float],
    turns: Mapping[int, float],
    weights: Mapping[str, float] | None,
) -> tuple[float | None, tuple[Reason, str] | None]:
    if weights is not None:
        missing = sorted(weights.keys() - scores.keys())
        if missing:
            return None, ("no_reward", f"nobody said anything of {', '.join(missing)}")
        reward: float | None = sum(weight * scores[name] for name, weight in weights.items())
    elif value is None and turns:
        # Only calls have rewards: the attempt's own field holds the newest of these, which is no terminal reward.
        reward = 0.0
    else:
        reward = value if given else one.attempt.reward
    if reward is None:
        untrusted = any(reward.value is not None and not reward.trusted for reward in given)
        found: Reason = "untrusted_reward" if untrusted else "no_reward"
        return None, (found, "only the agent says how well it went" if untrusted else "nobody said how well it went")
    return (reward, None) if math.isfinite(reward) else (None, ("nan_reward", f"its reward is {reward}"))


def _reward(span: Span) -> Reward:
    """The reward as it is stored, unchecked: one that did not come through the control API may be odd."""
    found: dict[str, Any] = {
        name.removeprefix(PREFIX): value for name, value in (span.attributes or {}).items() if name.startswith(PREFIX)
    }
    scores = obj(found.get("dimensions")).items()
    return Reward.model_construct(
        value=_number(found.get("value")),
        dimensions={name: number for name, score in scores if (number := _number(score)) is not None},
        trusted=found.get("trusted", True) is True,
        late=found.get("late", False) is True,
        span=found["span"] if isinstance(found.get("span"), int) else None,
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
