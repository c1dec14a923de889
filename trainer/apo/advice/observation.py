"""The input of advice: rollouts with their rewards, and facts about them from the tape. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from penstock.trainer.apo.candidate import Candidate

Stance = Literal["seed", "terse", "steps", "checklist", "scratch", "mended"]
"""Origin of a probe's prompt: the seed; the same in few words; as steps; with the instructions that the graders'
reasons ask for; written without seeing the seed; the best of these, with such instructions once more."""
WRITTEN: Final[tuple[Stance, ...]] = ("checklist", "scratch", "mended")
"""Stances that should fix failures. The others say the same as the seed."""


class Arm(NamedTuple):
    """A prompt of the probe."""

    candidate: Candidate
    """Its texts."""
    stance: Stance
    """Its origin."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A rollout, with its reward and the facts from the tape."""

    prompt: str
    """Id of the candidate whose texts it had."""
    task: str
    """Task id."""
    reward: float | None
    """Between 0 and 1; None without one."""
    reason: str = ""
    """Reason of the reward, in the grader's words."""
    output: str = ""
    """The agent's answer or a digest of it; empty if unknown."""
    judged: tuple[float, ...] = ()
    """All rewards of this rollout by the same source, if there are several."""
    tools: int = 0
    """Number of tool calls."""
    misused: int = 0
    """Tool calls that failed because the agent's request was wrong."""
    broken: int = 0
    """Tool calls that failed by themselves, such as by a timeout."""
    tokens: int | None = None
    """Tokens of the agent, in and out; None if unknown."""
    rollout: str = ""
    """Rollout id on the tape."""


class RewardedObservation(NamedTuple):
    """An observation that has a reward."""

    observation: Observation
    """The rollout."""
    reward: float
    """Its reward."""


def with_rewards(observations: Sequence[Observation]) -> list[RewardedObservation]:
    """Return the observations that have a reward."""
    return [RewardedObservation(one, one.reward) for one in observations if one.reward is not None]
