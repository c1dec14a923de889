"""Puts a span into a request, a reward with the call that it judges, and without content unless `otlp.capture_content`
is set.

The latter also holds for spans that came from elsewhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Outgoing

from penstock.gateway.config import OtlpSettings
from penstock.gateway.followers.otlp import content, semconv, span_export
from penstock.gateway.followers.otlp.placement import SpanPlacement
from penstock.gateway.followers.otlp.selection import judged_call
from penstock.gateway.model.rollout import Attempt
from penstock.gateway.model.span import Span
from penstock.gateway.reading.turns import read_exchange
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import unless_damaged
from penstock.gateway.wire.dialects import by_name

# Fills an export request: spans are put under the resource and the instrumentation that they came from.


class ExportRequest:
    """An export request that is being filled: one resource of the gateway, and one for each resource that spans came
    from."""

    def __init__(self, resource: Mapping[str, Any]) -> None:
        self._made = ExportTraceServiceRequest()
        self._group: ScopeSpans | None = None
        self._groups: dict[bytes, ScopeSpans] = {}
        self._own = resource
        self._scope = InstrumentationScope(name="penstock.gateway", version=resource["service.version"])
        self.spans = self.size = 0
        """Number of spans, and their bytes."""

    def add(self, span: Outgoing) -> None:
        """Add a span of the gateway's own."""
        if self._group is None:
            made = self._made.resource_spans.add()
            span_export.fill(made.resource.attributes, self._own)
            self._group = made.scope_spans.add(scope=self._scope)
        self._append(self._group, span)

    def add_foreign(self, span: Outgoing, resource: Mapping[str, Any], scope: InstrumentationScope) -> None:
        """Add a span that came in."""
        pairs = KeyValueList()
        span_export.fill(pairs.values, resource)
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
        """The request, gzip; empty when it has no spans."""
        return zlib.compress(self._made.SerializeToString(), 1, 16 + zlib.MAX_WBITS) if self.spans else b""


MOST_CONTENT = 1 << 20
"""Most bytes of one span with its content."""
OUTPUT = frozenset({"stdout", "stderr"})
"""Events that are content: an agent's printed output."""


class RequestBuilder:
    """Fills requests; for one thread at a time."""

    def __init__(self, tape: Store, settings: OtlpSettings, servers: Mapping[str, str]) -> None:
        """`servers`: URL of each upstream and of each server of tools."""
        self._tape = tape
        self._content = settings.capture_content
        self._servers = servers
        self._resource = {"service.name": "penstock", "service.version": version("penstock-gateway")}

    def request(self) -> ExportRequest:
        """Return an empty request with the gateway's resource."""
        return ExportRequest(self._resource)

    def add_root(self, request: ExportRequest, attempt: Attempt) -> None:
        """Add the root of an attempt that has ended."""
        request.add(span_export.of_attempt(attempt))

    def add(self, request: ExportRequest, span: Span, place: SpanPlacement) -> None:
        """Add a span that has finished."""
        server = self._servers.get(span.upstream or "")
        match span.kind:
            case "llm":
                made = span_export.of_call(span, server, place)
                if self._content:
                    self._add_content(made, span)
                request.add(made)
            case "tool" | "mcp":
                request.add(span_export.of_tool(self._without_content(span), server, place))
            case "reward":
                request.add(span_export.of_reward(span, judged_call(self._tape, span), place))
            case "event":
                if self._content or span.name not in OUTPUT:
                    request.add(span_export.of_event(self._without_log(span), place))
            case "otel":
                request.add_foreign(*span_export.of_otel(self._without_content(span), place))

    def _without_content(self, span: Span) -> Span:
        attributes = span.attributes or {}
        if self._content or not semconv.SENSITIVE & attributes.keys():
            return span
        kept = {name: value for name, value in attributes.items() if name not in semconv.SENSITIVE}
        return span.model_copy(update={"attributes": kept})

    def _without_log(self, span: Span) -> Span:
        """A span that came as a log record, without content: only numbers and booleans are kept, since any text in it
        may be content."""
        attributes = span.attributes or {}
        if self._content or attributes.get(semconv.SIGNAL) != semconv.LOG:
            return span
        kept = {name: value for name, value in attributes.items() if isinstance(value, int | float)}
        return span.model_copy(update={"attributes": kept})

    def _add_content(self, made: Outgoing, span: Span) -> None:
        exchange = unless_damaged(partial(self._tape.exchange, span))
        if exchange is None or by_name(span.dialect).otel is None:
            return
        omitted: list[str] = []
        for name, value in content.of_turn(read_exchange(span.dialect, exchange, span)).items():
            said = KeyValueList()
            span_export.fill(said.values, {name: value})
            if made.ByteSize() + said.ByteSize() > MOST_CONTENT:
                omitted.append(name)
            else:
                made.attributes.extend(said.values)
        if omitted:
            span_export.fill(made.attributes, {semconv.CONTENT_OMITTED: omitted})
