"""`POST /v1/traces`, `/v1/logs`, `/v1/metrics`: telemetry of any instrumented agent, kept in the attempt it belongs to.

A span stays a span, a log record becomes an event, a metric is accepted and not kept. When the request is answered, all
accepted items are durable. Items that cannot be read, belong nowhere, or belong to another rollout than the token's,
are rejected one by one: the answer is then a partial success that gives their number and the reasons, and the metrics
count them. A reward that a span carries is kept after the spans; its source is `agent` if it came with an agent token,
else `user`. An exporter that did not hear the answer sends its batch again: its spans and events are then there twice,
its rewards once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import Any

from aiohttp import web

from penstock.gateway.followers.otlp import semconv, span_import
from penstock.gateway.followers.otlp.lightning_spans import arrival_of_otlp
from penstock.gateway.followers.otlp.provider_spans import ProviderSpans
from penstock.gateway.followers.otlp.signals import (
    JSON,
    LOGS,
    METRICS,
    PROTO,
    PROTOBUF,
    SIGNALS,
    TRACES,
    UNSUPPORTED_SIGNALS,
    Encoding,
    ItemRejectedError,
    OtlpRequestError,
    RequestTree,
    Signal,
    TelemetryItem,
    camel,
    items,
    load_protobuf,
    place_of,
    tree_of,
)  # fmt: skip
from penstock.gateway.followers.otlp.span_import import (
    Links,
    RequestScope,
    TelemetrySource,
    Traces,
    attempt_in_scope,
    attempt_of,
    attempt_reference,
    has_reward,
    judgement_of,
    linked_calls,
    links_of,
    rollout_of_session,
    source_of,
)
from penstock.gateway.model.base import Origin
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.rollout import Judgement, RewardSource
from penstock.gateway.model.span import is_provider_span
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import OperationRefusedError
from penstock.gateway.work.dispatcher import Dispatcher
from penstock.gateway.work.lightning import LightningOperations, SpanArrival

REQUEST_BYTES = 16 << 20
"""Most bytes of one request, without its compression: four times as many as SDKs and collectors send at most. Protobuf
can take fifty times its size in memory."""
SLICE_S = 0.003
"""Seconds of work on items between two turns of the event loop."""
MOST_REASONS = 10
KEY = "key"
"""The scope of a request that came with a key for calls: its telemetry goes to the sessions that it names."""
_HOWTO = "send them to the rollout's address or with its token, or set the resource attribute penstock.rollout_id"
_ENTRIES: dict[str, Callable[[Any, dict[str, Any], dict[str, Any]], SpanEntry]] = {
    TRACES.name: span_import.entry_of,
    LOGS.name: span_import.log_entry_of,
}
_POINTS = ("gauge", "sum", "histogram", "exponential_histogram", "summary")


class TelemetryReceiver:
    """The state of the telemetry handler."""

    def __init__(
        self, dispatcher: Dispatcher, tape: Store, metrics: Metrics, request_bytes: int = REQUEST_BYTES
    ) -> None:
        """`metrics` counts items; `request_bytes`: most bytes of one request, without its compression."""
        self.dispatcher = dispatcher
        self.tape = tape
        self.metrics = metrics
        self.received = {TRACES.name: metrics.otlp_spans, LOGS.name: metrics.otlp_logs}
        self.request_bytes = request_bytes
        self.traces = Traces(tape, dispatcher.wait_until_recorded)
        self.provider = ProviderSpans(tape, dispatcher, metrics.otlp_spans)


RECEIVER = web.AppKey("otlp", TelemetryReceiver)


async def post_telemetry(request: web.Request) -> web.StreamResponse:
    """Telemetry as OTLP/HTTP sends it: protobuf or JSON, gzip or not. What is answered is durable."""
    receiver, encoding = request.app[RECEIVER], JSON
    try:
        signal = _signal(request)
        encoding = encoding_of(request)
        tree = await decode(signal, encoding, await body_of(request, receiver.request_bytes))
        if signal is METRICS:
            receiver.metrics.otlp_metric_points += await _count_points(tree)
            return success_response(signal, encoding)
        return await _keep(receiver, signal, encoding, tree, request)
    except OtlpRequestError as failure:
        return error_response(encoding, failure)
    except TapeError as error:
        return error_response(encoding, OtlpRequestError(503, f"the tape does not take it: {error}"))


def _signal(request: web.Request) -> Signal:
    name = request.match_info["signal"]
    if name not in SIGNALS:
        why = UNSUPPORTED_SIGNALS.get(name, f"{name!r} is no signal")
        raise OtlpRequestError(404, f"{why}; send to /v1/{', /v1/'.join(SIGNALS)}", "path")
    if request.method != "POST":
        raise OtlpRequestError(405, f"{request.method} is not how telemetry is sent: use POST", "method")
    return SIGNALS[name]


async def _keep(
    receiver: TelemetryReceiver, signal: Signal, encoding: Encoding, tree: RequestTree, request: web.Request
) -> web.StreamResponse:
    batch = _TelemetryRequest(receiver, signal, tree, request)
    await batch.take()
    await batch.keep()
    return success_response(signal, encoding, batch.rejected.total(), batch.message())


async def _count_points(tree: RequestTree) -> int:
    """Number of points in those metrics that can be read."""
    count, pause = 0, _Pause()
    for item in items(METRICS, tree):
        if item.message is not None and not isinstance(item.message, ItemRejectedError):
            kinds = (getattr(item.message, kind) for kind in _POINTS)
            count += sum(len(kind.data_points or ()) for kind in kinds if kind is not None)
        await pause.if_due()
    return count


class _Pause:
    """Gives the event loop a turn from time to time while a large request is read."""

    def __init__(self) -> None:
        self._until = monotonic() + SLICE_S

    async def if_due(self) -> None:
        if monotonic() > self._until:
            await asyncio.sleep(0)
            self._until = monotonic() + SLICE_S


class _TelemetryRequest:
    """A request on its way to the tape."""

    def __init__(self, receiver: TelemetryReceiver, signal: Signal, tree: RequestTree, request: web.Request) -> None:
        """The dispatch has put the scope of the request into the match of its path: see
        `gateway.process.dispatch`."""
        found = request.match_info
        self._receiver = receiver
        self._signal = signal
        self._tree = tree
        self._scope = RequestScope(found["rid"], found["aid"], found["kind"]) if "rid" in found else None
        self._by_key = found.get("scope") == KEY
        self._source = TelemetrySource({}, {}, None)
        self._entries: list[SpanEntry] = []
        self._by_trace: list[tuple[SpanEntry, TelemetryItem]] = []
        self._arrived: list[SpanArrival] = []
        """Spans that name an attempt in Agent Lightning's way."""
        self._by_call: list[SpanEntry] = []
        """Spans of a provider, which are joined by their call."""
        self._attempts: dict[str, str] = {}
        self._warnings: list[str] = []
        self._reasons: dict[str, tuple[int, str]] = {}
        """For each of the first reasons, the number of rejected items and the place of the first."""
        self.rejected: Counter[str] = Counter()
        """Number of rejected items, by outcome."""

    async def take(self) -> None:
        """Read every item and find its attempt."""
        entry_of, pause, new_source = _ENTRIES[self._signal.name], _Pause(), True
        for item in items(self._signal, self._tree):
            try:
                if item.message is None:
                    new_source = True
                else:
                    if new_source:
                        self._source, new_source = source_of(item), False
                    source = self._source
                    if isinstance(item.message, ItemRejectedError):
                        raise item.message
                    self._place(entry_of(item.message, source.resource, source.instrumentation), item)
            except ItemRejectedError as error:
                self._reject(error, item)
            await pause.if_due()
        if self._by_trace:
            await self._place_by_trace()
        if self._by_call:
            placed, self._by_call = await self._receiver.provider.place(self._by_call)
            for entry, name in placed:
                self._give(entry, *name)

    def _reject(self, error: ItemRejectedError, item: TelemetryItem) -> None:
        self.rejected[error.outcome] += 1
        why = str(error)
        if why in self._reasons or len(self._reasons) < MOST_REASONS:
            count, where = self._reasons.get(why, (0, ""))
            self._reasons[why] = count + 1, where or place_of(self._signal, self._tree, item.place)

    def _place(self, entry: SpanEntry, item: TelemetryItem) -> None:
        if self._by_key:
            self._by_trace.append((entry, item))
            return
        if self._scope is None and self._signal is TRACES and (name := self._lightning_name(entry)) is not None:
            self._give_to_lightning(entry, item, *name)
            return
        said = self._source.said or attempt_reference(entry.attributes or {})
        if isinstance(said, ItemRejectedError):
            raise said
        if self._scope is not None:
            self._give(entry, *attempt_in_scope(self._scope, said), self._scope.origin)
        elif said is not None:
            self._give(entry, said[0], said[1] or self._attempt_of(said[0]))
            if entry.trace_id is not None:
                self._receiver.traces.learn(entry.trace_id, (entry.rollout, entry.attempt))
        elif self._signal is TRACES and is_provider_span(entry.attributes):
            self._by_call.append(entry)
        else:
            self._by_trace.append((entry, item))

    def _lightning_name(self, entry: SpanEntry) -> tuple[str, str] | None:
        """The attempt that Agent Lightning names: its own attributes are before those of the resource."""
        said = self._source.resource | (entry.attributes or {})
        if semconv.LIGHTNING_ROLLOUT not in said or semconv.LIGHTNING_ATTEMPT not in said:
            return None
        found = attempt_reference({name: said[name] for name in (semconv.LIGHTNING_ROLLOUT, semconv.LIGHTNING_ATTEMPT)})
        return None if found is None or found[1] is None else (found[0], found[1])

    def _give_to_lightning(self, entry: SpanEntry, item: TelemetryItem, rollout: str, attempt: str) -> None:
        entry.rollout, entry.attempt = rollout, attempt
        pairs = () if item.resource is None else item.resource.attributes or ()
        self._arrived.append(arrival_of_otlp(item.message, pairs, entry))
        self._receiver.traces.learn(entry.trace_id or "", (rollout, attempt))

    async def _keep_arrived(self) -> None:
        """Write the spans that name an attempt in Agent Lightning's way."""
        dispatcher, arrived = self._receiver.dispatcher, self._arrived
        if any(one.judged is not None for one in arrived):
            await dispatcher.wait_until_recorded()
        now = dispatcher.now_ns()
        await dispatcher.change(lambda tape: LightningOperations(tape).add_spans(arrived, now, made=True))
        self._warnings += [one.problem for one in arrived if one.problem is not None]

    def _give(self, entry: SpanEntry, rollout: str, attempt: str, origin: Origin = "header") -> None:
        entry.rollout, entry.attempt, entry.origin = rollout, attempt, origin
        if not entry.start_ns:
            entry.start_ns = entry.end_ns = self._receiver.dispatcher.now_ns()
        self._entries.append(entry)

    def _attempt_of(self, rollout: str) -> str:
        found = self._attempts.get(rollout)
        if found is None:
            found = self._attempts[rollout] = attempt_of(self._receiver.tape, rollout)
        return found

    async def _place_by_trace(self) -> None:
        """Find attempts by the trace, or else by the session."""
        traces = {entry.trace_id for entry, _ in self._by_trace if entry.trace_id is not None}
        # Who has a key for calls chooses trace ids and attributes, but may add nothing to rollouts that the queue made.
        known = {} if self._by_key else await self._receiver.traces.find(traces)
        for entry, item in self._by_trace:
            name = known.get(entry.trace_id or "")
            if name is not None:
                self._give(entry, *name)
            elif (rollout := rollout_of_session(self._receiver.tape, entry.name, entry.attributes or {})) is not None:
                self._give(entry, rollout, self._attempt_of(rollout), "implicit")
            else:
                why = f"their trace and their session belong to no rollout, or to several; {_HOWTO}"
                if self._by_key:
                    why = "with a key for calls, telemetry belongs to the session that it names, and they name none"
                self._reject(ItemRejectedError("unjoined", why), item)

    async def keep(self) -> None:
        """Write the accepted items to the tape, with their rewards, and count them; raises `TapeError`."""
        if self._entries:
            await self._receiver.dispatcher.add(self._entries)
        if self._arrived:
            await self._keep_arrived()
        if self._by_call:
            await self._receiver.provider.wait(self._by_call)
        received = self._receiver.received[self._signal.name]
        received["accepted",] += len(self._entries) + len(self._by_call) + len(self._arrived)
        for outcome, count in self.rejected.items():
            received[outcome,] += count
        rewards = self._signal is TRACES and not self._by_key
        rewarding = [entry for entry in self._entries if rewards and has_reward(entry)]
        await asyncio.gather(*(self._reward(entry) for entry in rewarding))

    async def _reward(self, entry: SpanEntry) -> None:
        source: RewardSource = "agent" if self._scope is not None and self._scope.agent_token else "user"
        try:
            judgement = judgement_of(entry, source)
            if links := links_of(entry):
                judgement = await self._linked(entry, judgement, links)
            await self._receiver.dispatcher.reward(entry.rollout, entry.attempt, judgement)
        except (ItemRejectedError, OperationRefusedError) as error:
            self._warnings.append(str(error))

    async def _linked(self, entry: SpanEntry, judgement: Judgement, links: Links) -> Judgement:
        """A reward with the call that its links name; if they do not name one, it judges the attempt."""
        await self._receiver.dispatcher.wait_until_recorded()
        spans = await asyncio.to_thread(lambda: list(self._receiver.tape.spans(entry.rollout, entry.attempt)))
        found = await asyncio.to_thread(linked_calls, spans, links, entry.span_id)
        if len(found) == 1:
            return judgement.model_copy(update={"span": found[0]})
        many = f"{len(found)} calls" if found else "no call"
        self._warnings.append(
            f"the links of span {entry.span_id} name {many} of its attempt: its reward is the attempt's"
        )
        return judgement

    def message(self) -> str:
        """The message to the sender; empty when everything was accepted."""
        reasons = [f"{count} rejected: {where}: {why}" for why, (count, where) in self._reasons.items()]
        if more := self.rejected.total() - sum(count for count, _ in self._reasons.values()):
            reasons.append(f"{more} more rejected for other reasons")
        return "; ".join(reasons + self._warnings[:MOST_REASONS])


# OTLP over HTTP: requests and answers in protobuf or JSON; an answer has the encoding of its request.
#
# Source: the OTLP specification, "OTLP/HTTP Request" and "OTLP/HTTP Response". Failures are a `google.rpc.Status`;
# bad data names the field as a `google.rpc.BadRequest`. Protobuf is imported where it is needed (see the package).
# The server must leave compressed bodies alone (`auto_decompress=False`), because it cannot tell one that was cut off
# from a complete one.

COMPRESSIONS = ("", "identity", "gzip")
_INVALID, _UNAVAILABLE, _TOO_LARGE, _UNIMPLEMENTED, _INTERNAL = 3, 14, 8, 12, 13
_CODES = {
    400: _INVALID,
    404: _UNIMPLEMENTED,
    405: _UNIMPLEMENTED,
    413: _TOO_LARGE,
    415: _UNIMPLEMENTED,
    503: _UNAVAILABLE,
}


def encoding_of(request: web.Request) -> Encoding:
    """The encoding of a request and of its answer; raises `OtlpRequestError`."""
    if request.content_type == PROTOBUF:
        return PROTOBUF
    if request.content_type == JSON:
        return JSON
    allowed = f"use {PROTOBUF} or {JSON}"
    raise OtlpRequestError(
        415, f"Content-Type {request.content_type!r} is not an encoding of OTLP: {allowed}", "Content-Type"
    )


async def body_of(request: web.Request, limit: int) -> bytes:
    """The body without its compression; raises `OtlpRequestError`. `limit`: most bytes without compression."""
    compression = request.headers.get("Content-Encoding", "").strip().lower()
    if compression not in COMPRESSIONS:
        raise OtlpRequestError(
            415, f"Content-Encoding {compression!r} is not supported: use gzip or none", "Content-Encoding"
        )
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        _check_size(len(body), limit)
    return _gunzip(bytes(body), limit) if compression == "gzip" else bytes(body)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise OtlpRequestError(413, f"the request is larger than {limit} bytes; send smaller batches")


def _gunzip(body: bytes, limit: int) -> bytes:
    """The content of one gzip member; nothing is decompressed beyond the limit. Raises `OtlpRequestError`."""
    inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        decoded = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise OtlpRequestError(400, f"the body is not gzip: {error}", "body") from None
    _check_size(len(decoded), limit)
    if not inflater.eof or inflater.unused_data:
        raise OtlpRequestError(400, "the gzip body ends early, or goes on after its end", "body")
    return decoded


async def decode(signal: Signal, encoding: Encoding, body: bytes) -> RequestTree:
    """Decode a request of this signal; raises `OtlpRequestError`."""
    if encoding == PROTOBUF and PROTO + signal.module not in sys.modules:
        # The import takes a tenth of a second, and must not delay calls.
        await asyncio.to_thread(load_protobuf, signal)
    return tree_of(signal, encoding, body)


def success_response(signal: Signal, encoding: Encoding, rejected: int = 0, message: str = "") -> web.Response:
    """The answer to an accepted request; also to one of which some items were rejected, or that gets a warning."""
    if encoding == JSON:
        partial = {camel(signal.rejected): str(rejected), "errorMessage": message} if rejected or message else None
        return _answer(200, JSON, json.dumps({} if partial is None else {"partialSuccess": partial}).encode())
    if not (rejected or message):
        return _answer(200, PROTOBUF, b"")
    partial = signal.response_class("PartialSuccess")(**{signal.rejected: rejected, "error_message": message})
    return _answer(200, PROTOBUF, signal.response_class("ServiceResponse")(partial_success=partial).SerializeToString())


def error_response(encoding: Encoding, failure: OtlpRequestError) -> web.Response:
    """The answer to a refused request."""
    code = _CODES.get(failure.status, _INTERNAL)
    body = (_json_status if encoding == JSON else _protobuf_status)(code, failure)
    answer = _answer(failure.status, encoding, body)
    if failure.status == 503:
        answer.headers["Retry-After"] = "1"
    if failure.status == 405:
        answer.headers["Allow"] = "POST"
    return answer


def _json_status(code: int, failure: OtlpRequestError) -> bytes:
    status: dict[str, object] = {"code": code, "message": failure.message}
    if failure.field is not None:
        violation = {"field": failure.field, "description": failure.message}
        status["details"] = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]}]
    return json.dumps(status).encode()


def _protobuf_status(code: int, failure: OtlpRequestError) -> bytes:
    from google.rpc import error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]

    status = status_pb2.Status(code=code, message=failure.message)
    if failure.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=failure.field, description=failure.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return status.SerializeToString()


def _answer(status: int, encoding: Encoding, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, headers={"Content-Type": encoding})
