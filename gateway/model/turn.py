"""The content of a call in any wire format: messages, tools, choices."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.gateway.model.base import Noun
from penstock.gateway.model.span import Usage


class Part(Noun):
    """A piece of a message; the types are those of the OpenTelemetry GenAI conventions."""

    type: Literal["text", "reasoning", "tool_call", "tool_call_response", "media", "refusal", "unknown"]
    """What it is."""
    text: str | None = None
    """The text of text, reasoning, refusal and textual tool results."""
    id: str | None = None
    """Tool call id of tool_call and tool_call_response."""
    name: str | None = None
    """Tool name of tool_call."""
    arguments: str | None = None
    """Arguments of tool_call exactly as generated: JSON text, which may be broken."""
    data: Any = None
    """The wire object of media and unknown, and of what text alone does not tell (failed results, hidden reasoning)."""


class Message(Noun):
    """One message of a conversation."""

    role: str
    """system, developer, user, assistant or tool."""
    parts: list[Part]
    """Its pieces in order."""
    name: str | None = None
    """The speaker's name, where given."""


class Tool(Noun):
    """A tool offered to the model."""

    name: str
    """Its name (or its type, for provider-side tools)."""
    description: str | None = None
    """What the model is told about it."""
    parameters: Any = None
    """JSON schema of its arguments."""


class Choice(Noun):
    """One answer of a response."""

    index: int = 0
    """Its number among the n that were asked for."""
    message: Message
    """What the model said, thought and called."""
    finish: str | None = None
    """Why it stopped, as the provider wrote it."""


class Sampling(Noun):
    """How an answer was sampled, as far as the bytes tell; None where only the engine knows."""

    temperature: float | None = None
    """Divides the logits; 1 is the model's own distribution, 0 greedy."""
    top_p: float | None = None
    """Probability mass that is sampled from; 1 is all of it."""
    top_k: int | None = None
    """Tokens that are sampled from; 0 or -1 is all of them."""
    max_tokens: int | None = None
    """Most tokens of an answer."""
    seed: int | None = None
    """Seed of the engine's random numbers."""
    n: int = 1
    """Answers to one prompt."""
    stop: list[str] = Field(default_factory=list[str])
    """Texts that end an answer."""


class Turn(Noun):
    """An exchange, read: the same shape for every dialect. What could not be read is in `problems`."""

    dialect: str
    """The wire format it was read as."""
    model: str | None = None
    """Model asked for."""
    model_served: str | None = None
    """Model that answered."""
    response_id: str | None = None
    """The provider's id of the response."""
    stream: bool = False
    """True when the response came as events."""
    sampling: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Everything the agent's request set besides messages, tools, model and stream."""
    effective: Sampling = Sampling()
    """How the answer was sampled: what the engine was sent, and what it repeats."""
    forced: str | None = None
    """What made a grammar force tokens of the answer; None when nothing did."""
    messages: list[Message] = Field(default_factory=list[Message])
    """The conversation that was sent, system text first."""
    tools: list[Tool] = Field(default_factory=list[Tool])
    """Tools on offer."""
    choices: list[Choice] = Field(default_factory=list[Choice])
    """What came back."""
    usage: Usage | None = None
    """Token counts, where reported."""
    error: str | None = None
    """The provider's error message, when it answered with one."""
    problems: list[str] = Field(default_factory=list[str])
    """What could not be read and why; the raw bytes are still on the tape."""
