"""An agent with manual spans and the stock SDK, set up by environment variables alone. It does not read TRACEPARENT.

Words: `propagate` sends W3C headers with its calls, as instrumented HTTP clients do; `hang` says so and never ends.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from openai import OpenAI
from opentelemetry import context, propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("stock.agent")
client = OpenAI(max_retries=0)
together = Barrier(2)


def ask(model: str) -> str:
    """One call; its response id."""
    headers: dict[str, str] = {}
    if "propagate" in sys.argv:
        propagate.inject(headers)
    messages = [{"role": "user", "content": "hi"}]
    return client.chat.completions.create(model=model, messages=messages, extra_headers=headers).id  # pyright: ignore


def branch(name: str, parent: context.Context) -> None:
    """One of two that work at the same time."""
    with tracer.start_as_current_span(name, parent) as span:
        together.wait()
        answered = ask(f"in-{name}")
        if name == "named":
            span.set_attribute("gen_ai.response.id", answered)
        together.wait()


with tracer.start_as_current_span("prepare"):
    pass
with tracer.start_as_current_span("answer"):
    with tracer.start_as_current_span("think", attributes={"effort": "high"}):
        _ = ask("in-think")
    with tracer.start_as_current_span("branches"), ThreadPoolExecutor(2) as pool:
        inside = context.get_current()
        for done in [pool.submit(branch, name, inside) for name in ("named", "unnamed")]:
            done.result()
    if "hang" in sys.argv:
        assert provider.force_flush()
        print("hanging", flush=True)
        _ = sys.stdin.read()
        together.wait()
_ = ask("outside")
provider.shutdown()
