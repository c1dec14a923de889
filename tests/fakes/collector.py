"""A collector: an OTLP/HTTP receiver built on the official protobuf types, with scripted answers.

It takes what the specification says a server takes, checks every request against it and keeps the spans. `script` holds
what to answer to the next requests; when it is empty they are taken.
"""

from __future__ import annotations

import asyncio
import gzip
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from fakes.waiting import News
from fakes.web_site import site
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Reply:
    """A scripted answer."""

    status: int = 200
    rejected: int = 0
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    before: asyncio.Event | None = None
    """Waited for before anything is answered."""
    slowly: bool = False
    """Sends the answer in two pieces."""
    hang_up: bool = False
    """Closes the connection instead."""


@dataclass
class Received:
    """A span with what it came with."""

    span: Span
    resource: dict[str, Any]
    scope: InstrumentationScope

    @property
    def attributes(self) -> dict[str, Any]:
        return plain(self.span.attributes)


class Collector:
    """What arrived, and what to answer."""

    def __init__(self) -> None:
        self.url = ""
        self.script: deque[Reply] = deque()
        self.requests: list[Mapping[str, str]] = []
        """Headers of all requests, also of those that were not taken."""
        self.came: list[float] = []
        """When each of them came; seconds of the loop's clock."""
        self.taken: list[Received] = []
        self._news = News()

    @property
    def ids(self) -> list[str]:
        return [one.span.span_id.hex() for one in self.taken]

    def named(self, name: str) -> list[Received]:
        return [one for one in self.taken if one.span.name == name]

    async def until(self, spans: int = 0, requests: int = 0) -> None:
        """Wait until so many different spans were taken and so many requests came."""
        await self._news.until(
            lambda: len(set(self.ids)) >= spans and len(self.requests) >= requests,
            lambda: f"{len(set(self.ids))} spans and {len(self.requests)} requests have come",
        )

    async def serve(self, request: web.Request) -> web.StreamResponse:
        assert request.content_type == "application/x-protobuf"
        assert request.headers["Content-Encoding"] == "gzip"
        asked = ExportTraceServiceRequest.FromString(gzip.decompress(await request.read()))
        reply = self.script.popleft() if self.script else Reply()
        self.requests.append(dict(request.headers))
        self.came.append(asyncio.get_running_loop().time())
        self._news.tell()
        if reply.before is not None:
            await reply.before.wait()
        if reply.hang_up:
            assert request.transport is not None
            request.transport.abort()
        if 200 <= reply.status < 300 and not reply.hang_up:
            self._take(asked)
        answer = ExportTraceServiceResponse()
        if reply.rejected or reply.message:
            answer.partial_success.rejected_spans, answer.partial_success.error_message = reply.rejected, reply.message
        headers = {"Content-Type": "application/x-protobuf"} | dict(reply.headers)
        if reply.slowly:
            return await _in_pieces(request, web.StreamResponse(status=reply.status, headers=headers), answer)
        return web.Response(status=reply.status, body=answer.SerializeToString(), headers=headers)

    def _take(self, asked: ExportTraceServiceRequest) -> None:
        for group in asked.resource_spans:
            for part in group.scope_spans:
                assert part.spans, "empty envelopes are not to be sent"
                for span in part.spans:
                    check(span)
                    self.taken.append(Received(span, plain(group.resource.attributes), part.scope))
        self._news.tell()


async def _in_pieces(
    request: web.Request, response: web.StreamResponse, answer: ExportTraceServiceResponse
) -> web.StreamResponse:
    body = answer.SerializeToString()
    await response.prepare(request)
    await response.write(body[:1])
    await asyncio.sleep(0.1)  # so long the answer is not whole; a reader that does not wait for it has half of it
    await response.write(body[1:])
    await response.write_eof()
    return response


def check(span: Span) -> None:
    """What must hold of every span."""
    assert len(span.trace_id) == 16
    assert any(span.trace_id)
    assert len(span.span_id) == 8
    assert any(span.span_id)
    assert len(span.parent_span_id) in (0, 8)
    assert span.parent_span_id != span.span_id
    assert span.name
    assert span.kind != Span.SPAN_KIND_UNSPECIFIED
    assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    for attributes in (span.attributes, *(event.attributes for event in span.events)):
        keys = [pair.key for pair in attributes]
        assert len(keys) == len(set(keys)), f"an attribute is there twice: {keys}"
        assert all(keys)


def plain(pairs: Any) -> dict[str, Any]:
    """Attributes as plain values, by the official types alone."""
    found: list[KeyValue] = list(pairs)
    return {pair.key: plain_value(pair.value) for pair in found}


def plain_value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain_value(one) for one in value.array_value.values]
    if kind == "kvlist_value":
        return plain(value.kvlist_value.values)
    return None if kind is None else getattr(value, kind)


@asynccontextmanager
async def collecting(port: int = 0) -> AsyncGenerator[Collector]:
    """A collector on a free port."""
    collector = Collector()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/traces", collector.serve)
    async with site(app, port, unpacks=False) as collector.url:
        yield collector
