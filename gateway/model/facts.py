"""The facts of a span, each in one row: its name, its place, its meaning, and who shows it.

From these rows are made the columns of the index and their values (`followers.index.rows`), the view `spans` of
`penstock sql` and the table of a lake, the fields of filters, the attributes of exported spans, and the lines of
`penstock show`. A new fact is a row here and a line in the code that learns it: it notes the value among the call's
attributes, under the fact's OpenTelemetry name. So the records of the tape stay as they are, and a span recorded
before has no value.

The names of OpenTelemetry are those of the GenAI conventions; `followers.otlp.semconv` names the source, and has the
attributes that are no facts of a span.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal, Protocol, get_args

from penstock.gateway.model.base import CALLS, SpanKind
from penstock.gateway.model.rollout import REWARD_PREFIX

# Names of the attributes that the gateway itself gives to spans of calls.
#
# The attributes of replays, shadows and rehearsals mark calls that were made for a release. Such a call is on the
# tape like every other, but excluded from everything about agents (`is_release_call`).

REPLAY_OF: Final = "penstock.replay_of"
"""The call that this one repeats."""
SHADOW_OF: Final = "penstock.shadow_of"
"""The live call that this one mirrors."""
LEG: Final = "penstock.leg"
"""The arm for which the call repeats another one."""
BEGAN: Final = "penstock.session.began"
"""Why a session of exact tokens begins with this call."""
AMBIGUOUS: Final = "penstock.ambiguous"
"""The call has no address, and could be another rollout's as well."""
TOOL: Final = "gen_ai.tool.name"
"""The tool that a span ran, by its server's own name."""
POLICY_RULE: Final = "penstock.policy.rule"
"""The rule that decided on a tool call."""
POLICY_HARD: Final = "penstock.policy.hard"
"""True if the violation of a policy ends the release on whose candidate it happens."""
WEBSOCKET: Final = "penstock.websocket"
"""The call came as a message on a WebSocket, and its answer is the messages after that."""
SOCKET_SESSION: Final = "penstock.websocket.session"
"""The WebSocket on which the call's session runs: the calls of one session have the same value."""
UNRELEASED: Final = "penstock.websocket.unreleased"
"""True if prompts or weights are released here: none of them reaches the messages of a session."""
PREWARM: Final = "penstock.prewarm"
"""The call asked for no answer; it only had the provider read its beginning in advance."""
UNATTRIBUTED: Final = "penstock.unattributed"
"""The call's WebSocket had messages that may belong to this answer or not, or that nobody asked for."""
STEER_TEXT: Final = "penstock.steer.text"
"""Input that a client sent for a running response."""
STEER_TARGET: Final = "penstock.steer.response_id"
"""The id of the response that `STEER_TEXT` was sent for."""
STEER_FATE: Final = "penstock.steer.fate"
"""The fate of that input: `used` by the response that came after it, `failed`, `refused` here, or `unknown`."""
BACKGROUND: Final = "penstock.background"
"""The name of the call's answer, which it asked for in the background: another call fetches it."""
FETCHED: Final = "penstock.fetched"
"""The call that has fetched the answer of this one: ROLLOUT/ATTEMPT#SEQUENCE."""
BATCH: Final = "penstock.batch"
"""The batch whose result the call is, such as openai/batch_1: one request of many, answered later
(`dialects.batches`)."""
CUSTOM_ID: Final = "penstock.batch.custom_id"
"""The call's `custom_id` in that batch."""
REQUEST_ID: Final = "anthropic.request.id"
"""The provider's id of a request that got no response with an id."""
HOSTED_SESSION: Final = "penstock.hosted.session"
"""The session of a hosted agent whose events the span is made of, such as anthropic/sesn_1 (`dialects.hosted`)."""
HOSTED_EVENT: Final = "penstock.hosted.event"
"""The id of the event with which the span begins."""
WHOLE: Final = "penstock.whole"
"""True if the answer was to be passed on only when it was complete (`stream = "whole"` of its route)."""
TRIES: Final = "penstock.tries"
"""The upstreams that were tried before the one that served the call: for each its name, the time when it was given up
(milliseconds after the call began) and why."""
LEFT_OUT: Final = "penstock.credentials.left_out"
"""The headers and parameters that were not sent upstream, because they held another provider's key."""
FOLDED: Final = "penstock.system.folded"
"""Number of the call's system messages that became a part of another message."""
CAPTURED: Final = "penstock.captured"
"""The names of the fields that were added to the request."""
MASKED: Final = "penstock.masked"
"""Number of places in the call that masking rules have masked, by rule."""
MASKING_FAILED: Final = "penstock.masking"
"""The masking rules that could not be applied to the call, and why. The parts to which a rule could not be applied are
not kept."""
UNREAD: Final = "penstock.unread"
"""The content of the answer that was not read: its kind, by path of keys."""
HASHED_MEDIA: Final = "penstock.media.hashed"
"""Number of media in the call's bodies of which the tape has only a hash (`media = "hash"` of `[tape]`)."""
REASONING_REMOVED: Final = "penstock.reasoning.removed"
"""The reasons why the provider has withheld earlier reasoning from the model, such as `model_mismatch`."""
CACHE_MISS: Final = "penstock.cache.miss"
"""The reason why the provider's cache did not hold the prompt, if the request wanted to know it."""
QUEUE_MS: Final = "penstock.queue_ms"
"""Milliseconds for which the call waited for a place at its upstream or server of tools; absent if it did not."""
AGENT_ID: Final = "gen_ai.agent.id"
"""The sub-agent that made the call, by the id that its coding agent gave it; absent from calls of the main agent."""
PARENT_AGENT: Final = "penstock.agent.parent_id"
"""The id of the agent that started this sub-agent; absent if that is the main agent, or the coding agent is silent."""
CALL_CLASS: Final = "penstock.call.class"
"""What the coding agent made the call for, in its own word: `main`, `subagent`, `compaction`, `auxiliary` ..."""
PROMPT_ID: Final = "penstock.prompt.id"
"""The coding agent's id of the user's prompt that the call serves; its own telemetry has the same."""
TOOL_DURATIONS: Final = "penstock.tool_durations"
"""How long the coding agent measured the tools to run whose results the call carries: `NAME=MILLISECONDS`, in the
agent's order."""
COMPACTION: Final = "penstock.compaction"
"""The call asks for a summary that replaces the conversation: `auto` or `manual`."""
COMPACTED: Final = "penstock.compacted"
"""The call is the first one with a conversation that was compacted, and how: `auto` or `manual`."""


# Tells calls and runs that were made only for a release from those of agents.

REHEARSAL: Final = "-rehearsal-a"
"""Stands before the revision in the name of a rehearsal's run: `RELEASE-rehearsal-aREVISION-NUMBER-LEG`."""


_NAME: Final = re.compile(rf".+{REHEARSAL}[0-9]+-[0-9]+-(?:candidate|incumbent)")


def is_rehearsal(rollout: str) -> bool:
    """True if a rollout is a run of a rehearsal, under way or not."""
    return REHEARSAL in rollout and _NAME.fullmatch(rollout) is not None


def is_release_call(span: SpanView) -> bool:
    """True if a span is of a call that was made for a release, or of a run of a rehearsal; its rewards count too."""
    marked = bool(span.attributes) and not {REPLAY_OF, SHADOW_OF}.isdisjoint(span.attributes)
    return marked or is_rehearsal(span.rollout)


ColumnType = Literal["bigint", "integer", "double", "varchar", "boolean", "varchar[]"]
Unit = Literal["", "time", "ns", "ms"]
"""Of a value: none, a time in ns since the epoch, or a duration in ns or ms. SQL has timestamps and milliseconds."""


class SpanView(Protocol):
    """The parts of a span that facts are derived from; a `Span` has them, and so has a record that is not decoded."""

    @property
    def rollout(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def attributes(self) -> Mapping[str, Any] | None: ...
    @property
    def versions(self) -> Mapping[str, str] | None: ...


@dataclass(frozen=True, slots=True)
class FilterForm:
    """The field of a fact in filters."""

    name: str | None = None
    """Its name, if that is not the fact's."""
    words: tuple[str, ...] = ()
    """Its values, if there are few. Otherwise they are compared by the type of the column."""
    help: str | None = None
    """Its meaning, if that is not the fact's."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """The attribute of a fact in an exported span."""

    name: str
    """The name of OpenTelemetry."""
    of: Literal["span", "call", "model_call"] = "call"
    """The spans that have it: all, calls, or calls of models."""
    value: Callable[[Any], Any] = lambda value: value
    """The attribute's value for that of the fact; None leaves it out."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One name by which a span is described: in SQL, in filters, in OpenTelemetry, and in what people are shown."""

    name: str
    """Its name in SQL and the lake, and in filters."""
    type: ColumnType | None
    """The type of its column; None if it has none."""
    source: str | Callable[[SpanView], Any] | None
    """Its place: a field of `Span`, `usage.FIELD`, the name of an attribute (it has a dot), or a function that derives
    it. None: the index computes it from the whole call (`followers.index.rows`)."""
    help: str = ""
    """Its meaning, for people. Without one SQL does not show its column."""
    column: str | None = None
    """The name of its column in the index, if that is not its own."""
    unit: Unit = ""
    filter: FilterForm | None = None
    otel: Attribute | None = None
    label: str | None = None
    """Its label in `penstock show ROLLOUT#SPAN`; None: it is not shown there, or in a line of its own form."""

    @property
    def index_column(self) -> str:
        """The name of its column in the index."""
        return self.column or self.name


def reader(fact: Fact) -> Callable[[Any], Any]:
    """A function that reads a fact of a `Span`; None where there is no value."""
    source = fact.source
    assert source is not None, f"{fact.name} is in the index alone"
    if callable(source):
        return source
    within, _, field = source.partition(".")
    if within == "usage":
        return lambda span: None if span.usage is None else getattr(span.usage, field)
    return attrgetter(source) if not field else lambda span: own_attribute(span, source)


def own_attribute(span: SpanView, name: str) -> Any:
    """The attribute that the gateway gave to a call, else None. The attributes of spans that are no calls are those of
    their sender, whatever their names."""
    return None if span.kind not in CALLS or span.attributes is None else span.attributes.get(name)


def version_labels(versions: Mapping[str, str] | None) -> list[str]:
    """Versions of resources in the form in which filters name them: NAME@VERSION."""
    return [f"{name}@{version}" for name, version in (versions or {}).items()]


def _versions(span: SpanView) -> list[str] | None:
    return None if span.versions is None else version_labels(span.versions)


def is_ambiguous(span: SpanView) -> bool:
    """True if a call has no address, and could be another rollout's as well."""
    return AMBIGUOUS in (span.attributes or {})


def _unread(span: SpanView) -> list[str] | None:
    return list(own_attribute(span, UNREAD) or ()) or None


def _of_reward(name: str, default: Any = None) -> Callable[[SpanView], Any]:
    key = f"{REWARD_PREFIX}{name}"
    return lambda span: (span.attributes or {}).get(key, default) if span.kind == "reward" else None


def _if_true(value: bool) -> bool | None:
    return value or None


_OWN_NAME: Final = FilterForm()
SPAN_FACTS: Final = (
    Fact("span", "bigint", None, "names the span in all views", column="cursor"),
    Fact("number", "bigint", None),
    Fact("rollout", "varchar", "rollout", "its rollout", otel=Attribute("penstock.rollout.id", "span")),
    Fact(
        "attempt", "varchar", "attempt", "its attempt", filter=_OWN_NAME, otel=Attribute("penstock.attempt.id", "span"),
    ),
    Fact(
        "sequence", "bigint", "sequence", "its place in the attempt, from 1 on",
        otel=Attribute("penstock.span.sequence", "span"),
    ),
    Fact(
        "kind", "varchar", "kind", "llm, tool, mcp, reward, event or otel", filter=FilterForm(words=get_args(SpanKind)),
    ),
    Fact("name", "varchar", "name", "of what is no call: reward, stdout ...", filter=_OWN_NAME),
    Fact("status", "varchar", "status", "ok, error, cancelled, interrupted, or open while it runs"),
    Fact("started", "bigint", "start_ns", "when it began", column="start_ns", unit="time"),
    Fact(
        "duration_ms", "bigint", "duration_ns", "how long it took; ms", column="duration_ns", unit="ns",
        filter=FilterForm("latency"),
    ),
    Fact("first_byte_ms", "bigint", "first_byte_ns", "until the answer began; ms", column="first_byte_ns", unit="ns"),
    Fact("dialect", "varchar", "dialect", "wire format", filter=_OWN_NAME),
    Fact("method", None, "method", otel=Attribute("http.request.method")),
    Fact(
        "path", "varchar", "path", "of the URL",
        otel=Attribute("url.path", value=lambda path: path.partition("?")[0] or None),
    ),
    Fact(
        "upstream", "varchar", "upstream", "who answered; of tools the server", filter=_OWN_NAME,
        otel=Attribute("penstock.upstream"),
    ),
    Fact(
        "http_status", "integer", "http_status", "how it was answered", filter=FilterForm("http"),
        otel=Attribute("http.response.status_code"),
    ),
    Fact("error", "varchar", "error", "reason of a failure, such as http_429", filter=_OWN_NAME),
    Fact("model", "varchar", "model", "model asked for", otel=Attribute("gen_ai.request.model", "model_call")),
    Fact(
        "model_served", "varchar", "model_served", "model that answered",
        otel=Attribute("gen_ai.response.model", "model_call"),
    ),
    Fact(
        "stream", "boolean", "stream", "the answer came as events", filter=_OWN_NAME,
        otel=Attribute("gen_ai.request.stream", "model_call", _if_true),
    ),
    Fact(
        "finish", "varchar", "finish", "why the model stopped", filter=_OWN_NAME,
        otel=Attribute("gen_ai.response.finish_reasons", "model_call", lambda finish: [finish] if finish else None),
    ),
    Fact("response_id", None, "response_id", otel=Attribute("gen_ai.response.id", "model_call")),
    Fact(
        "input_tokens", "bigint", "usage.input_tokens", "prompt tokens, cached ones included", filter=_OWN_NAME,
        otel=Attribute("gen_ai.usage.input_tokens", "model_call"),
    ),
    Fact(
        "output_tokens", "bigint", "usage.output_tokens", "generated tokens", filter=_OWN_NAME,
        otel=Attribute("gen_ai.usage.output_tokens", "model_call"),
    ),
    Fact(
        "cached_tokens", "bigint", "usage.cached_tokens", "prompt tokens read from a cache",
        otel=Attribute("gen_ai.usage.cache_read.input_tokens", "model_call"),
    ),
    Fact(
        "cache_write_tokens", "bigint", "usage.cache_write_tokens", "prompt tokens written to a cache",
        otel=Attribute("gen_ai.usage.cache_write.input_tokens", "model_call"),
    ),
    Fact(
        "reasoning_tokens", "bigint", "usage.reasoning_tokens", "generated tokens of reasoning",
        otel=Attribute("gen_ai.usage.reasoning.output_tokens", "model_call"),
    ),
    Fact("cost", "double", None, "by the list of prices; NULL where there is no price or no count"),
    Fact("cost_reported", "boolean", None),
    Fact("tool_calls", "integer", "tool_calls", "tool calls that the answer asked for", filter=_OWN_NAME),
    Fact("tools", "varchar[]", None, "their names; of a run of a tool its own"),
    Fact(
        "choices", "integer", "choices", "answers to the one request",
        otel=Attribute("gen_ai.request.choice.count", "model_call", lambda count: count if count > 1 else None),
    ),
    Fact(
        "agent", "varchar", "agent", "name of the agent", filter=_OWN_NAME, otel=Attribute("gen_ai.agent.name", "span"),
    ),
    Fact("request_bytes", "bigint", "request_bytes", "size of the request"),
    Fact("response_bytes", "bigint", "response_bytes", "size of the answer"),
    Fact(
        "truncated", "boolean", "truncated", "too large to be kept whole",
        otel=Attribute("penstock.truncated", value=_if_true),
    ),
    Fact(
        "retry_of", "bigint", "retry_of", "sequence of the call that it repeats", otel=Attribute("penstock.retry_of"),
        label="retry of #",
    ),
    Fact(
        "versions", "varchar[]", _versions, "NAME@VERSION of resources that served it",
        filter=FilterForm("version"), label="versions",
    ),
    Fact(
        "arm", "varchar", "arm", "RELEASE:ARM where it takes part in a release", otel=Attribute("penstock.arm"),
        label="arm",
    ),
    Fact("ambiguous", "boolean", is_ambiguous, "it could be another rollout's"),
    Fact("unread", "varchar[]", _unread, filter=FilterForm(help="path of keys in the answer that was not read")),
    Fact(
        "queue_ms", "double", QUEUE_MS, "how long the call waited for a place; ms", unit="ms", filter=_OWN_NAME,
        otel=Attribute(QUEUE_MS), label="waited",
    ),
    Fact("media_hashed", None, HASHED_MEDIA, otel=Attribute(HASHED_MEDIA), label="media as hashes"),
    Fact(
        "agent_id", "varchar", AGENT_ID, "sub-agent, by its id", filter=_OWN_NAME, otel=Attribute(AGENT_ID),
        label="agent id",
    ),
    Fact(
        "parent_agent", "varchar", PARENT_AGENT, "agent that started the sub-agent, by its id", filter=_OWN_NAME,
        otel=Attribute(PARENT_AGENT), label="started by agent",
    ),
    Fact(
        "call_class", "varchar", CALL_CLASS, "what a coding agent made it for: main, subagent, compaction ...",
        filter=FilterForm("class"), otel=Attribute(CALL_CLASS), label="made for",
    ),
    Fact(
        "prompt_id", "varchar", PROMPT_ID, "prompt of the user, by the coding agent's id", filter=_OWN_NAME,
        otel=Attribute(PROMPT_ID), label="prompt",
    ),
    Fact(
        "tool_durations", "varchar[]", TOOL_DURATIONS, "NAME=MILLISECONDS of tools, measured by the coding agent",
        otel=Attribute(TOOL_DURATIONS), label="tools took (ms, by the agent)",
    ),
    Fact(
        "compaction", "varchar", COMPACTION, "it asks for a summary of the conversation: auto or manual",
        filter=_OWN_NAME, otel=Attribute(COMPACTION), label="compaction",
    ),
    Fact(
        "compacted", "varchar", COMPACTED, "the first call after a compaction: auto or manual", filter=_OWN_NAME,
        otel=Attribute(COMPACTED), label="after a compaction",
    ),
    Fact("for_release", "boolean", is_release_call, "it was made to try a release, by no agent", column="of_release"),
    Fact("uncounted", "boolean", None),
    Fact("reward", "double", _of_reward("value")),
    Fact("reward_source", "varchar", _of_reward("source", "user")),
    Fact("reward_trusted", "boolean", _of_reward("trusted", True)),
)  # fmt: skip
"""In the order of SQL's columns."""
