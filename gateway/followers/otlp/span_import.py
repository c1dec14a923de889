"""A span of OpenTelemetry as an entry of the tape, and the reward that it may carry. Pure.

The span's attributes are kept as they are, in the bounds of `wire.Bounds`; its other parts are kept among them under
`otel.` names (`semconv`). A reward is an attribute: `penstock.reward`, or Agent Lightning's
`agentlightning.reward.0.value`.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

from penstock.gateway.followers.otlp import semconv
from penstock.gateway.followers.otlp.attempt_lookup import ItemRejectedError
from penstock.gateway.followers.otlp.wire import Bounds
from penstock.gateway.model.rollout import Judgement, RewardSource
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.wire.http import redaction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.proto.trace.v1 import trace_pb2

    from penstock.gateway.followers.otlp import json_encoding

    # Or protobuf's, which has the same fields.
    from penstock.gateway.followers.otlp.json_encoding import LogRecord

    Span = trace_pb2.Span | json_encoding.Span
    Event = trace_pb2.Span.Event | json_encoding.Event
    Link = trace_pb2.Span.Link | json_encoding.Link

LONGEST_NAME = 256
MOST_EVENTS = 32
"""Most events, and most links, that are kept of one span."""
LATEST = 2**63
MOST_DROPPED = 2**32 - 1
"""The largest value of the field in a span."""
_OK, _ERROR = 1, 2
_LIGHTNING = re.compile(re.escape(semconv.LIGHTNING_REWARD) + r"(\d{1,3})\.value")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


def entry_of(span: Span, resource: dict[str, Any], scope: dict[str, Any]) -> SpanEntry:
    """A span as an entry that has no rollout yet. `resource`: the attributes of its resource; `scope`: those of its
    instrumentation. Raises `ItemRejectedError`."""
    bounds = Bounds()
    trace, own, parent = hex_id(span.trace_id), hex_id(span.span_id), hex_id(span.parent_span_id)
    start, end = span.start_time_unix_nano or 0, span.end_time_unix_nano or 0
    if not is_trace_id(trace):
        raise ItemRejectedError(
            "invalid", f"trace id {trace[:64]!r}: a span needs a trace id of 16 bytes, not all zero"
        )
    if not is_span_id(own):
        raise ItemRejectedError("invalid", f"span id {own[:64]!r}: a span needs a span id of 8 bytes, not all zero")
    if not 0 < start < LATEST or end >= LATEST:
        what = f"start {start} and end {end}"
        raise ItemRejectedError("invalid", f"{what}: a span needs both in nanoseconds since 1970, below 2^63")
    name = bounds.text(span.name or "", LONGEST_NAME)
    attributes = bounds.attributes(span.attributes)
    failed = _add_details(attributes, span, bounds)
    attributes |= scope
    if resource:
        attributes[semconv.RESOURCE] = resource
    entry = SpanEntry("", "", kind="otel", name=name or None, method="", status="error" if failed else "ok")
    # If the clock was set during the span, it may seem to end before it began.
    entry.start_ns, entry.end_ns = start, max(start, end)
    entry.trace_id, entry.span_id, entry.parent_id = trace, own, parent if is_span_id(parent) else None
    entry.agent = _agent(attributes, resource)
    if failed:
        entry.error = _short(attributes.get(semconv.ERROR)) or "otel"
    entry.attributes = attributes
    return entry


def _add_details(attributes: dict[str, Any], span: Span, bounds: Bounds) -> bool:
    """Add the parts for which the tape has no field; returns True when the span failed."""
    failed = False
    if kind := span.kind:
        attributes[semconv.SPAN_KIND] = semconv.SPAN_KINDS[kind] if 0 < kind < len(semconv.SPAN_KINDS) else kind
    if (status := span.status) is not None:
        failed = status.code == _ERROR
        if status.code == _OK:
            attributes[semconv.STATUS_CODE] = semconv.STATUS_OK
        if message := status.message:
            attributes[semconv.STATUS_DESCRIPTION] = bounds.text(message)
    if state := span.trace_state:
        attributes[semconv.TRACE_STATE] = bounds.text(state)
    if events := span.events:
        attributes[semconv.EVENTS] = [_event(event, bounds) for event in events[:MOST_EVENTS]]
        bounds.clipped |= len(events) > MOST_EVENTS
    if links := span.links:
        found = (_link(link, bounds) for link in links[:MOST_EVENTS])
        attributes[semconv.LINKS] = [link for link in found if link is not None]
        bounds.clipped |= len(links) > MOST_EVENTS
    if dropped := (span.dropped_attributes_count or 0) + bounds.dropped:
        attributes[semconv.DROPPED] = min(dropped, MOST_DROPPED)
    if bounds.clipped:
        attributes[semconv.TRUNCATED] = True
    return failed


def _event(event: Event, bounds: Bounds) -> dict[str, Any]:
    time = min(event.time_unix_nano or 0, LATEST - 1)
    found = {"name": bounds.text(event.name or "", LONGEST_NAME), "time_ns": time}
    return found | {"attributes": bounds.attributes(event.attributes)}


def _link(link: Link, bounds: Bounds) -> dict[str, Any] | None:
    """A link as JSON; None for one without valid ids."""
    trace, span = hex_id(link.trace_id), hex_id(link.span_id)
    if not is_trace_id(trace) or not is_span_id(span):
        return None
    return {"trace_id": trace, "span_id": span, "attributes": bounds.attributes(link.attributes)}


def is_trace_id(given: str) -> bool:
    return len(given) == 32 and given != _NO_TRACE


def is_span_id(given: str) -> bool:
    return len(given) == 16 and given != _NO_SPAN


def hex_id(given: bytes | str | None) -> str:
    if isinstance(given, bytes):
        return given.hex()
    return "" if given is None else given.lower()


def _agent(attributes: dict[str, Any], resource: dict[str, Any]) -> str | None:
    named = _short(attributes.get(semconv.AGENT))
    if named is None and (service := _short(resource.get(semconv.SERVICE))):
        named = None if service.startswith(semconv.UNKNOWN_SERVICE) else service
    return named


def _short(value: Any) -> str | None:
    """A text cut to the length of a head's own field; None if it is empty or no text."""
    return value[:LONGEST_NAME] if isinstance(value, str) and value else None


def scope_of(name: str | None, version: str | None) -> dict[str, Any]:
    """The attributes that are kept of a span's instrumentation."""
    found = {semconv.SCOPE_NAME: _short(name), semconv.SCOPE_VERSION: _short(version)}
    return {key: value for key, value in found.items() if value}


def has_reward(entry: SpanEntry) -> bool:
    """True if the entry has a reward for `judgement_of` to read."""
    attributes = entry.attributes or {}
    return semconv.REWARD in attributes or semconv.LIGHTNING_VALUE in attributes


def judgement_of(entry: SpanEntry, source: RewardSource) -> Judgement:
    """The reward that a span carries; if the span is sent again, the reward is kept once. Raises
    `ItemRejectedError`."""
    attributes = entry.attributes or {}
    value = attributes[semconv.REWARD if semconv.REWARD in attributes else semconv.LIGHTNING_VALUE]
    dimensions = dict(_dimensions(attributes))
    if not all(map(_is_number, (value, *dimensions.values()))):
        why = f"the reward of span {entry.span_id} is not a finite number: the span is kept, the reward is not"
        raise ItemRejectedError("invalid", why)
    reason = attributes.get(semconv.REWARD_REASON)
    return Judgement(
        value=value,
        dimensions=dimensions,
        source=source,
        reason=reason if isinstance(reason, str) else None,
        key=f"otel-{entry.trace_id}-{entry.span_id}",
    )


def _dimensions(attributes: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in attributes.items():
        if key.startswith(semconv.REWARD_DIMENSION):
            yield key.removeprefix(semconv.REWARD_DIMENSION), value
    scores = {int(found[1]): value for key, value in attributes.items() if (found := _LIGHTNING.fullmatch(key))}
    # A single score is the reward itself, whatever its name.
    for number, value in scores.items() if len(scores) > 1 else ():
        name = attributes.get(f"{semconv.LIGHTNING_REWARD}{number}.name")
        yield name if isinstance(name, str) else str(number), value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# A log record of OpenTelemetry as an event of the tape. Pure.
#
# Coding agents log what they do: each record is an event with a name, such as `claude_code.user_prompt`,
# `codex.tool_result` or `gemini_cli.tool_call`. Agents put the name in its own field, in the attribute `event.name`,
# or in the body. Attributes are kept as those of spans are, and those whose name tells a secret are masked here: an
# event of the control API has no such names.

UNNAMED: Final = "log"
"""The name of a record without one: a line of a program's log."""
_EVENT: Final = re.compile(r"[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*)+")
"""Matches a body that is only the name of an event."""


def log_entry_of(record: LogRecord, resource: dict[str, Any], scope: dict[str, Any]) -> SpanEntry:
    """A record as an entry that has no rollout yet, and no time if the record has none. `resource`, `scope`: as for
    spans (`span_import.entry_of`). Raises `ItemRejectedError`."""
    at = record.time_unix_nano or record.observed_time_unix_nano or 0
    if at >= LATEST:
        raise ItemRejectedError("invalid", f"time {at}: a log record needs one in nanoseconds since 1970, below 2^63")
    bounds = Bounds()
    attributes = bounds.attributes(record.attributes)
    body = bounds.value(record.body)
    name = _name(bounds.text(record.event_name or ""), attributes, body)
    if body is not None and body != name:
        attributes[semconv.BODY] = body
    if severity := _severity(record):
        attributes[semconv.SEVERITY] = bounds.text(severity, LONGEST_NAME)
    if dropped := (record.dropped_attributes_count or 0) + bounds.dropped:
        attributes[semconv.DROPPED] = min(dropped, MOST_DROPPED)
    if bounds.clipped:
        attributes[semconv.TRUNCATED] = True
    attributes |= scope | {semconv.SIGNAL: semconv.LOG}
    if resource:
        attributes[semconv.RESOURCE] = resource
    trace, span = hex_id(record.trace_id), hex_id(record.span_id)
    entry = SpanEntry("", "", kind="event", name=name[:LONGEST_NAME], method="", status="ok", start_ns=at, end_ns=at)
    entry.trace_id = trace if is_trace_id(trace) else None
    # A span id without a trace id names no span.
    entry.parent_id = span if entry.trace_id is not None and is_span_id(span) else None
    entry.attributes = redaction.attributes(attributes, by_name=True)
    return entry


def _name(named: str, attributes: dict[str, Any], body: Any) -> str:
    said = named or attributes.get(semconv.EVENT_NAME)
    said = said if isinstance(said, str) else ""
    # Claude Code has `user_prompt` in the attribute and `claude_code.user_prompt` in the body.
    if isinstance(body, str) and (body.endswith(f".{said}") if said else True) and _EVENT.fullmatch(body):
        return body
    return said or UNNAMED


def _severity(record: LogRecord) -> str:
    number = record.severity_number or 0
    return record.severity_text or (semconv.SEVERITIES[(number - 1) // 4] if 0 < number <= 24 else "")
