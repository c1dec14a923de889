"""Nouns of the tape as spans of OpenTelemetry. Pure; which names are used is said by `semconv`.

| on the tape | span | kind | parent |
|---|---|---|---|
| an attempt that ended | `invoke_agent` | internal | none: the root of the attempt's trace |
| `llm` | `{operation} {model}` | client | the caller's, from its `traceparent`; else the root |
| `tool` | `{method} {target}` | client | the same |
| `reward` | `gen_ai.evaluation.result` | internal | the call that it judges, else the root |
| `event` | its own name | internal | the root |
| `otel` | as it came, resource and scope too | its own | its own |

The root of an attempt is span 0 of its derived trace, the one that a runner gives its agent as `TRACEPARENT`. It can
only be sent when the attempt has ended, so spans of attempts that nobody has handed out, which may never end, have no
parent instead of one that never comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast
from urllib.parse import urlsplit

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Outgoing
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from gateway.model import Attempt, Reward, Span
from gateway.otlp import semconv
from gateway.trace import span_id, trace_id

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

Pairs: TypeAlias = "RepeatedCompositeFieldContainer[KeyValue]"
"""Where attributes are added to."""
INTERNAL: Final = Outgoing.SPAN_KIND_INTERNAL
CLIENT: Final = Outgoing.SPAN_KIND_CLIENT
_OWN = (
    *(semconv.SPAN_KIND, semconv.STATUS_DESCRIPTION, semconv.SCOPE_NAME, semconv.SCOPE_VERSION, semconv.RESOURCE),
    *(semconv.EVENTS, semconv.LINKS, semconv.TRACE_STATE, semconv.DROPPED),
)


def root_id(rollout: str, attempt: str) -> str:
    """Span id of an attempt's root."""
    return span_id(trace_id(rollout, attempt), rollout, attempt, 0)


def of_attempt(attempt: Attempt) -> Outgoing:
    """The root span of an attempt that has ended."""
    found = _span(trace_id(attempt.rollout, attempt.id), root_id(attempt.rollout, attempt.id), None)
    found.name, found.kind = semconv.INVOKE_AGENT, INTERNAL
    found.start_time_unix_nano, found.end_time_unix_nano = attempt.created_ns, attempt.ended_ns or attempt.created_ns
    if semconv.attempt_error(attempt):
        reason = attempt.outcome.reason if attempt.outcome is not None else None
        found.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=reason or attempt.status.value))
    fill(found.attributes, semconv.attributes(semconv.OF_AN_ATTEMPT, attempt))
    return found


def of_call(span: Span, server: str | None, parent: str | None) -> Outgoing:
    """A call of a model. `server`: base URL of the upstream; `parent`: for calls whose caller has not said."""
    found = _begun(span, parent)
    rows = semconv.OF_EVERY_SPAN + semconv.OF_A_CALL
    operation = semconv.OPERATIONS.get(span.dialect)
    url = urlsplit(server or "")
    attributes: dict[str, Any] = {}
    if operation is not None:
        rows += semconv.OF_A_MODEL_CALL
        attributes[semconv.PROVIDER] = semconv.provider(span.dialect, url.hostname)
    if url.hostname is not None:
        attributes[semconv.ADDRESS] = url.hostname
        attributes[semconv.PORT] = url.port or (443 if url.scheme == "https" else 80)
    found.name, found.kind = " ".join(filter(None, (operation or span.method, operation and span.model))), CLIENT
    fill(found.attributes, attributes | semconv.attributes(rows, span))
    return found


def of_tool(span: Span, parent: str | None) -> Outgoing:
    """A call of a tool: its attributes are the conventions' own."""
    found, attributes = _begun(span, parent), span.attributes or {}
    target = attributes.get(semconv.TOOL) or attributes.get(semconv.PROMPT)
    named = " ".join(str(part) for part in (attributes.get(semconv.METHOD), target) if part)
    found.name, found.kind = span.name or named or "tool", CLIENT
    fill(found.attributes, attributes | semconv.attributes(semconv.OF_EVERY_SPAN, span))
    return found


def of_reward(span: Span, judged: Span | None, parent: str | None) -> Outgoing:
    """A reward: the conventions know evaluations as events, so it carries one for each score."""
    reward = Reward.of(span)
    found = _begun(span, parent)
    if judged is not None and judged.trace_id and judged.span_id:
        found.trace_id, found.parent_span_id = bytes.fromhex(judged.trace_id), bytes.fromhex(judged.span_id)
    attributes = semconv.attributes(semconv.OF_A_REWARD, reward)
    if judged is not None and judged.response_id is not None:
        attributes[semconv.EVALUATED] = judged.response_id
    found.name = semconv.EVALUATION
    for name, score in semconv.evaluations(reward):
        said = {semconv.EVALUATION_NAME: name, semconv.EVALUATION_VALUE: score}
        event = found.events.add(name=semconv.EVALUATION, time_unix_nano=span.start_ns)
        fill(event.attributes, attributes | said)
    fill(found.attributes, semconv.attributes(semconv.OF_EVERY_SPAN, span) | attributes)
    return found


def of_event(span: Span, parent: str | None) -> Outgoing:
    """Something that happened: a span without a length."""
    found = _begun(span, parent)
    found.name = span.name or "event"
    fill(found.attributes, (span.attributes or {}) | semconv.attributes(semconv.OF_EVERY_SPAN, span))
    return found


def of_otel(span: Span) -> tuple[Outgoing, dict[str, Any], InstrumentationScope]:
    """A span that came in, as it was, with its resource and its scope."""
    found, said = _begun(span, None), dict(span.attributes or {})
    own = {name: said.pop(name, None) for name in _OWN}
    kind = own[semconv.SPAN_KIND]
    found.name = span.name or ""
    known = isinstance(kind, str) and kind in semconv.SPAN_KINDS
    found.kind = Outgoing.SpanKind.Value(f"SPAN_KIND_{kind.upper()}") if known else Outgoing.SPAN_KIND_UNSPECIFIED
    found.trace_state = own[semconv.TRACE_STATE] or ""
    found.dropped_attributes_count = own[semconv.DROPPED] or 0
    found.status.message = own[semconv.STATUS_DESCRIPTION] or ""
    for event in own[semconv.EVENTS] or ():
        made = found.events.add(name=event["name"], time_unix_nano=event["time_ns"])
        fill(made.attributes, event["attributes"])
    for link in own[semconv.LINKS] or ():
        ids = {name: bytes.fromhex(link[name]) for name in ("trace_id", "span_id")}
        fill(found.links.add(**ids).attributes, link["attributes"])
    attributes = {"penstock.rollout.id": span.rollout, "penstock.attempt.id": span.attempt}
    fill(found.attributes, said | attributes)
    scope = InstrumentationScope(name=own[semconv.SCOPE_NAME] or "", version=own[semconv.SCOPE_VERSION] or "")
    return found, own[semconv.RESOURCE] or {}, scope


def _begun(span: Span, parent: str | None) -> Outgoing:
    """What all spans have. A parent in another trace is none."""
    derived = trace_id(span.rollout, span.attempt)
    trace = span.trace_id or derived
    own = span.span_id or span_id(trace, span.rollout, span.attempt, span.sequence)
    found = _span(trace, own, span.parent_id or (parent if trace == derived else None))
    found.kind = INTERNAL
    found.start_time_unix_nano, found.end_time_unix_nano = span.start_ns, span.end_ns or span.start_ns
    if (error := semconv.error_type(span)) is not None:
        found.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=error))
    return found


def _span(trace: str, own: str, parent: str | None) -> Outgoing:
    return Outgoing(
        trace_id=bytes.fromhex(trace), span_id=bytes.fromhex(own), parent_span_id=bytes.fromhex(parent or "")
    )


def fill(pairs: Pairs, attributes: Mapping[str, Any]) -> None:
    """Adds attributes. Filled in place: making each message by itself costs four times as much."""
    for key, value in attributes.items():
        pair = pairs.add()
        pair.key = key
        _set(pair.value, value)


def _set(into: AnyValue, value: Any) -> None:
    """A plain value; None is an empty one, a number that is too large becomes text."""
    if isinstance(value, str):
        _set_text(into, value)
    elif isinstance(value, bool):
        into.bool_value = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        into.int_value = value
    elif isinstance(value, float):
        into.double_value = value
    elif isinstance(value, dict):
        into.kvlist_value.SetInParent()
        fill(into.kvlist_value.values, cast(dict[str, Any], value))
    elif isinstance(value, list):
        into.array_value.SetInParent()
        for one in cast(list[Any], value):
            _set(into.array_value.values.add(), one)
    elif value is not None:
        into.string_value = str(value)


def _set_text(into: AnyValue, text: str) -> None:
    try:
        into.string_value = text
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON can hold.
        into.string_value = text.encode("utf-8", "replace").decode()
