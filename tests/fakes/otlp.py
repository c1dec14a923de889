"""The inlet of spans on a port of its own: the real handler, desk, recorder and tape, less the data plane in front."""

from __future__ import annotations

import io
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from fakes.web_site import site
from google.protobuf import json_format
from google.rpc.error_details_pb2 import BadRequest  # pyright: ignore[reportMissingTypeStubs]
from google.rpc.status_pb2 import Status  # pyright: ignore[reportMissingTypeStubs]
from opentelemetry.exporter.otlp.proto.common._internal import _encode_value
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from penstock.gateway.app import open_store
from penstock.gateway.config import GatewayConfig
from penstock.gateway.followers.otlp.ingest import RECEIVER, TelemetryReceiver, post_telemetry
from penstock.gateway.followers.otlp.signals import PROTOBUF
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.rollout import Reward
from penstock.gateway.model.span import Span
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.work.dispatcher import Dispatcher

LIMIT = 1 << 20


@dataclass
class Inlet:
    """Where spans come in, and the tape behind it."""

    store: Store
    dispatcher: Dispatcher
    feed: ChangeFeed
    recorder: Recorder
    url: str
    http: aiohttp.ClientSession
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def counted(self) -> Counter[tuple[str, ...]]:
        """Spans, by what became of them."""
        return self.metrics.otlp_spans

    async def post(self, body: bytes, kind: str = PROTOBUF, path: str = "/v1/traces", **headers: str) -> Answer:
        """Send a request; `headers` are written with underscores."""
        named = {"Content-Type": kind} | {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(self.url + path, data=io.BytesIO(body), headers=named) as answer:
            return Answer(answer.status, answer.headers.get("Content-Type", ""), await answer.read(), answer.headers)

    def spans(self, rollout: str, kind: str = "otel") -> list[Span]:
        return [span for span in self.store.spans(rollout) if span.kind == kind]

    def rewards(self, rollout: str) -> list[Reward]:
        return [Reward.of(span) for span in self.spans(rollout, "reward")]


@dataclass
class Answer:
    """What came back."""

    status: int
    kind: str
    body: bytes
    headers: Any


@asynccontextmanager
async def inlet_at(path: Path) -> AsyncGenerator[Inlet]:
    """An inlet with its tape in `path`."""
    config, metrics = GatewayConfig(), Metrics()
    with open_store(path) as store:
        feed = ChangeFeed(store.cursor())
        recorder = Recorder(store, config.tape, metrics, feed.committed)
        dispatcher = Dispatcher(recorder, metrics, time.time_ns)
        recorder.start()
        await dispatcher.start()
        app = web.Application()
        app[RECEIVER] = receiver = TelemetryReceiver(dispatcher, store, metrics, LIMIT)
        for scope in ("", "/agent/none", "/agent/{kind}/{rid}/{aid}"):
            app.router.add_route("*", scope + "/v1/{signal}", post_telemetry)
        async with site(app, unpacks=False) as url, aiohttp.ClientSession() as http:
            yield Inlet(store, dispatcher, feed, recorder, url, http, metrics)
        await receiver.provider.stop()
        await dispatcher.stop()
        await recorder.close()


def names(spans: Sequence[Span]) -> list[str | None]:
    return [span.name for span in spans]


@dataclass
class Made:
    """A span for a request."""

    name: str = "made"
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    resource: dict[str, Any] = field(default_factory=dict[str, Any])
    trace: str = field(default_factory=lambda: secrets.token_hex(16))
    span: str = field(default_factory=lambda: secrets.token_hex(8))
    parent: str = ""
    start: int = 1_790_000_000_000_000_000
    end: int = 1_790_000_001_000_000_000


def request(*spans: Made) -> ExportTraceServiceRequest:
    """Spans, each with a resource of its own."""
    made = ExportTraceServiceRequest()
    for one in spans:
        group = made.resource_spans.add()
        fill(group.resource.attributes, one.resource)
        span = group.scope_spans.add().spans.add(
            trace_id=bytes.fromhex(one.trace),
            span_id=bytes.fromhex(one.span),
            parent_span_id=bytes.fromhex(one.parent),
            name=one.name,
            kind=1,
            start_time_unix_nano=one.start,
            end_time_unix_nano=one.end,
        )
        fill(span.attributes, one.attributes)
    return made


def fill(pairs: Any, values: dict[str, Any]) -> None:
    """Adds attributes as the official exporter encodes them."""
    pairs.extend(KeyValue(key=key, value=_encode_value(value)) for key, value in values.items())


def as_kind(batch: ExportTraceServiceRequest, kind: str) -> bytes:
    """The request as it is written in this encoding."""
    if kind == PROTOBUF:
        return batch.SerializeToString()
    found = json_format.MessageToDict(batch)
    for group, made in zip(found["resourceSpans"], batch.resource_spans, strict=True):
        span = made.scope_spans[0].spans[0]
        ids = {"traceId": span.trace_id.hex(), "spanId": span.span_id.hex(), "kind": 1}
        group["scopeSpans"][0]["spans"][0] |= ids
    return json.dumps(found).encode()


def partial(answer: Answer) -> tuple[int, str]:
    """(rejected spans, message) of a partial success."""
    if answer.kind == PROTOBUF:
        told = ExportTraceServiceResponse.FromString(answer.body)
        assert told.HasField("partial_success")
        return told.partial_success.rejected_spans, told.partial_success.error_message
    found = json.loads(answer.body)["partialSuccess"]
    return int(found["rejectedSpans"]), found["errorMessage"]


def status(answer: Answer) -> Status:
    """The `google.rpc.Status` of a refusal."""
    if answer.kind == PROTOBUF:
        return Status.FromString(answer.body)
    return json_format.Parse(answer.body, Status())


def violated(answer: Answer) -> list[str]:
    """The fields that a refusal names."""
    details = BadRequest()
    assert status(answer).details[0].Unpack(details)
    return [violation.field for violation in details.field_violations]
