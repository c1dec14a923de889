"""An open WebSocket, with a client on one side and an upstream on the other. Messages are read to be recorded, and not
changed.

    client -> upstream    held until a message is complete, then passed unchanged: a request may be refused, or have to
                          wait for its conversation or the tape
    upstream -> client    passed read by read; the end of an answer after the tape, if that must come first

`lanes` tells which call an event belongs to. A connection ends with either side. A request that may not pass is refused
in its lane, and the others go on. The gateway ends a connection, with a frame that says why, if no request may pass any
more, an upstream is silent, or the gateway stops.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Final

import orjson

from penstock.gateway.model.facts import STEER_FATE, STEER_TARGET, STEER_TEXT
from penstock.gateway.model.known_secrets import BodyContext
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.traffic.proxy.call_lifecycle import CallState
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.proxy.websocket.lanes import CallInstruction, LaneTable
from penstock.gateway.traffic.proxy.websocket.websocket_call import WebSocketCall, WebSocketChannel, WebSocketContext
from penstock.gateway.wire.dialects import family
from penstock.gateway.wire.dialects.loose_json import label, loads, obj
from penstock.gateway.wire.dialects.websocket_messages import ClientMessageFacts, ClientMessageKind, ServerMessageKind
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.headers import header_fields, refusal_body
from penstock.gateway.wire.http.request import ClientFault, Refusal
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.http.websocket import (
    BINARY,
    CLOSE,
    FAILED,
    GOING_AWAY,
    RESTART,
    TEXT,
    TOO_LARGE,
    UNREADABLE,
    DeflateParameters,
    WebSocketMessage,
    WebSocketReader,
    close_frame,
    frame,
    negotiated_deflate,
)
from penstock.gateway.work.operations import SpanOperations

# Forwards a WebSocket's bytes unchanged, each way; leaves single messages out, or puts own ones in. Sans-I/O.
#
# A client's messages are held until they may pass. One that may not is dropped: all later ones pass as frames of the
# gateway's own, since a compressed message may refer to earlier ones, including the dropped one. The gateway's own
# messages to the client go between two messages of the upstream.

DATA: Final = (TEXT, BINARY)
"""The opcodes of messages."""


class ClientMessageForwarder:
    """The direction from client to upstream."""

    def __init__(self, limit: int, packing: DeflateParameters | None, write: Callable[[bytes], None]) -> None:
        self.reader = WebSocketReader(limit, packing)
        self._write = write
        self._held = bytearray()
        """The client's bytes from the first one that has not passed."""
        self._passed = 0
        self._controls: list[WebSocketMessage] = []
        """Control frames that came within a held message."""
        self._own_frames = False

    @property
    def held(self) -> int:
        """Number of bytes that have not passed yet."""
        return len(self._held)

    def feed(self, data: bytes) -> list[WebSocketMessage]:
        """Take bytes and return the messages that are complete."""
        self._held += data
        return self.reader.feed(data)

    def forward(self, message: WebSocketMessage) -> None:
        """Forward this message and all before it."""
        if self._own_frames:
            self._forget(message.end)
            self._write(frame(message.kind, message.body, masked=True))
        elif message.end > self._passed:
            self._forward_until(message.end)
        else:
            self._controls.append(message)

    def forward_rest(self) -> None:
        """Forward all complete messages, and the frames between them."""
        if not self._own_frames:
            self._forward_until(self.reader.whole)

    def drop(self, message: WebSocketMessage) -> None:
        """Drop this message; control frames within it pass."""
        self._own_frames = True
        for control in self._controls:
            self._write(frame(control.kind, control.body, masked=True))
        self._controls.clear()
        self._forget(message.end)

    def _forward_until(self, end: int) -> None:
        if end > self._passed:
            self._write(bytes(self._held[: end - self._passed]))
            self._controls.clear()
            self._forget(end)

    def _forget(self, end: int) -> None:
        if end > self._passed:
            del self._held[: end - self._passed]
            self._passed = end


class UpstreamMessageForwarder:
    """The direction from upstream to client, with the gateway's own messages."""

    def __init__(self, limit: int, packing: DeflateParameters | None) -> None:
        self.reader = WebSocketReader(limit, packing)
        self._came = 0
        self._own = b""
        """Own messages that wait for the end of an upstream's message."""

    def feed(self, data: bytes) -> tuple[list[WebSocketMessage], bytes]:
        """Return the messages that end within these bytes, and the bytes to write, with the gateway's own messages."""
        begins = self._came
        self._came += len(data)
        messages = self.reader.feed(data)
        at = self.reader.whole - begins
        if self._own and at > 0:
            data, self._own = data[:at] + self._own + data[at:], b""
        return messages, data

    def inject(self, text: bytes) -> bytes:
        """Send a text message of the gateway's own: return the bytes to write now, or hold it for the end of a
        message."""
        said = frame(TEXT, text)
        if self.reader.between_messages:
            return said
        self._own += said
        return b""


_log = logging.getLogger("penstock.proxy")
_BY_CLIENT: Final = ("cancelled", "client_gone")
_BY_UPSTREAM: Final = ("error", "upstream_closed")
_OF_A_RESPONSE: Final = (
    ServerMessageKind.BEGIN,
    ServerMessageKind.PART,
    ServerMessageKind.END,
    ServerMessageKind.ERROR,
)
STEER: Final = "response.steer"
"""Name of the event that records steering input."""
MOST_OPEN: Final = 256
"""Number of requests without the end of an answer at which nothing more is read from their client."""


class WebSocketConnection(WebSocketChannel):
    """One WebSocket and the calls on it."""

    def __init__(
        self, shared: ProxyContext, client: ClientConnection, upstream: UpstreamConnection, way: WebSocketContext
    ) -> None:
        self._shared, self.client, self._upstream, self.context = shared, client, upstream, way
        self._limit = shared.config.limits.request_bytes
        agreed = b",".join(
            value for name, value in header_fields(way.head) if name.lower() == b"sec-websocket-extensions"
        )
        asked, told = negotiated_deflate(agreed)
        self._out = ClientMessageForwarder(self._limit, asked, upstream.transport.write)
        self._in = UpstreamMessageForwarder(shared.config.limits.recorded_bytes, told)
        self._messages: deque[WebSocketMessage] = deque()
        """The client's messages that were not looked at yet."""
        self._waiting: tuple[WebSocketCall, WebSocketMessage, ClientMessageFacts] | None = None
        """A request that is not sent yet; the client's later messages wait behind it."""
        self._asking = False
        """True while that request is being admitted."""
        self._crowded = False
        """True while as many requests are open as may be; the client's later messages wait."""
        self._lanes: LaneTable[WebSocketCall] = LaneTable(self._adopt)
        self.touched = monotonic()
        self._unkept = 0
        """Number of answers whose end waits for the tape."""
        self._behind = b""
        """Bytes of the upstream that wait behind those answers."""
        self._over = self._full = self._lost = False
        self._retires: tuple[int, str] | None = None
        """Close code and reason to use as soon as nothing is under way; None to stay open."""
        self._leaves: tuple[str, str] | None = None
        """Status and error for calls under way when the connection ends, by the side that closed first."""

    @property
    def held(self) -> bool:
        return self.client.paused or self._unkept > 0

    # From the client ------------------------------------------------------------------------------------------------

    def on_client_data(self, data: bytes) -> None:
        """Forward the complete messages that may pass."""
        self._messages += self._out.feed(data)
        self._go_on()
        self._listen()

    def _listen(self) -> None:
        """Read from the client while its messages can be passed on."""
        if self.client.closing:
            return
        if self._full or self._crowded or self._out.held > 2 * self._limit:
            self.client.transport.pause_reading()
        else:
            self.client.transport.resume_reading()

    def _go_on(self) -> None:
        while self._messages and self._waiting is None and not self._over and not self._crowded:
            self._look_at(self._messages.popleft())
        if self._messages or self._waiting is not None or self._over:
            return
        self._out.forward_rest()
        if (problem := self._out.reader.problem) is not None:
            self.close(TOO_LARGE if "larger" in problem else UNREADABLE, problem)

    def _look_at(self, message: WebSocketMessage) -> None:
        said = (
            self.context.dialect.read_client_message(message.body)
            if message.kind in DATA
            else ClientMessageFacts(ClientMessageKind.OTHER)
        )
        if said.kind is ClientMessageKind.UNREADABLE:
            self._out.drop(message)
            why = (
                "this message is not read: send a JSON object whose type, stream_id and previous_response_id are texts"
            )
            self._say(self.refusal(ClientFault(400, "unreadable", why, "type"), None))
            return
        if said.kind is not ClientMessageKind.OTHER:
            self._ask(message, said)
            return
        if message.kind == CLOSE:
            self._leaves = self._leaves or _BY_CLIENT
        self._note_sent(message, said)
        self._out.forward(message)

    def _note_sent(self, message: WebSocketMessage, said: ClientMessageFacts) -> None:
        """Called with a message, or a control frame, that passes without being a request."""

    def _ask(self, message: WebSocketMessage, said: ClientMessageFacts) -> None:
        admission, way, lane, target, of = self._shared.admission, self.context, said.lane, None, None
        if said.kind is ClientMessageKind.STEER:
            target = said.previous or ""
            lane, running = self._lanes.lane(target), self._lanes.running(target)
            of = None if running is None else running.record.call
        admitted = admission.admit_message(
            way.admitted, way.dialect, message.body, self.client.hints, said.metadata, of
        )
        response = WebSocketCall(self, self._shared, admitted, lane, target)
        self._waiting = response, message, said
        self._asking = True
        response.start()
        self._asking = False

    def send(self) -> None:
        assert self._waiting is not None
        (response, message, said), self._waiting = self._waiting, None
        if response.target is None:
            self._lanes.add_request(response, said.lane, said.previous)
        else:
            self._lanes.add_steering(response, response.target)
        self._out.forward(message)
        self._look_further()

    def _look_further(self) -> None:
        self._crowded = not self._has_room()
        if not self._asking:
            self._go_on()
            self._listen()

    def _has_room(self) -> bool:
        """True if another request of the client may be open."""
        return self._lanes.count < MOST_OPEN

    def refusal(self, refusal: Refusal, call: object) -> bytes:
        spoken = family(self.context.dialect, self.context.admitted.path, self.context.request.headers)
        said: dict[str, object] = orjson.loads(refusal_body(spoken, refusal))
        lane = call.lane if isinstance(call, WebSocketCall) else None
        head: dict[str, object] = {"type": "error", "status": refusal.status}
        if isinstance(call, WebSocketCall) and call.steering:
            given = {"previous_response_id": call.target, "input": obj(loads(call.message)).get("input")}
            head = {"type": "response.steer.failed", "sequence_number": 0, "steer": given}
        named = {} if lane is None else {"stream_id": lane}
        return self._shared.redactor.own.hide(orjson.dumps({**head, **said, **named}))

    def refuse(self, refusal: Refusal, said: bytes, sent: bool) -> None:
        waiting, self._waiting = self._waiting, None if not sent else self._waiting
        if self._over:
            return
        if waiting is not None and not sent:
            response, message, _ = waiting
            self._out.drop(message)
            if response.target is not None:
                self._tell_steer(response, "refused", said)
        self._say(said)
        reason = self._shared.redactor.own.text(refusal.message)
        if sent:
            self.close(FAILED, reason)
        elif refusal.status == 426:
            self._retires = RESTART, reason
        self._leave_if_done()
        self._look_further()

    def _say(self, text: bytes) -> None:
        said = self._in.inject(text)
        if self._behind:
            self._behind += said
        elif said and not self.client.closing:
            self.client.transport.write(said)

    def on_client_gone(self) -> None:
        """End all calls: the client left. Everything that it sent has been passed on."""
        self._end_all(*(self._leaves or _BY_CLIENT))
        self._upstream.transport.close()

    def hold(self) -> None:
        """Stop reading from the upstream: the client is slower."""
        if not self._upstream.transport.is_closing():
            self._upstream.transport.pause_reading()

    def go_on(self) -> None:
        """Read from the upstream again: the client has caught up."""
        self._read_on()

    # From the upstream ----------------------------------------------------------------------------------------------

    def on_upstream_data(self, data: bytes) -> None:
        """Pass a read on to the client, or hold it behind an answer that waits for the tape."""
        if self._over or self.client.closing:
            return
        self.touched = now = monotonic()
        messages, data = self._in.feed(data)
        ended = [response for one in messages for response in self._hear(one, now)]
        if self._unkept or any(response.waits for response in ended):
            self._behind += data
        else:
            self.client.transport.write(data)
        for response in ended:
            if response.waits:
                self._unkept += 1
                self.hold()
            response.put()
        if self._crowded:
            self._look_further()
        if (problem := self._in.reader.problem) is not None:
            self.close(UNREADABLE, f"the upstream's frames cannot be read: {problem}")
        self._leave_if_done()

    def _hear(self, message: WebSocketMessage, now: float) -> list[WebSocketCall]:
        """Record a message of an answer; return the answers that have ended."""
        if message.kind == CLOSE:
            self._leaves = self._leaves or _BY_UPSTREAM
        if message.kind not in DATA:
            return []
        event = self.context.dialect.read_server_message(message.body)
        steps = list(self._lanes.receive(event, (message.body, now)))
        if not steps and event.kind in _OF_A_RESPONSE and not self._lost:
            self._lost = True
            _log.warning(
                "upstream %r says more of a response that is over: this is recorded nowhere", self.context.pool.name
            )
        return [response for step in steps if (response := self._do(step)) is not None]

    def _do(self, step: CallInstruction[WebSocketCall]) -> WebSocketCall | None:
        call = step.call
        if call.state >= CallState.ENDING:
            return None  # The gateway stops and has given it up.
        match step.verb:
            case "begin":
                call.begin()
            case "note":
                body, at = step.message or (b"", self.touched)
                call.record_message(body, at)
            case "doubt":
                call.mark_unattributed()
            case "used":
                self._tell_steer(call, "used")
                if step.by is not None and step.by is not call:
                    step.by.add_steering(call.message)
                    call.discard()
            case "failed":
                self._tell_steer(call, "failed", b"" if step.message is None else step.message[0])
                call.discard()
            case "end":
                call.complete(step.status)
                return call
        return None

    def _adopt(self) -> WebSocketCall:
        """Make a call for a response that no request asked for."""
        way = self.context
        admitted = self._shared.admission.admit_message(way.admitted, way.dialect, b"", self.client.hints)
        response = WebSocketCall(self, self._shared, admitted)
        response.adopt()
        return response

    def on_recorded(self, passes: bool) -> None:
        self._unkept -= 1
        if not passes:
            self._break_off()
        elif not self._unkept and not self.client.closing:
            behind, self._behind = self._behind, b""
            self.client.transport.write(behind)
            self._read_on()
            self._leave_if_done()

    def _read_on(self) -> None:
        if not self.held and not self._upstream.transport.is_closing():
            self._upstream.transport.resume_reading()

    def on_upstream_gone(self) -> None:
        """End all calls: the upstream has closed the connection."""
        self._end_all(*(self._leaves or _BY_UPSTREAM))
        self._over = True
        self._leave_if_done()

    def on_upstream_full(self, full: bool) -> None:
        """Stop reading from the client while the upstream takes nothing (`full`)."""
        self._full = full
        self._listen()

    # Steering -------------------------------------------------------------------------------------------------------

    def _tell_steer(self, call: WebSocketCall, fate: str, answer: bytes = b"") -> None:
        """Record steering input as an event of its rollout, without secrets. `fate`: used, failed, refused or unknown;
        `answer`: why it failed."""
        request, address = call.request, call.record.call.address
        secrets = self._shared.redactor.secrets(request.headers, request.target.decode("latin-1"))
        turn = self.context.dialect.read(secrets.body(call.message, BodyContext()), b"", True)
        said = [part.text for message in turn.messages for part in message.parts if part.text]
        entry = SpanEntry(address.rollout, address.attempt, address.origin, address.mode, kind="event", name=STEER)
        entry.method, entry.status, entry.error = "", "ok", None
        if fate != "used":
            entry.status, entry.error = "error", label(obj(obj(loads(answer)).get("error")).get("code")) or fate
        entry.start_ns, entry.end_ns = request.started_ns, self._shared.epoch_ns + int(monotonic() * 1e9)
        entry.agent = address.agent
        entry.attributes = {STEER_TEXT: "\n".join(said), STEER_TARGET: call.target, STEER_FATE: fate}
        self._shared.recorder.submit(partial(_add, entry)).add_done_callback(lambda done: done.exception())

    # Ends -----------------------------------------------------------------------------------------------------------

    def _leave_if_done(self) -> None:
        if self._unkept or self.client.closing:
            return
        if self._over:
            self.client.close()
        elif self._retires is not None and not self.busy and self._waiting is None:
            self.close(*self._retires)

    @property
    def busy(self) -> bool:
        """True while something is under way that ends by itself."""
        return self._lanes.busy

    def drain(self) -> None:
        self._retires = self._retires or (GOING_AWAY, "the gateway stops")
        self._leave_if_done()

    def close(self, code: int, reason: str) -> None:
        """End the connection and tell both sides why."""
        if self._over:
            return
        self._over = True
        self._end_all("error", "websocket")
        if not self._upstream.transport.is_closing():
            # Only whole messages were passed on, so a frame may begin here.
            self._upstream.transport.write(close_frame(code, "", masked=True))
            self._upstream.transport.close()
        if not self.client.closing:
            if self._in.reader.between_frames and not self._behind:
                self.client.transport.write(close_frame(code, reason))
            self.client.linger()

    def _break_off(self) -> None:
        self._over = True
        self._end_all("error", "tape")
        self._upstream.transport.abort()
        if not self.client.closing:
            self.client.break_off(framed=False)

    def _end_all(self, status: str, error: str) -> None:
        waiting, self._waiting = self._waiting, None
        under_way, steers = self._lanes.close()
        for response in [*under_way, *([] if waiting is None else [waiting[0]])]:
            response.cut_off(status, error)
        for steer in steers:
            self._tell_steer(steer, "unknown")
            steer.discard()


def _add(entry: SpanEntry, tape: Transaction) -> None:
    SpanOperations(tape).add([entry], entry.end_ns or 0)
