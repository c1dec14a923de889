"""What advice is made of: rollouts with their rewards, and what the tape says of how they went. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from penstock.trainer.apo.candidate import Candidate

Stance = Literal["seed", "terse", "steps", "checklist", "scratch", "mended"]
"""How a prompt of the probe came about: as it is; the same in few words; as steps; with what the graders' reasons ask
for; written without seeing the seed; the best of these, with what the reasons ask for again."""
WRITTEN: Final[tuple[Stance, ...]] = ("checklist", "scratch", "mended")
"""Those that are to mend failures. The others say what the seed says."""


class Arm(NamedTuple):
    """A prompt of the probe."""

    candidate: Candidate
    """Its texts."""
    stance: Stance
    """How it came about."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A rollout."""

    prompt: str
    """Id of the candidate whose texts it had."""
    task: str
    """Its task."""
    reward: float | None
    """Between 0 and 1; None where nobody gave one."""
    reason: str = ""
    """Why, in the grader's words."""
    output: str = ""
    """What the agent answered, or a digest of it; empty where it is not known."""
    judged: tuple[float, ...] = ()
    """All rewards that this one rollout was given by the same source, where there are several."""
    tools: int = 0
    """Tool calls."""
    misused: int = 0
    """Those that failed because they were asked for wrongly."""
    broken: int = 0
    """Those that failed by themselves, such as by a timeout."""
    tokens: int | None = None
    """Tokens of the agent, in and out; None where nobody counted them."""
    rollout: str = ""
    """Its name on the tape."""


class Seen(NamedTuple):
    """An observation that has a reward."""

    observation: Observation
    """The rollout."""
    reward: float
    """Its reward."""


def rewarded(observations: Sequence[Observation]) -> list[Seen]:
    """Those that have a reward."""
    return [Seen(one, one.reward) for one in observations if one.reward is not None]
