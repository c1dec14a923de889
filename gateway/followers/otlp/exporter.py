"""Sends every finished span of the tape to a collector: a follower of the change feed like any other.

It reads the feed from its cursor in pieces, makes one request of each (`BatchReader`) and continues when that was
accepted or dropped (`CollectorClient`); `selection` chooses what is sent when. The cursor is kept on the tape, at most
once a second and at the end, so a gateway that is started again continues where it was. Nothing is lost; after a crash
the spans of the last second may be sent twice, with the same ids. A gateway that exports for the first time begins at
the end of the feed. While the collector is away the tape is the buffer: only one request is in memory. Calls never wait
for any of this; conversion and compression happen in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from itertools import chain
from time import monotonic, time_ns
from typing import Any, Final, NamedTuple

import aiohttp
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Outgoing

from penstock.gateway.config import OtlpSettings
from penstock.gateway.followers.otlp import semconv, span_export
from penstock.gateway.followers.otlp.selection import ExportItem, SpanSelector, judged_call
from penstock.gateway.followers.otlp.span_export import SpanPlacement
from penstock.gateway.model.answers import Change
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.rollout import Attempt
from penstock.gateway.model.span import Span
from penstock.gateway.model.times import Backoff
from penstock.gateway.reading.turns import read_exchange
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import TapeError, is_damage, unless_damaged
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.http.request import retry_after
from penstock.gateway.work.dispatcher import Dispatcher

# Requests to a collector: sent until they are accepted or refused for good.
#
# Answers are handled as the OTLP specification says ("Retryable Response Codes", "OTLP/HTTP Throttling"). After 429,
# 502, 503, 504 or no answer at all the request is sent again, after `Retry-After` or after pauses that grow and vary.
# After any other answer that is no success it is dropped and counted. One request is under way at a time: the tape is
# the buffer.
#
# The exporter of opentelemetry-sdk cannot do that. Its result is success or failure: a refusal is not told from a
# collector that is away, rejected spans count as sent, and so does a redirection. One span that it cannot encode (no
# kind, half a surrogate pair in its name) loses its whole request.

RETRYABLE = frozenset({429, 502, 503, 504})
PAUSES: Final = Backoff(0.5, 30.0)
LONGEST_WAIT_S: Final = 300.0
"""Longest pause that a collector may ask for."""
LARGEST_ANSWER = 4 << 20

_HEADERS = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}


class ExportLimits(NamedTuple):
    """The size of requests, and the time for an answer."""

    batch: int = 512
    """Most spans in one request: as many as SDKs send at most, so that every collector takes it."""
    timeout: float = 10.0
    """Seconds after which a request that was not answered is sent again: the OTLP specification's."""


DEFAULT_LIMITS = ExportLimits()


class CollectorClient:
    """A connection to one collector. `open` before use, `close` after."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float, metrics: Metrics) -> None:
        self.failing = False
        """True while the collector accepts nothing."""
        self._url = url
        self._headers = {**headers, **_HEADERS}
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Create the client; on the event loop."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, body: bytes, spans: int, before_pause: Callable[[], None]) -> None:
        """Send a request (gzip); returns when it was accepted, or dropped for good. Cancel it to give up."""
        failures = 0
        while (wait := await self._try(body, spans)) is not None:
            before_pause()
            failures += 1
            # A collector that comes back must not get all its clients at once.
            await asyncio.sleep(wait or PAUSES.after(failures, random.uniform(0.5, 1.5)))
            self._metrics.otlp_retries += 1

    async def _try(self, body: bytes, spans: int) -> float | None:
        """Send once. Returns None when the request is done, else the seconds that the collector asks to wait, 0 when it
        gives none."""
        assert self._session is not None, "open() comes first"
        try:
            async with self._session.post(self._url, data=body, headers=self._headers, allow_redirects=False) as answer:
                if answer.status in RETRYABLE:
                    self._fails(f"{answer.status} {answer.reason}")
                    return retry_after(answer.headers.get("Retry-After"), LONGEST_WAIT_S) or 0.0
                told = bytearray()
                while len(told) < LARGEST_ANSWER and (piece := await answer.content.read(LARGEST_ANSWER)):
                    told += piece
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            # ValueError: an invalid host name (UnicodeError).
            self._fails(str(error) or type(error).__name__)
            return 0.0
        self._settle(answer.status, bytes(told), spans)
        return None

    def _settle(self, status: int, told: bytes, spans: int) -> None:
        if self.failing:
            _log.info("%s takes spans again", self._url)
        self.failing = False
        if not 200 <= status < 300:
            # The collector's message is not shown: it may repeat the headers that were sent.
            _log.error("%s refused %d spans for good with %d: they are dropped", self._url, spans, status)
            self._metrics.otlp_dropped += spans
            return
        rejected, why = _rejected(told)
        if why:
            _log.warning("%s rejected %d of %d spans: %.500s", self._url, rejected, spans, why)
        self._metrics.otlp_dropped += min(rejected, spans)
        self._metrics.otlp_exported += spans - min(rejected, spans)

    def _fails(self, why: str) -> None:
        if not self.failing:
            _log.warning("%s does not take spans (%s): trying again until it does", self._url, why)
        self.failing = True


def _rejected(told: bytes) -> tuple[int, str]:
    """(number of rejected spans, why) in a successful answer."""
    try:
        partial = ExportTraceServiceResponse.FromString(told).partial_success
    except DecodeError:
        return 0, ""
    return max(0, partial.rejected_spans), partial.error_message


# Cuts the change feed into export requests of a bounded size. `selection` chooses the spans of a change that are
# sent.
#
# A request ends at a number of spans or at a size, whichever comes first, so memory is bounded whatever the tape
# holds.

LARGEST_REQUEST = 4 << 20
"""Bytes after which a request is sent, before compression."""


class ExportBatch(NamedTuple):
    """A piece of the feed, ready to be sent."""

    body: bytes
    """The request, gzip; empty when there is nothing to send."""
    spans: int
    after: int
    """The cursor after the piece."""
    full: bool
    """True if there may be more to send at once."""


class BatchReader:
    """Turns pieces of the feed into requests; for one thread at a time."""

    def __init__(
        self,
        tape: Store,
        settings: OtlpSettings,
        servers: Mapping[str, str],
        metrics: Metrics,
        now_ns: Callable[[], int],
        batch: int = DEFAULT_LIMITS.batch,
    ) -> None:
        """`batch`: most spans in one request."""
        self._tape = tape
        self._batch = batch
        self._selection = SpanSelector(tape, settings.wait, now_ns)
        self._maker = RequestBuilder(tape, settings, servers)
        self._metrics = metrics
        self._changes: deque[Change] = deque()
        self._going: Iterator[ExportItem] | None = None
        """The rest of the first change's spans, where a request was full before its end."""
        self._at = self._end = 0
        """The cursor at the end of the last piece, and at the end of the changes that were read."""
        self._more = False
        """True if the feed has more changes after those."""

    def read(self, since: int, patient: bool = True) -> ExportBatch:
        """The changes after a cursor, as one request. `patient`: calls may wait for their agents' spans."""
        if since != self._at:
            self._forget()
        try:
            return self._read(since, patient)
        except TapeError:
            self._forget()
            raise

    def _forget(self) -> None:
        self._changes.clear()
        self._going = None

    def _read(self, since: int, patient: bool) -> ExportBatch:
        request = self._maker.request()
        if not self._changes:
            found, self._end = self._tape.changes(since, self._batch)
            self._more = self._end - since >= self._batch
            self._changes.extend(found)
        self._selection.refresh(self._changes, self._going is not None)
        while self._changes:
            change = self._changes[0]
            if patient and unless_damaged(partial(self._selection.must_wait, change)):
                return self._piece(request, change.cursor - 1, False)
            if not self._add(request, change):
                return self._piece(request, change.cursor - 1, True)
            self._changes.popleft()
        return self._piece(request, self._end, self._more)

    def _piece(self, request: ExportRequest, after: int, full: bool) -> ExportBatch:
        self._at = after
        return ExportBatch(request.packed(), request.spans, after, full)

    def _add(self, request: ExportRequest, change: Change) -> bool:
        """Add the spans of a change to a request; False when the request is full before all are added."""
        going = self._going or self._selection.select(change)
        while (following := self._next(going, change)) is not None:
            if request.size >= LARGEST_REQUEST or request.spans >= self._batch:
                self._going = chain((following,), going)
                return False
            self._make(request, following, change)
        self._going = None
        return True

    def _next(self, going: Iterator[ExportItem], change: Change) -> ExportItem | None:
        with self._isolated(change):
            return next(going, None)
        return None

    def _make(self, request: ExportRequest, following: ExportItem, change: Change) -> None:
        with self._isolated(change):
            if isinstance(following, Attempt):
                self._maker.add_root(request, following)
            else:
                self._maker.add(request, *following)

    @contextmanager
    def _isolated(self, change: Change) -> Generator[None]:
        """Skip one span that cannot be sent, so that it does not hold back all that follow."""
        try:
            yield
        except Exception as error:
            damaged = isinstance(error, TapeError)
            if damaged and not is_damage(error):
                raise
            _log.error("change %d cannot be exported", change.cursor, exc_info=None if damaged else error)
            self._metrics.otlp_dropped += 1


NOTE = "otlp.cursor"
"""The name of the cursor on the tape."""
GATHER_S, NOTE_S, RETRY_S = 0.5, 1.0, 1.0
"""Seconds to wait for a fuller request; between writes of the cursor; before another look at a tape that failed."""
_log = logging.getLogger("penstock.otlp")


class Exporter:
    """Exports a tape. `start` once the desk runs, `stop` before it stops."""

    def __init__(
        self,
        settings: OtlpSettings,
        servers: Mapping[str, str],
        tape: Store,
        feed: ChangeFeed,
        dispatcher: Dispatcher,
        metrics: Metrics,
        now_ns: Callable[[], int] = time_ns,
        pace: ExportLimits = DEFAULT_LIMITS,
    ) -> None:
        """`settings` must have an endpoint; `servers`: URL of each upstream and server of tools. Raises
        `ConfigError`."""
        self._timeout = pace.timeout
        self._tape = tape
        self._feed = feed
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._delivery = CollectorClient(settings.traces_url(), settings.headers(), pace.timeout, metrics)
        self._reader = BatchReader(tape, settings, servers, metrics, now_ns, pace.batch)
        self._cursor = self._noted = 0
        self._noted_at = 0.0
        self._said = ""
        """The error of the last reading of the tape, as logged; empty if it succeeded."""
        self.continued = False
        """True if another process continues at once from where this one stops."""
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the cursor and begin."""
        kept = self._tape.note(NOTE)
        end = self._tape.cursor()
        self._cursor = self._noted = end if kept is None else min(int(kept), end)
        if kept is None:
            await self._dispatcher.note(NOTE, str(end).encode())
        self._delivery.open()
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Send the rest of the tape, unless the collector accepts nothing or takes too long, and keep the cursor."""
        self._stopping.set()
        if self._task is not None:
            patience = 0.0 if self._delivery.failing or self.continued else self._timeout
            await asyncio.wait([self._task], timeout=patience)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._note(0.0)
        await self._delivery.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
                return
            except TapeError as error:
                if str(error) != self._said:
                    self._said = str(error)
                    _log.error("the tape cannot be exported, it is tried again: %s", error)
            except Exception:
                _log.exception("exporting failed at change %d", self._cursor)
            if self._stopping.is_set():
                return  # The next start continues from there.
            await self._pause(RETRY_S)

    async def _follow(self) -> None:
        """Export until the gateway stops, and then to the end of the tape."""
        while not self._stopping.is_set() or self._cursor < self._tape.cursor():
            if not self._stopping.is_set():
                await self._wait()
            piece = await asyncio.to_thread(self._reader.read, self._cursor, not self._stopping.is_set())
            if piece.spans:
                await self._delivery.send(piece.body, piece.spans, self._measure)
            self._cursor, self._said = piece.after, ""
            self._measure()
            await self._note(NOTE_S)
            if not piece.full:
                await self._pause(GATHER_S)

    def _measure(self) -> None:
        self._metrics.otlp_lag_changes = self._tape.cursor() - self._cursor

    async def _wait(self) -> None:
        """Wait for a change, or for the stop."""
        waiting = [asyncio.ensure_future(one) for one in (self._feed.wait(self._cursor), self._stopping.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _note(self, every_s: float) -> None:
        """Keep the cursor when it has moved and the last write is long enough ago. If the tape does not take it, it is
        tried again later: until then a crash would send more spans twice."""
        if self._cursor == self._noted or monotonic() - self._noted_at < every_s:
            return
        self._noted_at, cursor = monotonic(), self._cursor
        try:
            await self._dispatcher.note(NOTE, str(cursor).encode())
            self._noted = cursor
        except TapeError as error:
            _log.warning("the exporter's position cannot be kept: %s", error)


# A request is filled with spans, a reward with the call that it judges, under the resource and the instrumentation that
# they came from. None has content unless `otlp.capture_content` is set, wherever it came from.

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
        for name, value in span_export.turn_content(read_exchange(span.dialect, exchange, span)).items():
            said = KeyValueList()
            span_export.fill(said.values, {name: value})
            if made.ByteSize() + said.ByteSize() > MOST_CONTENT:
                omitted.append(name)
            else:
                made.attributes.extend(said.values)
        if omitted:
            span_export.fill(made.attributes, {semconv.CONTENT_OMITTED: omitted})


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
