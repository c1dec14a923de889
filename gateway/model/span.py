"""The nouns: what is on the tape and what the control API speaks.

A *rollout* is one task given to one agent, an *attempt* one try at it, a *span* one thing that happened in an
attempt. A model call is a span of kind `llm` and owns an *exchange*: the exact bytes that were sent and received.
A *turn* is an interpretation of an exchange (messages, tool calls, usage), made when it is read and never stored,
so that a mended parser mends the past.

Times are integers in nanoseconds since the epoch, durations in nanoseconds, sizes in bytes.
How heads are laid out on the tape is `gateway.store.records`, which a test holds against `Span`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

ID_PATTERN = r"^[A-Za-z0-9._-]{1,128}$"


def _no_dots(value: str) -> str:
    if value in (".", ".."):
        raise ValueError("it may not be . or ..: no path could name it")
    return value


Id = Annotated[str, StringConstraints(pattern=ID_PATTERN), AfterValidator(_no_dots)]

LONGEST_S = 10 * 365 * 86400
"""Ten years, in seconds: longer than anything waits."""

Mode = Literal["train", "val", "test", "online"]
Origin = Literal["queued", "header", "implicit"]
AMBIGUOUS = "penstock.ambiguous"
"""Attribute of a call without an address that could be another rollout's as well."""
Kind = Literal["llm", "tool", "reward", "event", "otel"]


class Noun(BaseModel):
    """Base of every noun: unknown fields are refused, so that a misspelt one is an error and not a silence."""

    model_config = ConfigDict(extra="forbid")


class RolloutStatus(StrEnum):
    """Where a rollout stands; `gateway.model.lifecycle` has the legal moves."""

    QUEUING = "queuing"
    """Waits for its first attempt."""
    PREPARING = "preparing"
    """A worker has claimed it; nothing has been heard of the agent yet."""
    RUNNING = "running"
    """Its agent is at work."""
    SUCCEEDED = "succeeded"
    """An attempt succeeded."""
    FAILED = "failed"
    """Its last attempt did not succeed."""
    CANCELLED = "cancelled"
    """Somebody did not want it any more."""
    REQUEUING = "requeuing"
    """Waits for another attempt."""


class AttemptStatus(StrEnum):
    """Where one try at a rollout stands."""

    PREPARING = "preparing"
    """Claimed; nothing has been heard of the agent yet."""
    RUNNING = "running"
    """The agent is at work."""
    SUCCEEDED = "succeeded"
    """The agent ended well."""
    FAILED = "failed"
    """The agent ended badly."""
    TIMEOUT = "timeout"
    """It took longer than `config.timeout_s`."""
    UNRESPONSIVE = "unresponsive"
    """Its worker's lease ran out, or nothing was heard of it for `config.unresponsive_s`."""
    CANCELLED = "cancelled"
    """Its rollout was cancelled."""
    ENVIRONMENT = "environment"
    """It was handed back: the agent could not work where it was run. It does not count as a try."""


Retry = Literal["failed", "timeout", "unresponsive"]
"""Ends of an attempt after which another may be made."""
RewardSource = Literal["runner", "judge", "user", "agent", "rule"]
"""Who says how well it went; `rule` is `reward_on_failure`."""


class SpanStatus(StrEnum):
    """How a span ended. `open` is the only one that can still change."""

    OPEN = "open"
    """Still running (seen on the tape once it has run for a moment)."""
    OK = "ok"
    """The answer was passed on completely, its HTTP status is below 400, and it is no error and not cut short."""
    ERROR = "error"
    """The provider answered with an error (with whatever HTTP status), broke off, or could not be reached; `error` says
    which."""
    CANCELLED = "cancelled"
    """The client went away before the answer was complete."""
    INTERRUPTED = "interrupted"
    """The gateway died while the call was running; noticed at the next start."""


class Usage(Noun):
    """Token counts as the provider reported them, or as its token ids tell; None where nobody counted."""

    input_tokens: int | None = None
    """Prompt tokens, cached ones included."""
    output_tokens: int | None = None
    """Generated tokens, reasoning included."""
    cached_tokens: int | None = None
    """The part of `input_tokens` that was read from the provider's prompt cache."""
    cache_write_tokens: int | None = None
    """Prompt tokens written to the provider's prompt cache."""
    reasoning_tokens: int | None = None
    """The part of `output_tokens` that was hidden reasoning."""


class Estimate(Noun):
    """Token counts that nobody gave, guessed from the length of the texts; None where there is a count."""

    input_tokens: int | None = None
    """About how many tokens the prompt has."""
    output_tokens: int | None = None
    """About how many tokens were generated, as far as the answer came."""


COUNTED = frozenset({"chat", "completions", "responses", "messages", "gemini"})
"""Dialects whose calls use tokens up on both sides."""
EMBEDDING = frozenset({"embeddings", "gemini_embeddings"})
"""Those that generate none."""


class Span(Noun):
    """The head of a span: all that a list shows. Bodies are apart, behind `body`."""

    rollout: Id
    """The rollout it belongs to."""
    attempt: Id
    """The attempt it belongs to."""
    sequence: int
    """Its place within the attempt, from 1, by start."""
    kind: Kind = "llm"
    """What happened."""
    name: str | None = None
    """Name of what is no call: `reward`, `stdout`, `stderr`, an OpenTelemetry span's own name ..."""
    status: SpanStatus = SpanStatus.OK
    """How it ended."""
    start_ns: int = 0
    """When the request's head had arrived; ns since the epoch."""
    end_ns: int | None = None
    """When the last byte was passed on, or the call failed; ns since the epoch."""
    first_byte_ns: int | None = None
    """From start to the first byte of the response body; ns."""
    dialect: str = "opaque"
    """Wire format spoken: chat, completions, responses, messages, embeddings, models, count_tokens, gemini,
    gemini_count_tokens, gemini_embeddings or opaque."""
    method: str = "POST"
    """HTTP method."""
    path: str = ""
    """Path and query below the rollout's address, secrets masked."""
    upstream: str | None = None
    """Name of the upstream that was called; None when none was reached."""
    http_status: int | None = None
    """Status the client was sent; None when it got none."""
    error: str | None = None
    """Short reason when the status is not ok: `http_429`, `connect`, `upstream_closed`, `timeout` ... Of an answer with
    a good HTTP status: `stream_error` (an error came among its events), `error_body` (its body is an error),
    `ended_early` (its stream has no end)."""
    model: str | None = None
    """Model asked for."""
    model_served: str | None = None
    """Model that the response says it came from."""
    stream: bool = False
    """True when the response was a stream of events."""
    finish: str | None = None
    """Finish reason of the first choice, as the provider wrote it."""
    response_id: str | None = None
    """The provider's id of the response."""
    usage: Usage | None = None
    """Token counts, where reported."""
    tool_calls: int = 0
    """How many tool calls the response asked for."""
    choices: int = 0
    """How many choices the response holds (n)."""
    agent: str | None = None
    """Name of the agent or call-site, where the address gave one."""
    request_bytes: int = 0
    """Size of the request body."""
    response_bytes: int = 0
    """Size of the response body as it was received (still compressed if it was)."""
    body: int | None = None
    """Reference to the exchange on the tape; None while nothing is stored."""
    truncated: bool = False
    """True when the body was too large to be kept whole; the stored part is a prefix."""
    retry_of: int | None = None
    """Sequence of the call that this one repeats, when the client said it was a retry."""
    versions: dict[str, str] | None = None
    """Versions of released resources that served it: name -> version."""
    arm: str | None = None
    """RELEASE:ARM of each release that its rollout takes part in, with commas between them."""
    trace_id: str | None = None
    """W3C trace id, 32 hex digits. Derived from the attempt unless the client sent a traceparent."""
    span_id: str | None = None
    """W3C span id, 16 hex digits, derived from trace id and sequence."""
    parent_id: str | None = None
    """Span id of the caller, from the client's traceparent."""
    attributes: dict[str, Any] | None = None
    """What only some kinds have, by OpenTelemetry name; a reward is read by `Reward.of`."""
    estimate: Estimate | None = None
    """Of a call whose tokens nobody counted."""

    @property
    def duration_ns(self) -> int | None:
        """Length of the call, None while it is open."""
        return None if self.end_ns is None else self.end_ns - self.start_ns


class Totals(Noun):
    """Sums over the spans of an attempt or a rollout."""

    calls: int = 0
    """Finished model calls."""
    errors: int = 0
    """Those that ended neither ok nor cancelled."""
    cancelled: int = 0
    """Those whose client went away."""
    input_tokens: int | None = 0
    """Prompt tokens that were counted; None when there are calls and none was."""
    output_tokens: int | None = 0
    """Generated tokens that were counted; None when there are calls and none was."""
    tool_calls: int = 0
    """Tool calls asked for."""
    gaps: int = 0
    """Calls that were answered but could not be recorded (the tape failed)."""
    uncounted: int = 0
    """Calls that used tokens which nobody counted: where there are any, the sums of tokens are lower bounds."""
    ambiguous: int = 0
    """Calls without an address that could be another rollout's as well: two agents have done exactly the same."""

    @model_validator(mode="after")
    def _unknown_is_not_zero(self) -> Self:
        if self.uncounted:
            self.input_tokens, self.output_tokens = self.input_tokens or None, self.output_tokens or None
        return self


class RolloutConfig(Noun):
    """How the attempts at a rollout are watched and repeated."""

    timeout_s: float | None = Field(default=None, gt=0, le=LONGEST_S, allow_inf_nan=False)
    """Seconds from the claim after which an attempt ends as `timeout`; None is no limit."""
    unresponsive_s: float | None = Field(default=None, gt=0, le=LONGEST_S, allow_inf_nan=False)
    """Seconds without a call or another sign of the agent's own after which an attempt is `unresponsive`. While a call
    runs it is not silent."""
    max_attempts: int = Field(default=3, ge=1, le=1000)
    """How many attempts may be made."""
    retry_on: list[Retry] = Field(default_factory=lambda: list[Retry](["unresponsive"]))
    """Ends of an attempt after which another one is made, while there are some left."""
    reward_on_failure: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of the attempt after which the rollout has failed, where it has none; None gives it none."""


class Outcome(Noun):
    """What is known of the end of an attempt."""

    exit_code: int | None = None
    """What the agent's process exited with."""
    signal: str | None = None
    """Name of the signal that ended it, such as `SIGKILL`."""
    duration_ns: int | None = None
    """How long the agent ran, as its runner measured it; ns."""
    reason: str | None = Field(default=None, max_length=2000)
    """Why it ended like this, for a person."""
    output: Any = None
    """What the agent returned: the last JSON line of its output, or the callable's result."""


class Judgement(Noun):
    """How well an attempt, or one call of it, went: what is said when a reward is given."""

    value: float | None = Field(default=None, allow_inf_nan=False)
    """The reward; None when only dimensions are given."""
    dimensions: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=dict[str, float])
    """Several named scores."""
    source: RewardSource = "user"
    """Who says so. What comes with an agent's own token is always `agent`."""
    reason: str | None = Field(default=None, max_length=10_000)
    """Why, for a person."""
    span: int | None = Field(default=None, ge=1, lt=2**32)
    """Sequence of the span that it judges; None for the whole attempt."""
    key: str | None = Field(default=None, pattern=r"^[!-~]{1,128}$")
    """Makes it safe to send again: of one attempt's rewards with the same key only the first is kept (those that are
    trusted and those that are not apart). Printable ASCII without spaces."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.value is None and not self.dimensions:
            raise ValueError("a reward needs a value or dimensions")
        return self


class Reward(Judgement):
    """A judgement as it is kept: a span of kind `reward`."""

    trusted: bool = True
    """False for what an agent says of itself, unless `rewards.trust_agent` is set: not trained on."""
    late: bool = False
    """True when it came after the attempt had ended."""

    def attributes(self) -> dict[str, Any]:
        """As a span holds it."""
        return {f"penstock.reward.{name}": value for name, value in self.model_dump(exclude_defaults=True).items()}

    @classmethod
    def of(cls, span: Span) -> Reward:
        """The reward that a span of kind `reward` holds."""
        found = (span.attributes or {}).items()
        return cls(**{name.removeprefix("penstock.reward."): value for name, value in found})


class Attempt(Noun):
    """One try at a rollout."""

    rollout: Id
    """The rollout it is a try at."""
    id: Id
    """Its name within the rollout."""
    sequence: int = 1
    """Its number within the rollout, from 1."""
    status: AttemptStatus = AttemptStatus.RUNNING
    """Where it stands."""
    created_ns: int = 0
    """When it was claimed, or first seen."""
    last_seen_ns: int = 0
    """When it was last heard of: when its newest call began or ended."""
    spans: int = 0
    """The highest span sequence given out."""
    totals: Totals = Field(default_factory=Totals)
    """Sums over its spans."""
    worker: str | None = None
    """The worker that has claimed it; None when it did not come from the queue."""
    lease_ns: int | None = None
    """When its worker loses it unless it is heard of before; ns since the epoch."""
    ended_ns: int | None = None
    """When it ended; None while it has not."""
    outcome: Outcome | None = None
    """What is known of its end."""
    reward: float | None = None
    """Value of the newest trusted reward; late ones count."""
    reward_on_failure: float | None = None
    """What its worker has said for the case that the rollout fails with it; the rollout's configuration is first."""


class Rollout(Noun):
    """One task given to one agent."""

    id: Id
    """Its name, unique on the tape."""
    origin: Origin = "header"
    """Made by the queue, by an address in a request, or guessed from the conversation."""
    mode: Mode = "online"
    """What it is for."""
    status: RolloutStatus = RolloutStatus.RUNNING
    """Where it stands."""
    created_ns: int = 0
    """When it was first seen."""
    input: Any = None
    """The task, any JSON."""
    group: str | None = None
    """The task it repeats, for group-relative advantage."""
    metadata: dict[str, Any] | None = None
    """Anything its maker wants to find again."""
    priority: int = 0
    """The highest is handed out first; within one priority the oldest."""
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    """How its attempts are watched and repeated."""
    tries: int = 0
    """Attempts that the queue has handed out, less those that were handed back."""
    attempt: str | None = None
    """The attempt that the queue handed out last."""
    place: int | None = None
    """Its place in the queue: of one priority the lowest is handed out first. None when it was never queued."""
    ended_ns: int | None = None
    """When it came into its final state; None while it has not."""


class RolloutSummary(Rollout):
    """A rollout with what became of it."""

    attempts: list[Attempt] = Field(default_factory=list[Attempt])
    """Its attempts, oldest first."""
    totals: Totals = Field(default_factory=Totals)
    """Sums over its attempts."""
    last_seen_ns: int = 0
    """When it was last heard of: when its newest call began or ended."""
    reward: float | None = None
    """The reward of its newest attempt that has one."""


class Figures(Noun):
    """What a worker's machine and agents use."""

    cpu_percent: float | None = None
    """CPU of its agents; 100 is one core."""
    memory_bytes: int | None = None
    """Resident memory of its agents."""
    gpu_percent: float | None = None
    """Busiest GPU of its machine."""
    gpu_memory_bytes: int | None = None
    """Memory in use on all its GPUs."""


class Worker(Noun):
    """Something that runs rollouts."""

    id: Id
    """Its name."""
    first_seen_ns: int = 0
    """When it was first heard of."""
    last_seen_ns: int = 0
    """When it was last heard of."""
    figures: Figures = Field(default_factory=Figures)
    """As of its last heartbeat."""
    attempts: list[str] = Field(default_factory=list[str])
    """What it is working on: ROLLOUT/ATTEMPT."""
    finished: int = 0
    """Attempts that it has finished."""


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


class Chunk(Noun):
    """One read from the upstream connection."""

    at_ns: int
    """Since the span's start; ns."""
    size: int
    """Body bytes that it carried."""


class Side(Noun):
    """What was said between the gateway and one party in another wire format than the exchange's own."""

    who: Literal["agent", "engine"]
    """The party: the agent, whose call was translated, or the engine, which was asked with token ids."""
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


class Change(Noun):
    """One entry of the change feed."""

    cursor: int
    """Its place in the feed; ask for `since=cursor` to go on after it."""
    kind: Literal["rollout", "attempt", "span", "resource", "release", "run"]
    """What changed."""
    name: str | None = None
    """Set when kind is resource, release or run: which one."""
    rollout: Rollout | None = None
    """Set when kind is rollout."""
    attempt: Attempt | None = None
    """Set when kind is attempt."""
    span: Span | None = None
    """Set when kind is span: its newest head."""
