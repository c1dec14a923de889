"""Measures the cost of receiving OpenTelemetry spans: `python -m bench.otlp`.

One gateway process on one core, and four exporters on another that each send prepared requests of 100 spans, one after
the other: spans of an instrumented agent with the GenAI attributes it has (about 600 bytes each), whose resource names
their rollout. A request is answered when its spans are durable. The best of three.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import uvloop
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from bench import procfs
from bench.programs import Cores
from bench.queue import Bench, close, gateway
from bench.store import Figure, report

OUT = Path(__file__).parent / "out" / "otlp.json"
EXPORTERS, BATCH, TRIES = 4, 100, 3
ENCODINGS = {"protobuf": "application/x-protobuf", "JSON": "application/json"}
_rollouts = count(1)


def value(given: str | int) -> AnyValue:
    return AnyValue(int_value=given) if isinstance(given, int) else AnyValue(string_value=given)


def batch(rollout: str, first: int) -> ExportTraceServiceRequest:
    """Return a hundred spans of a rollout."""
    asked = ExportTraceServiceRequest()
    resource = asked.resource_spans.add()
    resource.resource.attributes.append(KeyValue(key="service.name", value=value("planner")))
    resource.resource.attributes.append(KeyValue(key="penstock.rollout_id", value=value(rollout)))
    spans = resource.scope_spans.add()
    spans.scope.name = "opentelemetry.instrumentation.openai"
    for number in range(first, first + BATCH):
        began = time.time_ns()
        span = spans.spans.add(
            trace_id=f"{rollout}{number // 20:x}".encode()[-16:].rjust(16, b"t"),
            span_id=number.to_bytes(8),
            parent_span_id=(number - 1).to_bytes(8),
            name="chat qwen3-8b",
            kind=3,
            start_time_unix_nano=began - 800_000_000,
            end_time_unix_nano=began,
        )
        for key, given in {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "openai",
            "gen_ai.request.model": "qwen3-8b",
            "gen_ai.response.model": "qwen3-8b-2026-04",
            "gen_ai.response.id": f"chatcmpl-{number}",
            "gen_ai.usage.input_tokens": 1200 + number,
            "gen_ai.usage.output_tokens": 80,
            "server.address": "api.example",
        }.items():
            span.attributes.append(KeyValue(key=key, value=value(given)))
    return asked


def request(asked: ExportTraceServiceRequest, encoding: str) -> bytes:
    """Return the request, ready to be sent."""
    body = asked.SerializeToString() if encoding == "protobuf" else to_json(asked)
    head = f"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: {ENCODINGS[encoding]}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def to_json(asked: ExportTraceServiceRequest) -> bytes:
    """Return OTLP's own JSON: ids are hexadecimal there."""
    from google.protobuf.json_format import MessageToDict
    from orjson import dumps

    found = MessageToDict(asked, use_integers_for_enums=True)
    for resource in found["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for made, span in zip(scope["spans"], asked.resource_spans[0].scope_spans[0].spans, strict=True):
                made["traceId"], made["spanId"] = span.trace_id.hex(), span.span_id.hex()
                made["parentSpanId"] = span.parent_span_id.hex()
    return dumps(found)


async def taken(bench: Bench, encoding: str, total: int) -> tuple[float, float]:
    """Return (spans a second, CPU of the gateway per span in us)."""
    sockets = await bench.sockets(EXPORTERS)
    rollouts = [f"otlp-{os.getpid():x}-{next(_rollouts)}" for _ in sockets]
    waiting = [
        [request(batch(rollout, first), encoding) for first in range(1, total // EXPORTERS + 1, BATCH)]
        for rollout in rollouts
    ]

    async def exporter(number: int) -> None:
        for one in waiting[number]:
            answer = await sockets[number].ask(one)
            assert answer in (b"", b"{}"), f"spans were not taken: {answer!r}"

    # The first request of a process imports what it needs.
    await sockets[0].ask(request(batch(f"warm-{next(_rollouts)}", 1), encoding))
    cpu, began = procfs.cpu_seconds(bench.pid), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(EXPORTERS):
            group.create_task(exporter(number))
    took, cpu = time.perf_counter() - began, procfs.cpu_seconds(bench.pid) - cpu
    close(sockets)
    sent = sum(map(len, waiting)) * BATCH
    return sent / took, cpu / sent * 1e6


def figures(bench: Bench, total: int) -> Iterator[Figure]:
    """Yield all figures, as they are measured."""
    for encoding in ENCODINGS:
        found = [uvloop.run(taken(bench, encoding, total)) for _ in range(TRIES)]
        aim = 20_000 if encoding == "protobuf" else None
        yield Figure(f"spans taken in, {encoding} in batches of {BATCH}", max(found)[0], "spans/s", at_least=aim)
        yield Figure(f"spans taken in, {encoding}: CPU", min(cpu for _, cpu in found), "us/span")


def main() -> None:
    parser = argparse.ArgumentParser(description="What taking in OpenTelemetry spans costs.")
    parser.add_argument("--spans", type=int, default=40_000, help="in each measurement")
    given = parser.parse_args()
    os.sched_setaffinity(0, {Cores.choose().load})
    with gateway(None) as bench:
        report(figures(bench, given.spans), OUT)


if __name__ == "__main__":
    main()
