"""The basis of a reward: the task, its outcome, and every call of the attempt in readable form.

Reward functions get it, and `Client.transcript` makes it.
"""

from __future__ import annotations

from pydantic import Field

from penstock.gateway.model.base import Noun
from penstock.gateway.model.rollout import Attempt, Outcome, Rollout
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Message, Turn


class TranscriptCall(Noun):
    """A model call."""

    span: Span
    """Its head."""
    turn: Turn | None = None
    """What it says; None when nothing of it is stored."""


class Transcript(Noun):
    """An attempt, as the gateway saw it."""

    rollout: Rollout
    """The task."""
    attempt: Attempt
    """The attempt, as the tape has it."""
    outcome: Outcome
    """How the agent ended."""
    calls: list[TranscriptCall] = Field(default_factory=list[TranscriptCall])
    """Its model calls in the order in which they began."""
    violations: list[Span] = Field(default_factory=list[Span])
    """Tool calls that a policy did not let run."""

    @property
    def messages(self) -> list[Message]:
        """The conversation of the last call that was answered, its first answer included."""
        for call in reversed(self.calls):
            if call.turn is not None and call.turn.choices:
                return [*call.turn.messages, call.turn.choices[0].message]
        return []

    @property
    def text(self) -> str:
        """The text of the model's last answer."""
        parts = self.messages[-1].parts if self.messages else []
        return "".join(part.text or "" for part in parts if part.type == "text")
