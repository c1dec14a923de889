"""An export request that is being filled: spans under the resource and the instrumentation that they came from."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Outgoing

from penstock.gateway.followers.otlp import span_export


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
