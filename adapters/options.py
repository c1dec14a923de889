"""The caller's choices: what samples and conversations are made of, and how. Free of numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AttemptChoice = Literal["final", "succeeded", "last", "all"]


@dataclass(frozen=True, slots=True)
class Options:
    """The choice of calls that become samples, and the form of the samples."""

    model: str | None = None
    """Calls of this model only; None is the one that most calls of the rollout ask for."""
    agent: str | None = None
    """Calls of this agent only."""
    attempt: AttemptChoice = "final"
    """Which attempt counts: the newest that succeeded and else the newest (`final`), the newest that `succeeded`, the
    `last`, or `all`."""
    merge: bool = True
    """False: a sample for each choice, the way Agent Lightning's transitions are."""
    forced: Literal["keep", "mask"] = "keep"
    """`mask`: tokens that a grammar forced are not trained on. Their engine log-probabilities were taken after the
    grammar's mask and do not compare with the trainer's."""
    longest_prompt: int | None = None
    """Most tokens of a prompt; None is no limit."""
    longest_response: int | None = None
    """Most tokens of a response. A sample that would be longer is split before a call."""
    weights: Mapping[str, float] | None = None
    """Weights of the reward's dimensions; None takes its value."""
    allow: frozenset[str] = frozenset()
    """Reasons that shall not keep a call out, such as `no_reward`, `no_logprobs` or `mixed_versions`."""
