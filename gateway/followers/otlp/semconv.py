"""The OpenTelemetry names that are read and written; those of the facts of a span are in `model.facts`.

Sources, all of status Development: the GenAI and MCP conventions of open-telemetry/semantic-conventions-genai at
ac48b1f9 (November 2026, without a release), which build on semantic-conventions 1.44. The counts and costs that spans
of agents tell are read by `reading.told_calls`. `otel.*` are the names that the specification prescribes for
parts of a span for which a format has no field (OpenTelemetry to non-OTLP formats). A table has a row for each
attribute: its name and where its value comes from; a value of None is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from penstock.gateway.model.facts import SPAN_FACTS, Attribute, reader
from penstock.gateway.model.rollout import Attempt, AttemptStatus, Reward
from penstock.gateway.model.span import Span
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.base import GenAiNames

# In ------------------------------------------------------------------------------------------------------------------

ROLLOUT = ("penstock.rollout_id", "agentlightning.rollout_id")
"""Attributes of a resource or a span that name its rollout; the first that is present counts."""
ATTEMPT = ("penstock.attempt_id", "agentlightning.attempt_id")
"""Attributes that name the attempt in the same way."""
REWARD, REWARD_REASON = "penstock.reward", "penstock.reward.reason"
REWARD_DIMENSION = "penstock.reward.dimensions."
RESPONSE_ID, REQUEST_ID, SESSION_ID = "gen_ai.response.id", "anthropic.request.id", "anthropic.session.id"
LIGHTNING_ROLLOUT, LIGHTNING_ATTEMPT = "agentlightning.rollout_id", "agentlightning.attempt_id"
LIGHTNING_LINK = "agentlightning.link."
LIGHTNING_REWARD, LIGHTNING_VALUE = "agentlightning.reward.", "agentlightning.reward.0.value"
"""The first is followed by `N.value` and `N.name`; 0 is the reward, all are dimensions when there are several."""
AGENT, SERVICE = "gen_ai.agent.name", "service.name"
UNKNOWN_SERVICE = "unknown_service"
"""The beginning of an SDK's value where the user has not named the service."""
ERROR = "error.type"

EVENT_NAME = "event.name"
"""The attribute with a log record's name, where the record has no field for it."""
SIGNAL, LOG = "otel.signal", "logs"
"""Marks an event that came as a log record."""
BODY, SEVERITY = "otel.body", "otel.severity"
SEVERITIES = ("TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL")
"""The names of the severity numbers 1 to 24, four numbers each."""
SPAN_KIND = "span.kind"
SPAN_KINDS = (None, "internal", "server", "client", "producer", "consumer")
STATUS_CODE, STATUS_DESCRIPTION = "otel.status_code", "otel.status_description"
STATUS_OK = "OK"
"""The status code of a span that reports success; most report nothing."""
SCOPE_NAME, SCOPE_VERSION = "otel.scope.name", "otel.scope.version"
RESOURCE, EVENTS, LINKS = "otel.resource", "otel.events", "otel.links"
TRACE_STATE = "otel.trace_state"
DROPPED, TRUNCATED = "otel.dropped_attributes_count", "otel.truncated_attributes"

# Out -----------------------------------------------------------------------------------------------------------------

PROVIDERS = {
    ".openai.azure.com": "azure.ai.openai",
    ".cognitiveservices.azure.com": "azure.ai.openai",
    ".services.ai.azure.com": "azure.ai.inference",
    ".amazonaws.com": "aws.bedrock",
    "aiplatform.googleapis.com": "gcp.vertex_ai",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "api.cohere.com": "cohere",
    "api.deepseek.com": "deepseek",
    "api.groq.com": "groq",
    "api.mistral.ai": "mistral_ai",
    "api.moonshot.ai": "moonshot_ai",
    "api.perplexity.ai": "perplexity",
    "api.x.ai": "x_ai",
}
"""`gen_ai.provider.name` by the end of the upstream's host, where that is more specific than the dialect."""

Row = tuple[str, Callable[[Any], Any]]


def _otel(field: str) -> Callable[[Span], str | None]:
    return lambda span: getattr(by_name(span.dialect).otel, field, None)


def _total(field: str) -> Callable[[Attempt], int | None]:
    """A sum over an attempt; None if it is a lower bound, which a reader could not tell from a sum."""
    return lambda attempt: None if attempt.totals.uncounted else getattr(attempt.totals, field)


def _seconds(span: Span) -> float | None:
    return None if span.first_byte_ns is None or not span.stream else span.first_byte_ns / 1e9


def _billed(kind: str) -> Callable[[Span], int | None]:
    return lambda span: None if span.usage is None else (span.usage.billed or {}).get(kind)


def error_type(span: Span) -> str | None:
    """`error.type`: the HTTP status, else the gateway's name for the error, else the span's status; None if it is
    ok."""
    if span.status in ("ok", "open"):
        return None
    return (span.error or span.status.value).removeprefix("http_")


def _facts(of: Literal["span", "call", "model_call"]) -> tuple[Row, ...]:
    """The rows of the facts of `model.facts` that these spans have."""
    return tuple(_row(reader(fact), fact.otel) for fact in SPAN_FACTS if fact.otel is not None and fact.otel.of == of)


def _row(read: Callable[[Span], Any], attribute: Attribute) -> Row:
    convert = attribute.value
    return attribute.name, lambda span: None if (value := read(span)) is None else convert(value)


OF_EVERY_SPAN: tuple[Row, ...] = (*_facts("span"), ("error.type", error_type))
INFERRED = "penstock.parent.inferred"
"""True on a span whose parent is inferred."""
ORIGINAL_TRACE = "penstock.original_trace_id"
"""The trace that a span came in, where it is sent in another."""
LINK, PROBABLE_PARENT = "penstock.link", "parent"
"""The meaning of a link that the gateway has made."""
LINK_TYPE, CAUSED, RETRY = "gen_ai.attribution.link_type", "CAUSED_BY_GENERATION", "RETRY_OF"
"""The cause of a span, as proposed for the GenAI conventions (semantic-conventions-genai #370)."""
KNOWN = "penstock.tool.known"
"""The grade of certainty about the answer that asked for a run of a tool."""
OF_AN_AGENTS_SPAN = OF_EVERY_SPAN[:2]
"""The attributes that are added to a span that came in."""
OF_A_CALL: tuple[Row, ...] = (*_facts("call"), ("penstock.versions", lambda span: span.versions))
OF_A_MODEL_CALL: tuple[Row, ...] = (
    ("gen_ai.operation.name", _otel("operation")),
    ("gen_ai.conversation.id", lambda span: f"{span.rollout}/{span.attempt}"),
    *_facts("model_call"),
    ("gen_ai.response.time_to_first_chunk", _seconds),
    ("openai.api.type", _otel("api")),
    *(
        (f"gen_ai.usage.{kind}.{count}", _billed(name.format(kind)))
        for kind in ("audio", "image")
        for count, name in (
            ("input_tokens", "input_{}"), ("output_tokens", "output_{}"), ("cache_read.input_tokens", "cached_{}"),
        )
    ),
)  # fmt: skip
REASONING_LEVEL: Final = "gen_ai.request.reasoning.level"
LEVELS: Final = (("reasoning_effort",), ("reasoning", "effort"), ("output_config", "effort"))
"""The places of the level in a request."""
PREVIOUS: Final = "gen_ai.request.previous_response.id"
STOP, STOPS = "gen_ai.request.stop_sequences", ("stop", "stop_sequences")

OF_AN_ATTEMPT: tuple[Row, ...] = (
    ("gen_ai.operation.name", lambda _: INVOKE_AGENT),
    ("gen_ai.provider.name", lambda _: "penstock"),
    ("gen_ai.conversation.id", lambda attempt: f"{attempt.rollout}/{attempt.id}"),
    ("gen_ai.usage.input_tokens", _total("input_tokens")),
    ("gen_ai.usage.output_tokens", _total("output_tokens")),
    ("process.exit.code", lambda attempt: attempt.outcome and attempt.outcome.exit_code),
    ("penstock.rollout.id", lambda attempt: attempt.rollout),
    ("penstock.attempt.id", lambda attempt: attempt.id),
    ("penstock.attempt.sequence", lambda attempt: attempt.sequence),
    ("penstock.attempt.status", lambda attempt: attempt.status.value),
    ("penstock.attempt.reward", lambda attempt: attempt.reward),
    ("penstock.worker", lambda attempt: attempt.worker),
    ("error.type", lambda attempt: attempt_error(attempt)),
)
OF_A_REWARD: tuple[Row, ...] = (
    ("gen_ai.evaluation.name", lambda _: "reward"),
    ("gen_ai.evaluation.score.value", lambda reward: reward.value),
    ("gen_ai.evaluation.explanation", lambda reward: reward.reason),
    ("penstock.reward.source", lambda reward: reward.source),
    ("penstock.reward.trusted", lambda reward: reward.trusted),
    ("penstock.reward.late", lambda reward: reward.late),
)
EVALUATION_NAME, EVALUATION_VALUE = "gen_ai.evaluation.name", "gen_ai.evaluation.score.value"
EVALUATED = "gen_ai.response.id"
PROVIDER, ADDRESS, PORT = "gen_ai.provider.name", "server.address", "server.port"
INVOKE_AGENT, EVALUATION = "invoke_agent", "gen_ai.evaluation.result"
METHOD, TOOL, PROMPT = "mcp.method.name", "gen_ai.tool.name", "gen_ai.prompt.name"

INPUT, OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
INSTRUCTIONS, TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
CONTENT_OMITTED = "penstock.content_omitted"
SENSITIVE = frozenset({INPUT, OUTPUT, INSTRUCTIONS, TOOLS, "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"})
"""Opt-in attributes: the conversation, and the tools' arguments and results."""
SAMPLING: dict[str, tuple[str, type[int] | type[float]]] = {
    "temperature": ("gen_ai.request.temperature", float),
    "top_p": ("gen_ai.request.top_p", float),
    "top_k": ("gen_ai.request.top_k", int),
    "frequency_penalty": ("gen_ai.request.frequency_penalty", float),
    "presence_penalty": ("gen_ai.request.presence_penalty", float),
    "seed": ("gen_ai.request.seed", int),
    "max_tokens": ("gen_ai.request.max_tokens", int),
    "max_completion_tokens": ("gen_ai.request.max_tokens", int),
    "max_output_tokens": ("gen_ai.request.max_tokens", int),
}
"""Sampling parameters of a request: the conventions' name, and the type."""
FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "completed": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "tool_calls": "tool_call",
    "tool_use": "tool_call",
    "function_call": "tool_call",
    "requires_action": "tool_call",
    "refusal": "content_filter",
    "failed": "error",
}
"""`finish_reason` of an output message by the providers' values; a value that is not here is written as it is."""


def attempt_error(attempt: Attempt) -> str | None:
    """`error.type` of an attempt: its status, if it did not end well; else None."""
    good = (AttemptStatus.PREPARING, AttemptStatus.RUNNING, AttemptStatus.SUCCEEDED, AttemptStatus.ENDED)
    return None if attempt.status in good else attempt.status.value


def provider(dialect: GenAiNames, host: str | None) -> str:
    """The value of `gen_ai.provider.name` for a call."""
    return next((name for end, name in PROVIDERS.items() if host and host.endswith(end)), dialect.provider)


def evaluations(reward: Reward) -> list[tuple[str, float]]:
    """The evaluations in a reward: (name, score)."""
    value = [] if reward.value is None else [("reward", reward.value)]
    return value + list(reward.dimensions.items())


def attributes(rows: tuple[Row, ...], of: Any) -> dict[str, Any]:
    """The attributes that a table gives to a noun."""
    return {name: value for name, read in rows if (value := read(of)) is not None}
