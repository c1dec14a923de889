"""Calls that wait for a person, in memory: a gateway that restarts has none, and the clients of such calls notice.

Each question ends once: a person answers, its time is over, or its call is taken back because its client has left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import Literal

from pydantic import Field

from penstock.gateway.model.base import ActionRequest, Id, Noun


class Question(Noun):
    """A tool call that waits for a person."""

    id: str
    """What it is answered by."""
    rule: str
    """The rule that asks."""
    message: str | None = None
    """What the rule says."""
    server: str
    """The server of the tool."""
    tool: str
    """The tool, by its server's own name."""
    arguments: str
    """What it would be run with, as JSON."""
    rollout: Id
    """The rollout of the call."""
    attempt: Id
    """Its attempt."""
    asked_ns: int
    """Since when it waits; ns since the epoch."""
    until_ns: int
    """When it is refused unless somebody answers; ns since the epoch."""


class QuestionList(Noun):
    """The tool calls that wait for a person."""

    waiting: list[Question]
    """The longest wait first."""


class PolicyAnswer(ActionRequest):
    """The decision of a person on a tool call that waits."""

    verdict: Literal["approve", "refuse"]
    """Whether the call may run."""
    why: str = Field(default="", max_length=1000)
    """Why, in a sentence. If the call is refused the agent's model is told."""


QuestionEnd = PolicyAnswer | Literal["timeout", "stopped"]
EndCallback = Callable[[QuestionEnd], None]


@dataclass(slots=True)
class _QueuedQuestion:
    question: Question
    done: EndCallback


class QuestionQueue:
    """The questions that wait for a person."""

    def __init__(self) -> None:
        self._waiting: dict[str, _QueuedQuestion] = {}

    def new_id(self) -> str:
        """An id that no other question has."""
        while (made := token_hex(4)) in self._waiting:
            pass
        return made

    def ask(self, question: Question, done: EndCallback) -> None:
        """Add a question; `done` is called once unless the question is taken back."""
        self._waiting[question.id] = _QueuedQuestion(question, done)

    def take_back(self, id: str) -> bool:
        """Remove a question because its client has left; False if it had ended before."""
        return self._waiting.pop(id, None) is not None

    def answer(self, id: str, answer: PolicyAnswer) -> Question | None:
        """Answer a question; None if it does not wait, or no longer waits."""
        found = self._waiting.pop(id, None)
        if found is None:
            return None
        found.done(answer)
        return found.question

    def sweep(self, now_ns: int) -> None:
        """End the questions whose time is over."""
        late = [id for id, one in self._waiting.items() if one.question.until_ns <= now_ns]
        for id in late:
            self._waiting.pop(id).done("timeout")

    def close(self) -> None:
        """End all questions because the gateway stops."""
        for id in list(self._waiting):
            self._waiting.pop(id).done("stopped")

    @property
    def waiting(self) -> list[Question]:
        """The waiting questions, the oldest first."""
        return [one.question for one in self._waiting.values()]
