"""The content of a call: its bytes, its messages, tools and choices in any wire format, and an attempt's transcript."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, cast

from pydantic import Field

from penstock.gateway.model.base import Noun
from penstock.gateway.model.rollout import Attempt, Outcome, Rollout
from penstock.gateway.model.span import Span, Usage


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
    """The sampling settings of an answer, as far as the bytes tell; None where only the engine knows."""

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

    @property
    def previous_response(self) -> str | None:
        """The provider's id of the response that the request continues, where it names one in place of the earlier
        conversation."""
        thread = self.sampling.get("thread")
        names = [self.sampling.get(name) for name in ("previous_response_id", "previous_interaction_id")]
        if isinstance(thread, dict):
            names.append(cast("dict[str, Any]", thread).get("previous_message_id"))
        return next((name for name in names if isinstance(name, str)), None)


# The texts that a call adds to a conversation: `text~` searches them and the index keeps them.

MOST: Final = 4 << 20
"""Most characters of all passages of a span; the rest is left out, wherever they are read."""


class Passage(NamedTuple):
    """A text that one party sends to another."""

    answer: bool
    """True if it is part of the call's answer."""
    role: str
    """system, developer, user, assistant or tool; empty where the sender is not known."""
    kind: str
    """A part's type: `text`, `reasoning`, `tool_call`, `tool_call_response`, `refusal`, `unknown` (JSON that this
    version has no name for); or `error`, `body` (of a call in no known format) or `attribute`."""
    name: str | None
    """The name of the tool or the attribute."""
    id: str | None
    """The id of the tool call."""
    text: str
    """The text; that of a tool call is `NAME(ARGUMENTS)`, with the arguments exactly as they were generated."""


# The bytes of a call.


class Chunk(Noun):
    """One read from the upstream connection."""

    at_ns: int
    """Since the span's start; ns."""
    size: int
    """Body bytes that it carried."""


class Side(Noun):
    """The exchange between the gateway and one party in another wire format than the call's own."""

    who: Literal["agent", "engine", "receipt"]
    """The party: the agent, whose call was translated, or the engine, which was asked with token ids. A
    `receipt` is what the agent was told at first, where another call has fetched its answer."""
    dialect: str
    """Wire format spoken with it."""
    path: str
    """Path and query that were called, secrets masked."""
    request_body: bytes
    """As the agent sent it, or as the engine got it."""
    response_body: bytes
    """As the agent got it, or as the engine sent it; without transfer framing."""


class Exchange(Noun):
    """The bytes of a call, exactly as they went upstream and came back. Headers are in order; secrets are masked."""

    url: str
    """What was called, secrets masked."""
    request_headers: list[tuple[str, str]]
    """As sent upstream."""
    request_body: bytes
    """As sent upstream, transfer framing removed."""
    response_headers: list[tuple[str, str]]
    """As received."""
    response_body: bytes
    """As received, transfer framing removed, content encoding kept."""
    trailers: list[tuple[str, str]] = Field(default_factory=list[tuple[str, str]])
    """Trailer fields after a chunked response."""
    chunks: list[Chunk] = Field(default_factory=list[Chunk])
    """Arrival of the response body, read by read."""
    sides: list[Side] = Field(default_factory=list[Side])
    """Parties that were spoken with in another wire format."""


# The basis of a reward: the task, its outcome, and every call of the attempt in readable form.
#
# Reward functions get it, and `Client.transcript` makes it.


class TranscriptCall(Noun):
    """A model call of a transcript, in readable form."""

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
