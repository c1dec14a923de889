"""An agent with instrumentation of its own. All it knows of the gateway are OpenTelemetry's environment variables."""

from __future__ import annotations

import os

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
tracer = provider.get_tracer("agent")
context = TraceContextTextMapPropagator().extract({"traceparent": os.environ.get("TRACEPARENT", "")})
with tracer.start_as_current_span("invoke_agent", context) as span:
    span.set_attribute("penstock.reward", 0.5)
    with tracer.start_as_current_span("execute_tool"):
        pass
provider.shutdown()
