"""A log record of OpenTelemetry as an event of the tape. Pure.

Coding agents log what they do: each record is an event with a name, such as `claude_code.user_prompt`,
`codex.tool_result` or `gemini_cli.tool_call`. Agents put the name in its own field, in the attribute `event.name`, or
in the body. Attributes are kept as those of spans are, and those whose name tells a secret are masked here: an event of
the control API has no such names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from penstock.gateway.followers.otlp import semconv
from penstock.gateway.followers.otlp.attempt_lookup import ItemRejectedError
from penstock.gateway.followers.otlp.span_import import (
    LATEST,
    LONGEST_NAME,
    MOST_DROPPED,
    hex_id,
    is_span_id,
    is_trace_id,
)
from penstock.gateway.followers.otlp.values import Bounds
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.wire.http import redaction

if TYPE_CHECKING:
    # Or protobuf's, which has the same fields.
    from penstock.gateway.followers.otlp.json_encoding import LogRecord

UNNAMED: Final = "log"
"""The name of a record without one: a line of a program's log."""
_EVENT: Final = re.compile(r"[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*)+")
"""Matches a body that is only the name of an event."""


def entry_of(record: LogRecord, resource: dict[str, Any], scope: dict[str, Any]) -> SpanEntry:
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
