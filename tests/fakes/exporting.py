"""The exporter of spans at work on a tape, without the gateway around it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fakes.collector import Collector
from fakes.memory_tape import T0
from fakes.otlp import Inlet

from penstock.gateway.config import OtlpSettings
from penstock.gateway.followers.otlp.exporter import Exporter, ExportLimits
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.tape.store.records import SpanEntry

SERVERS = {"local": "http://127.0.0.1:8000/v1", "azure": "https://me.openai.azure.com", "main": "https://api.x.ai/v1"}


def exporter(inlet: Inlet, collector: Collector, metrics: Metrics | None = None, **settings: Any) -> Exporter:
    pace = ExportLimits(**{name: settings.pop(name) for name in ExportLimits._fields if name in settings})
    made = OtlpSettings(endpoint=collector.url, **settings)
    return Exporter(made, SERVERS, inlet.store, inlet.feed, inlet.dispatcher, metrics or Metrics(), pace=pace)


@asynccontextmanager
async def exporting(
    inlet: Inlet, collector: Collector, metrics: Metrics | None = None, **settings: Any
) -> AsyncGenerator[Exporter]:
    made = exporter(inlet, collector, metrics, **settings)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def call(number: int = 1, rollout: str = "r1", **fields: Any) -> SpanEntry:
    """A finished model call."""
    entry = SpanEntry(rollout, "a1", status="ok", dialect="chat", path="/v1/chat/completions?x=1", upstream="local")
    entry.start_ns, entry.end_ns, entry.model, entry.http_status = T0 + number, T0 + number + 10**9, "m-1", 200
    for name, value in fields.items():
        setattr(entry, name, value)
    return entry
