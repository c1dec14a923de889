"""The log line of a call that has ended (`[log] calls`): its outcome, and nothing of its content. It is written on the
recorder's thread, when the call has its place on the tape and its secrets are masked."""

from __future__ import annotations

import logging
from typing import Any, Final

from penstock.gateway.model.base import CALLS
from penstock.gateway.model.span import span_id, trace_id
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.wire.http.log import moment
from penstock.gateway.wire.http.redaction import plain_text

LOGGER: Final = "penstock.calls"
_LONGEST: Final = 200
"""Most characters of a name that an agent has chosen."""
_calls_log = logging.getLogger(LOGGER)


def log_call(entry: SpanEntry, recorded: bool) -> None:
    """Write the line of a call that has ended; nothing for other spans or open calls. `recorded`: the tape has it."""
    if entry.status != "open" and entry.kind in CALLS:
        _calls_log.info("call %s", entry.status, extra={"fields": fields(entry, recorded)})


def fields(entry: SpanEntry, recorded: bool) -> dict[str, Any]:
    """The fields of the line, in order; unknown ones are left out."""
    usage, end_ns = entry.usage, entry.end_ns or entry.start_ns
    trace = entry.trace_id or trace_id(entry.rollout, entry.attempt)
    found: dict[str, Any] = {
        "event.start": moment(entry.start_ns / 1e9),
        "penstock.rollout.id": entry.rollout,
        "penstock.attempt.id": entry.attempt,
        "penstock.span.sequence": entry.sequence or None,
        "penstock.span.kind": entry.kind,
        "penstock.span.status": entry.status,
        "penstock.span.name": _short(entry.name),
        "penstock.mode": entry.mode,
        "gen_ai.agent.name": _short(entry.agent),
        "gen_ai.request.model": _short(entry.model),
        "gen_ai.response.model": _short(entry.model_served),
        "penstock.dialect": entry.dialect,
        "penstock.upstream": entry.upstream,
        "http.response.status_code": entry.http_status,
        "error.type": _short(entry.error),
        "penstock.duration_ms": round((end_ns - entry.start_ns) / 1e6, 3),
        "penstock.first_byte_ms": None if entry.first_byte_ns is None else round(entry.first_byte_ns / 1e6, 3),
        "gen_ai.usage.input_tokens": None if usage is None else usage.input_tokens,
        "gen_ai.usage.output_tokens": None if usage is None else usage.output_tokens,
        "http.request.body.size": entry.request_bytes,
        "http.response.body.size": entry.response_bytes,
        "penstock.versions": entry.versions,
        "penstock.arm": entry.arm,
        "penstock.recorded": recorded,
        "trace.id": trace,
        "span.id": _span(entry, trace),
    }
    return {name: value for name, value in found.items() if value is not None}


def _span(entry: SpanEntry, trace: str) -> str | None:
    if entry.span_id is None and entry.sequence:
        return span_id(trace, entry.rollout, entry.attempt, entry.sequence)
    return entry.span_id


def _short(name: str | None) -> str | None:
    """A name with secrets masked, then cut, so that no part of a secret is left."""
    if name is None:
        return None
    shown = plain_text(name)
    return shown if len(shown) <= _LONGEST else shown[:_LONGEST] + "…"
