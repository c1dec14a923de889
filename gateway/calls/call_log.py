"""A line of the log for each call that has ended (`[log] calls`): how it went, and nothing that was said in it.

It is written on the recorder's thread, when the call has its place on the tape and what is secret in it is masked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from penstock.gateway.http.log import moment
from penstock.gateway.http.redact import plain_text
from penstock.gateway.model.base import CALLS
from penstock.gateway.model.log_settings import Log
from penstock.gateway.model.trace import span_id, trace_id
from penstock.gateway.store.records import Entry

LOGGER: Final = "penstock.calls"
_LONGEST: Final = 200
"""Characters of a name that an agent has chosen."""
_log = logging.getLogger(LOGGER)


def teller(log: Log) -> Callable[[Entry, bool], None] | None:
    """What tells of calls, if they are wanted. Their lines do not go by the level of the log."""
    if not log.calls:
        return None
    _log.setLevel(logging.INFO)
    return tell


def tell(entry: Entry, recorded: bool) -> None:
    """Writes the line of a call that has ended; nothing of what is none, or runs on. `recorded`: the tape has it."""
    if entry.status != "open" and entry.kind in CALLS:
        _log.info("call %s", entry.status, extra={"fields": fields(entry, recorded)})


def fields(entry: Entry, recorded: bool) -> dict[str, Any]:
    """What the line has, in its order; what is not known is left out."""
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


def _span(entry: Entry, trace: str) -> str | None:
    if entry.span_id is None and entry.sequence:
        return span_id(trace, entry.rollout, entry.attempt, entry.sequence)
    return entry.span_id


def _short(name: str | None) -> str | None:
    """A name without what has the shape of a key, of which none is left by cutting either."""
    if name is None:
        return None
    shown = plain_text(name)
    return shown if len(shown) <= _LONGEST else shown[:_LONGEST] + "…"
