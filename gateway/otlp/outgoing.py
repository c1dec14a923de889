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
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Outgoing
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from gateway.model import Attempt, Reward, Span
from gateway.otlp import semconv
from gateway.trace import span_id, trace_id

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
    fill(found, semconv.attributes(semconv.OF_AN_ATTEMPT, attempt))
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
    fill(found, attributes | semconv.attributes(rows, span))
    return found


def of_tool(span: Span, parent: str | None) -> Outgoing:
    """A call of a tool: its attributes are the conventions' own."""
    found, attributes = _begun(span, parent), span.attributes or {}
    target = attributes.get(semconv.TOOL) or attributes.get(semconv.PROMPT)
    named = " ".join(str(part) for part in (attributes.get(semconv.METHOD), target) if part)
    found.name, found.kind = span.name or named or "tool", CLIENT
    fill(found, attributes | semconv.attributes(semconv.OF_EVERY_SPAN, span))
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
        found.events.add(name=semconv.EVALUATION, time_unix_nano=span.start_ns, attributes=pairs(attributes | said))
    fill(found, semconv.attributes(semconv.OF_EVERY_SPAN, span) | attributes)
    return found


def of_event(span: Span, parent: str | None) -> Outgoing:
    """Something that happened: a span without a length."""
    found = _begun(span, parent)
    found.name = span.name or "event"
    fill(found, (span.attributes or {}) | semconv.attributes(semconv.OF_EVERY_SPAN, span))
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
        found.events.add(name=event["name"], time_unix_nano=event["time_ns"], attributes=pairs(event["attributes"]))
    for link in own[semconv.LINKS] or ():
        ids = {name: bytes.fromhex(link[name]) for name in ("trace_id", "span_id")}
        found.links.add(**ids, attributes=pairs(link["attributes"]))
    attributes = {"penstock.rollout.id": span.rollout, "penstock.attempt.id": span.attempt}
    fill(found, said | attributes)
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


def fill(span: Outgoing, attributes: Mapping[str, Any]) -> None:
    """Adds attributes."""
    span.attributes.extend(pairs(attributes))


def pairs(attributes: Mapping[str, Any]) -> list[KeyValue]:
    """Attributes as they are sent."""
    return [KeyValue(key=key, value=any_value(value)) for key, value in attributes.items()]


def any_value(value: Any) -> AnyValue:
    """A plain value as it is sent; a number that is too large becomes text."""
    match value:
        case None:
            return AnyValue()
        case bool():
            return AnyValue(bool_value=value)
        case str():
            return AnyValue(string_value=value.encode("utf-8", "replace").decode())
        case int():
            return AnyValue(int_value=value) if -(2**63) <= value < 2**63 else AnyValue(string_value=str(value))
        case float():
            return AnyValue(double_value=value)
        case dict():
            return AnyValue(kvlist_value=KeyValueList(values=pairs({str(key): one for key, one in value.items()})))  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
        case list() | tuple():
            return AnyValue(array_value=ArrayValue(values=[any_value(one) for one in value]))  # pyright: ignore[reportUnknownVariableType]
        case _:
            return AnyValue(string_value=str(value))
