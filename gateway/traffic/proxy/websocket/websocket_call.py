"""One request on a WebSocket and its answer, as a call. The messages of the answer are kept as events of a stream,
which they are in the same API over HTTP, so all readers treat both alike.

Steering input is a request, too: it asks for a successor of the response that it names, and its budget is reserved
before it is sent. Whether there will be a successor is known when that begins (`begin`). Until then the input is no
call, and if another request takes it along, or none does, it never becomes one (`discard`).
"""

from __future__ import annotations

import base64
import re
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final, Protocol

from penstock.gateway.model.facts import PREWARM, UNATTRIBUTED, WEBSOCKET
from penstock.gateway.model.toml import pluralized
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call_lifecycle import SLOTS, CallLifecycle, CallState
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.loose_json import RequestFields
from penstock.gateway.wire.dialects.websocket_messages import join_messages
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.request import ClientFault, HttpRequest, Refusal, UpstreamFault
from penstock.gateway.wire.http.websocket import BINARY, TEXT

# The data that all calls on a WebSocket share, and the check whether WebSockets are possible.


@dataclass(frozen=True, slots=True)
class WebSocketContext:
    """The connection of a client to an upstream."""

    admitted: CallRequest
    """The request that opened the WebSocket."""
    dialect: Dialect
    """The dialect of its messages."""
    request: HttpRequest
    pool: ConnectionPool
    sent: bytes
    """The head of the opening, as in `CallRecord.sent`."""
    head: bytes
    """The head of the answer to the opening."""


class WebSocketChannel(Protocol):
    """An open WebSocket, as a call on it sees it."""

    context: WebSocketContext
    client: ClientConnection

    touched: float
    """When the upstream last sent anything; monotonic seconds."""

    @property
    def held(self) -> bool:
        """True while nothing is read from the upstream."""
        ...

    def send(self) -> None:
        """Send the held request of the client to the upstream."""
        ...

    def on_recorded(self, passes: bool) -> None:
        """Called when the tape has an answer that waited for it. `passes`: whether its end may go to the client."""
        ...

    def refusal(self, refusal: Refusal, call: object) -> bytes:
        """Return the message of a refusal for the client, in the lane of the call."""
        ...

    def refuse(self, refusal: Refusal, said: bytes, sent: bool) -> None:
        """Send the client a refusal. The connection goes on, unless the request was sent or none may pass any more."""
        ...

    def drain(self) -> None:
        """End the connection as soon as nothing is under way."""
        ...


def check_passthrough(shared: ProxyContext, why: str | None = None) -> None:
    """Raise `ClientFault` if calls cannot pass unchanged. `why`: another reason to refuse."""
    if why is None and not shared.pins.catalog.empty:
        why = "prompts or weights are released here, which requests may have to be changed for"
    elif why is None and shared.routes:
        why = "routes here go by the model of each request"
    if why is not None:
        raise ClientFault(426, "websocket", f"{why}: use plain HTTP, which streams events", "upgrade")


_LINE_END: Final = re.compile(rb"\r\n|\r|\n")


class WebSocketCall(CallLifecycle):
    """One call. It is in `ProxyContext.running` from `begin` to its end."""

    __slots__ = (*SLOTS, "_on", "_taken", "client", "lane", "request", "started", "steering",
                 "target", "touched")  # fmt: skip

    def __init__(
        self,
        on: WebSocketChannel,
        shared: ProxyContext,
        admitted: CallRequest,
        lane: str | None = None,
        target: str | None = None,
    ) -> None:
        """`lane`: None for the default lane; `target`: the response that this is steering input for."""
        way = on.context
        self.client, self.request = on.client, _request(way.request, admitted.body, shared.epoch_ns)
        self.started, self.touched = False, self.request.started
        self.lane, self.target, self._on = lane, target, on
        self.steering = target is not None
        """True for steering input as long as no response to it has begun."""
        self._taken: list[bytes] = []
        """Steering input that its request takes along."""
        self._prepare(shared, self.request, admitted)
        record = self.record
        record.pool, record.sent, record.response_head = way.pool, way.sent, way.head
        record.stream, record.http_status = True, 101
        record.attributes = {WEBSOCKET: True, **({PREWARM: True} if way.dialect.is_prewarm(admitted.body) else {})}

    @property
    def waits(self) -> bool:
        """True if the end of its answer waits for the tape."""
        return self.durable or self._shared.recorder.full

    # Its request ----------------------------------------------------------------------------------------------------

    @property
    def message(self) -> bytes:
        """The client's message that asks for the answer, as it came."""
        return self._admitted.body

    def start(self) -> None:
        """Send it as soon as it may pass."""
        self._shared.begin(self)
        self._do("begun", self._begin)
        self._overhead = monotonic() - self.request.started

    def _begin(self) -> None:
        if self._admitted.waits:
            self._wait()
            self._shared.admission.matcher.follow(self._admitted, self.client.hints, self._on_followed)
        else:
            self._check()

    def _on_followed(self) -> None:
        """Called when the call's conversation, and so its rollout, is known."""
        if self._resumes():
            self._do("begun", self._check)
        else:
            self._shared.admission.matcher.remember(self._admitted, self.client.hints, None)

    def _check(self) -> None:
        self._shared.metrics.ambiguous_calls += self._admitted.address.ambiguous
        if not self._on.context.dialect.session:
            # A resource may have been released since the connection was opened.
            check_passthrough(self._shared)
        if self._shared.recorder.failing is not None:
            self._shared.check_gap(self._admitted)
        # Steering input needs no place, and may be no call: its successor has the place of the response before it.
        self._reserve_first(self._send if self.steering else lambda: self._announce_first(self._go))

    def _go(self) -> None:
        places = self._on.context.pool.concurrency_limit
        if places.full:
            self._wait_for_slot(places, self._on_slot)
        else:
            self._send()

    def _on_slot(self) -> None:
        """Called when the upstream has a free place."""
        if self._resumes():
            self._do("sent", self._send)

    def _send(self) -> None:
        # An open connection takes no place, each answer on it does.
        if not self.steering:
            self._acquire_slot(self._on.context.pool.concurrency_limit)
        self._move(CallState.SENT)
        self.touched = monotonic()
        self._on.send()

    def adopt(self) -> None:
        """Count a response that no request asked for; it has begun already, so nothing can hold it back."""
        self._shared.begin(self)
        self._mark(UNATTRIBUTED)
        if self._shared.budgets is not None:
            # There is no request to read, and one answer, which reports its usage.
            self._admitted.peeked = RequestFields(n=1)
            with suppress(Refusal):
                reserving = self._shared.budgets.reserve(self._admitted, self.record)
                if reserving is not None:
                    reserving.add_done_callback(lambda done: done.exception())
        self._acquire_slot(self._on.context.pool.concurrency_limit)
        self._move(CallState.SENT)

    def add_steering(self, message: bytes) -> None:
        """Add steering input to this request. The server puts it before the request's own input, or after it if this is
        steering input itself."""
        self._taken.append(message)

    def begin(self) -> None:
        """Called when the server begins to answer it."""
        steering, self.steering = self.steering, False
        if self._taken:
            _ = self._admitted.model  # Read it before the messages are joined.
            own = self._admitted.body
            said = [own, *self._taken] if steering else [*self._taken, own]
            self._admitted.body = self.record.body = join_messages(said)
        if steering:
            self._acquire_slot(self._on.context.pool.concurrency_limit)
            if self.durable:
                self._announced = True
                self._shared.recorder.announce(self.record)

    def discard(self) -> None:
        """Release the reservation of steering input that has led to no answer of its own."""
        if self.state >= CallState.ENDING:
            return
        self._move(CallState.ENDING)
        del self._shared.running[self]
        self._shared.metrics.inflight_calls -= 1
        self.record.on_end()
        self._move(CallState.ENDED)
        if self._shared.budgets is not None:
            self._shared.budgets.recorded(self.record, False)

    def mark_unattributed(self) -> None:
        """Note that an event came that may or may not belong to this answer."""
        self._mark(UNATTRIBUTED)

    def _mark(self, attribute: str) -> None:
        self.record.note({attribute: True})

    def _move(self, to: CallState) -> None:
        """At the end of the call, also give up waiting for a place."""
        super()._move(to)
        if to is CallState.ENDING:
            leave, self._leave = self._leave, None
            if leave is not None:
                leave()

    # Its answer -----------------------------------------------------------------------------------------------------

    def record_message(self, message: bytes, now: float, kind: int = TEXT) -> None:
        """Record a message of the answer. `now`: monotonic seconds; `kind`: its opcode."""
        if not self.started:
            self.started = True
            self._move(CallState.STREAMING)
        self.touched = now
        self.record.add_pieces([as_event(message, kind)], now)

    def complete(self, status: int) -> None:
        """End the call: its last message has come."""
        self.record.http_status = status
        self._end("ok" if status < 400 else "error", None if status < 400 else f"http_{status}")

    def put(self) -> None:
        """Hand the call to the recorder: the bytes of its end have gone out, or must wait."""
        if self.waits:
            self._waits_since = monotonic()
            self._shared.recorder.put(self.record, self._let_go)
        else:
            self._shared.recorder.put(self.record, self._recorded)

    def _let_go(self, kept: bool) -> None:
        self._shared.metrics.recorder_wait_seconds += monotonic() - self._waits_since
        self._recorded(kept)
        self._on.on_recorded(kept or not self._shared.refuses_gaps(self._admitted.address.mode))

    # Other ends -----------------------------------------------------------------------------------------------------

    def cut_off(self, status: str, error: str) -> None:
        """End the call: the connection ends before its answer does."""
        if self.steering:
            self.discard()
        elif self.state < CallState.ENDING:
            self._end(status, error)
            self._shared.recorder.put(self.record, self._recorded)

    def check(self, now: float, announce: float) -> None:
        """Announce the call if it is due; fail it if the upstream is silent, or gives no place, for too long."""
        if self.steering:
            return
        self._announce_late(announce)
        pool = self.record.pool
        assert pool is not None
        self._check_queue(pool, now)
        # While the upstream answers other requests, it may not have reached this one.
        silent_s = now - max(self.touched, self._on.touched)
        late = self.state in (CallState.SENT, CallState.STREAMING) and silent_s > pool.config.read_timeout
        if late and not self._on.held:
            limit = f"sent nothing for {pool.config.read_timeout:g} s (upstream.read_timeout)"
            self._fail(UpstreamFault(504, "timeout", f"upstream {pool.name!r} ({pool.origin}) {limit}"))

    def _check_queue(self, pool: ConnectionPool, now: float) -> None:
        """Fail the call if it has waited too long for a place."""
        limit_s = pool.config.read_timeout
        if self._queued_at is not None and now - self._queued_at > limit_s:
            limit = pool.concurrency_limit
            message = (
                f"upstream {pool.name!r} ({pool.origin}) has {pluralized(limit.running, 'call')} under way and is "
                f"given no more (upstream.max_concurrent = {limit.maximum}); this one has waited in vain for "
                f"{limit_s:g} s"
            )
            self._fail(UpstreamFault(503, "busy", message))

    def give_up(self) -> None:
        """Cut the call off: the gateway stops and cannot wait any longer."""
        self.cut_off("interrupted", "gateway_stopped")
        self._on.drain()

    def _fail(self, refusal: Refusal) -> None:
        """End the call with a message of the gateway's own; if the request was sent, end its connection, too."""
        said, record, sent = (
            self._on.refusal(refusal, self),
            self.record,
            self.state in (CallState.SENT, CallState.STREAMING),
        )
        if self.steering:
            self.discard()
            self._on.refuse(refusal, said, sent)
            return
        if sent:
            record.add_pieces([as_event(said)], monotonic())
        else:
            record.pool = None
            record.set_own_answer(refusal.status, as_event(said))
        self._end("error", refusal.kind)
        self._on.refuse(refusal, said, sent)
        self._shared.recorder.put(record, self._recorded)


def as_event(message: bytes, kind: int = TEXT) -> bytes:
    """A message as an event of a stream; each of its lines becomes a data line. A binary message is an event `binary`,
    or `base64` if it is no text."""
    named = b""
    if kind == BINARY:
        try:
            _ = message.decode()
            named = b"event: binary\n"
        except UnicodeDecodeError:
            named, message = b"event: base64\n", base64.b64encode(message)
    return b"%bdata: %b\n\n" % (named, _LINE_END.sub(rb"\g<0>data: ", message))


def _request(opening: HttpRequest, body: bytes, epoch_ns: int) -> HttpRequest:
    """The message as a request: the method, target and headers of the opening, with the current time."""
    made = HttpRequest()
    made.method, made.target, made.headers = opening.method, opening.target, opening.headers
    made.started = monotonic()
    made.started_ns = epoch_ns + int(made.started * 1e9)
    made.add(body)
    return made
