"""Nouns of the tape as spans of OpenTelemetry. Pure; `semconv` has the names, `placement` the traces and parents.

| on the tape | span | kind | parent |
|---|---|---|---|
| an attempt that ended | `invoke_agent` | internal | none: the root of the attempt's trace |
| `llm` | `{operation} {model}` | client | the caller's (`traceparent`), else the agent's span around it, or the root |
| `tool` | `{method} {target}` | client | the same |
| `reward` | `gen_ai.evaluation.result` | internal | the call that it judges, else the root |
| `event` | its own name | internal | the root |
| `otel` | as it came, resource and scope too | its own | its own; the root when it has none |

The root of an attempt is span 0 of its derived trace, the one that a runner gives its agent as `TRACEPARENT`. It can
only be sent when the attempt has ended. An attempt that the queue has not handed out may never end, so its spans have
no parent, instead of one that may never come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast
from urllib.parse import urlsplit

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Outgoing
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from penstock.gateway.followers.otlp import semconv
from penstock.gateway.followers.otlp.placement import SpanPlacement, root_id
from penstock.gateway.model.rollout import Attempt, Reward
from penstock.gateway.model.span import Span, span_id, trace_id
from penstock.gateway.wire.dialects import by_name

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

Pairs: TypeAlias = "RepeatedCompositeFieldContainer[KeyValue]"
"""A list of attributes in protobuf, to which others are added."""
INTERNAL: Final = Outgoing.SPAN_KIND_INTERNAL
CLIENT: Final = Outgoing.SPAN_KIND_CLIENT
_OWN = (
    *(
        semconv.SPAN_KIND,
        semconv.STATUS_CODE,
        semconv.STATUS_DESCRIPTION,
        semconv.SCOPE_NAME,
        semconv.SCOPE_VERSION,
        semconv.RESOURCE,
    ),
    *(semconv.EVENTS, semconv.LINKS, semconv.TRACE_STATE, semconv.DROPPED),
)


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


def of_call(span: Span, server: str | None, place: SpanPlacement) -> Outgoing:
    """The span of a model call. `server`: base URL of the upstream."""
    found = _begun(span, place)
    rows = semconv.OF_EVERY_SPAN + semconv.OF_A_CALL
    otel = by_name(span.dialect).otel
    attributes = _of_server(server)
    if otel is not None:
        rows += semconv.OF_A_MODEL_CALL
        attributes[semconv.PROVIDER] = semconv.provider(otel, attributes.get(semconv.ADDRESS))
    said = (span.method,) if otel is None else (otel.operation, span.model)
    found.name, found.kind = " ".join(filter(None, said)), CLIENT
    fill(found.attributes, attributes | _attributes(span, place, rows))
    return found


def _of_server(server: str | None) -> dict[str, Any]:
    url = urlsplit(server or "")
    port = url.port or (443 if url.scheme == "https" else 80)
    return {} if url.hostname is None else {semconv.ADDRESS: url.hostname, semconv.PORT: port}


def of_tool(span: Span, server: str | None, place: SpanPlacement) -> Outgoing:
    """The span of a tool call: its attributes are the conventions' own. `server`: the server's URL; None for one
    without."""
    found, attributes = _begun(span, place), span.attributes or {}
    target = attributes.get(semconv.TOOL) or attributes.get(semconv.PROMPT)
    named = " ".join(str(part) for part in (attributes.get(semconv.METHOD), target) if part)
    found.name, found.kind = span.name or named or "tool", CLIENT
    fill(found.attributes, _of_server(server) | attributes | _attributes(span, place))
    return found


def of_reward(span: Span, judged: Span | None, place: SpanPlacement) -> Outgoing:
    """The span of a reward: the conventions define evaluations as events, so it has an event for each score. `judged`:
    the call that it judges, if it is one call."""
    reward = Reward.of(span)
    found = _begun(span, place)
    attributes = semconv.attributes(semconv.OF_A_REWARD, reward)
    if judged is not None and judged.response_id is not None:
        attributes[semconv.EVALUATED] = judged.response_id
    found.name = semconv.EVALUATION
    for name, score in semconv.evaluations(reward):
        said = {semconv.EVALUATION_NAME: name, semconv.EVALUATION_VALUE: score}
        event = found.events.add(name=semconv.EVALUATION, time_unix_nano=span.start_ns)
        fill(event.attributes, attributes | said)
    fill(found.attributes, _attributes(span, place) | attributes)
    return found


def of_event(span: Span, place: SpanPlacement) -> Outgoing:
    """The span of an event, without a duration."""
    found = _begun(span, place)
    found.name = span.name or "event"
    fill(found.attributes, (span.attributes or {}) | _attributes(span, place))
    return found


def of_otel(span: Span, place: SpanPlacement) -> tuple[Outgoing, dict[str, Any], InstrumentationScope]:
    """A span that came in, as it was, with its resource and its scope."""
    found, said = _begun(span, place), dict(span.attributes or {})
    own = {name: said.pop(name, None) for name in _OWN}
    kind = own[semconv.SPAN_KIND]
    found.name = span.name or ""
    known = isinstance(kind, str) and kind in semconv.SPAN_KINDS
    found.kind = Outgoing.SpanKind.Value(f"SPAN_KIND_{kind.upper()}") if known else Outgoing.SPAN_KIND_UNSPECIFIED
    found.trace_state = own[semconv.TRACE_STATE] or ""
    found.dropped_attributes_count = own[semconv.DROPPED] or 0
    found.status.message = own[semconv.STATUS_DESCRIPTION] or ""
    if own[semconv.STATUS_CODE] == semconv.STATUS_OK:
        found.status.code = Status.STATUS_CODE_OK
    for event in own[semconv.EVENTS] or ():
        made = found.events.add(name=event["name"], time_unix_nano=event["time_ns"])
        fill(made.attributes, event["attributes"])
    for link in own[semconv.LINKS] or ():
        trace = place.trace if link["trace_id"] in place.moved else link["trace_id"]
        ids = {"trace_id": bytes.fromhex(trace), "span_id": bytes.fromhex(link["span_id"])}
        fill(found.links.add(**ids).attributes, link["attributes"])
    fill(found.attributes, said | _attributes(span, place, semconv.OF_AN_AGENTS_SPAN))
    scope = InstrumentationScope(name=own[semconv.SCOPE_NAME] or "", version=own[semconv.SCOPE_VERSION] or "")
    return found, own[semconv.RESOURCE] or {}, scope


def _begun(span: Span, place: SpanPlacement) -> Outgoing:
    """The parts that all spans have."""
    trace = span.trace_id or trace_id(span.rollout, span.attempt)
    own = span.span_id or span_id(trace, span.rollout, span.attempt, span.sequence)
    found = _span(place.trace, own, place.parent)
    found.kind = INTERNAL
    found.start_time_unix_nano, found.end_time_unix_nano = span.start_ns, span.end_ns or span.start_ns
    if (error := semconv.error_type(span)) is not None:
        found.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=error))
    for linked_trace, linked in place.links:
        link = found.links.add(trace_id=bytes.fromhex(linked_trace), span_id=bytes.fromhex(linked))
        fill(link.attributes, {semconv.LINK: semconv.PROBABLE_PARENT})
    for linked_trace, linked, kind, known in place.causes:
        link = found.links.add(trace_id=bytes.fromhex(linked_trace), span_id=bytes.fromhex(linked))
        fill(link.attributes, {semconv.LINK_TYPE: kind} | ({} if known is None else {semconv.KNOWN: known}))
    return found


def _attributes(
    span: Span, place: SpanPlacement, rows: tuple[semconv.Row, ...] = semconv.OF_EVERY_SPAN
) -> dict[str, Any]:
    """The attributes of a table, and those about the place."""
    found = semconv.attributes(rows, span)
    if place.inferred:
        found[semconv.INFERRED] = True
    if span.trace_id not in (None, place.trace, trace_id(span.rollout, span.attempt)):
        found[semconv.ORIGINAL_TRACE] = span.trace_id
    return found


def _span(trace: str, own: str, parent: str | None) -> Outgoing:
    return Outgoing(
        trace_id=bytes.fromhex(trace), span_id=bytes.fromhex(own), parent_span_id=bytes.fromhex(parent or "")
    )


def fill(pairs: Pairs, attributes: Mapping[str, Any]) -> None:
    """Add attributes in place: making each message by itself costs four times as much."""
    for key, value in attributes.items():
        pair = pairs.add()
        try:
            pair.key = key
        except UnicodeEncodeError:
            pair.key = _whole(key)
        _set(pair.value, value)


def _set(into: AnyValue, value: Any) -> None:
    """Set a plain value; None becomes an empty value, a number that is too large becomes text."""
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
        into.string_value = _whole(text)


def _whole(text: str) -> str:
    """A text with a replacement character for half a surrogate pair, which JSON can hold."""
    return text.encode("utf-8", "replace").decode()
