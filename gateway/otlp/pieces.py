"""Pieces of the change feed as export requests: what is sent of a change, with what, and how much at once.

A request ends at a number of spans or at a size, whichever comes first, so that what is held in memory is bounded
whatever the tape holds. Content is left out unless it is wanted, also that of spans that came from elsewhere.
"""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import Any, NamedTuple, Protocol

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Outgoing

from gateway.config import Otlp
from gateway.dialects.reading import read_exchange
from gateway.model import Attempt, Change, Exchange, Span, SpanStatus
from gateway.otlp import content, outgoing, semconv
from gateway.otlp.delivery import Figures
from gateway.store import TapeError

LARGEST_REQUEST = 4 << 20
"""Bytes after which a request is sent, before compression."""
MOST_CONTENT = 1 << 20
"""Bytes that one span may have with its content."""
ROOTS = 10_000
"""Attempts whose roots are known to have been sent."""
OUTPUT = frozenset({"stdout", "stderr"})
"""Events that are content: what an agent has printed."""
_log = logging.getLogger("penstock.otlp")


class Tape(Protocol):
    """The slice of the tape that is read."""

    def changes(self, since: int, limit: int) -> tuple[list[Change], int]: ...
    def attempts(self, rid: str, /) -> list[Attempt]: ...
    def span(self, rid: str, aid: str, sequence: int, /) -> Span | None: ...
    def exchange(self, span: Span) -> Exchange | None: ...


class Piece(NamedTuple):
    """A piece of the feed, ready to be sent."""

    body: bytes
    """The request, gzip; empty when there is nothing to send."""
    spans: int
    after: int
    """The cursor behind it."""
    full: bool
    """Whether there may be more at once."""


class Reader:
    """Turns pieces of the feed into requests; for one thread at a time."""

    def __init__(self, tape: Tape, settings: Otlp, servers: Mapping[str, str], figures: Figures) -> None:
        self._tape = tape
        self._settings = settings
        self._servers = servers
        self._figures = figures
        self._roots: OrderedDict[tuple[str, str, int], None] = OrderedDict()
        self._parent = lru_cache(maxsize=4096)(self._find_parent)
        self._resource = {"service.name": "penstock", "service.version": version("penstock")}

    def read(self, since: int) -> Piece:
        """What follows a cursor, as one request."""
        changes, after = self._tape.changes(since, self._settings.batch)
        request = _Request(self._resource)
        for change in changes:
            try:
                self._add(request, change)
            except TapeError:
                raise
            except Exception:
                # One span that cannot be sent must not keep back all that follow.
                _log.exception("change %d cannot be exported", change.cursor)
                self._figures.otlp_dropped += 1
            if request.size >= LARGEST_REQUEST:
                return Piece(request.packed(), request.spans, change.cursor, True)
        return Piece(request.packed(), request.spans, after, after - since >= self._settings.batch)

    def _add(self, request: _Request, change: Change) -> None:
        if change.attempt is not None and change.attempt.ended_ns is not None:
            self._add_root(request, change.attempt, change.attempt.ended_ns)
        elif change.span is not None and change.span.status != SpanStatus.OPEN:
            self._add_span(request, change.span)

    def _add_root(self, request: _Request, attempt: Attempt, ended_ns: int) -> None:
        """The feed gives an attempt as it is now, each time it has changed: its root is sent once for each end."""
        key = attempt.rollout, attempt.id, ended_ns
        if key not in self._roots:
            self._roots[key] = None
            if len(self._roots) > ROOTS:
                self._roots.popitem(last=False)
            request.add(outgoing.of_attempt(attempt))

    def _add_span(self, request: _Request, span: Span) -> None:
        parent = self._parent(span.rollout, span.attempt)
        match span.kind:
            case "llm":
                made = outgoing.of_call(span, self._servers.get(span.upstream or ""), parent)
                if self._settings.capture_content:
                    self._add_content(made, span)
                request.add(made)
            case "tool":
                request.add(outgoing.of_tool(self._without_content(span), parent))
            case "reward":
                request.add(outgoing.of_reward(span, self._judged(span), parent))
            case "event":
                if self._settings.capture_content or span.name not in OUTPUT:
                    request.add(outgoing.of_event(span, parent))
            case "otel":
                request.add_foreign(*outgoing.of_otel(self._without_content(span)))

    def _find_parent(self, rollout: str, attempt: str) -> str | None:
        handed_out = any(one.id == attempt and one.worker is not None for one in self._tape.attempts(rollout))
        return outgoing.root_id(rollout, attempt) if handed_out else None

    def _judged(self, span: Span) -> Span | None:
        sequence = (span.attributes or {}).get("penstock.reward.span")
        return None if sequence is None else self._tape.span(span.rollout, span.attempt, sequence)

    def _without_content(self, span: Span) -> Span:
        attributes = span.attributes or {}
        if self._settings.capture_content or not semconv.SENSITIVE & attributes.keys():
            return span
        kept = {name: value for name, value in attributes.items() if name not in semconv.SENSITIVE}
        return span.model_copy(update={"attributes": kept})

    def _add_content(self, made: Outgoing, span: Span) -> None:
        exchange = self._tape.exchange(span)
        if exchange is None or span.dialect not in semconv.OPERATIONS:
            return
        omitted: list[str] = []
        for name, value in content.of_turn(read_exchange(span.dialect, exchange, span)).items():
            said = KeyValueList()
            outgoing.fill(said.values, {name: value})
            if made.ByteSize() + said.ByteSize() > MOST_CONTENT:
                omitted.append(name)
            else:
                made.attributes.extend(said.values)
        if omitted:
            outgoing.fill(made.attributes, {semconv.CONTENT_OMITTED: omitted})


class _Request:
    """An export request in the making: one resource of ours, and one for each that spans came from."""

    def __init__(self, resource: Mapping[str, Any]) -> None:
        self._made = ExportTraceServiceRequest()
        self._group: ScopeSpans | None = None
        self._groups: dict[bytes, ScopeSpans] = {}
        self._own = resource
        self._scope = InstrumentationScope(name="penstock.gateway", version=resource["service.version"])
        self.spans = self.size = 0
        """Spans, and their bytes."""

    def add(self, span: Outgoing) -> None:
        """A span of the gateway's own."""
        if self._group is None:
            made = self._made.resource_spans.add()
            outgoing.fill(made.resource.attributes, self._own)
            self._group = made.scope_spans.add(scope=self._scope)
        self._append(self._group, span)

    def add_foreign(self, span: Outgoing, resource: Mapping[str, Any], scope: InstrumentationScope) -> None:
        """A span that somebody else has made."""
        pairs = KeyValueList()
        outgoing.fill(pairs.values, resource)
        key = pairs.SerializeToString() + b"\0" + scope.SerializeToString()
        group = self._groups.get(key)
        if group is None:
            made = self._made.resource_spans.add()
            made.resource.attributes.extend(pairs.values)
            group = self._groups[key] = made.scope_spans.add(scope=scope)
            self.size += len(key)
        self._append(group, span)

    def _append(self, group: ScopeSpans, span: Outgoing) -> None:
        group.spans.append(span)
        self.spans += 1
        self.size += span.ByteSize()

    def packed(self) -> bytes:
        """The request, compressed."""
        return zlib.compress(self._made.SerializeToString(), 1, 16 + zlib.MAX_WBITS) if self.spans else b""
