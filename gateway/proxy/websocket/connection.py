"""An open WebSocket, with a client on one side and an upstream on the other. What is read here only is recorded.

    client -> upstream    held until a message is whole, then passed as it came: a request may be refused, or have to
                          wait for its conversation or the tape
    upstream -> client    passed read by read, the end of an answer after the tape where that must come first

Requests of one connection are answered in their order. A connection ends with either side. The gateway ends it, with a
frame that says why, where a request may not pass, an upstream is silent, or the gateway stops.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Final

import orjson

from penstock.gateway.dialects import family
from penstock.gateway.http.client_connection import ClientConnection
from penstock.gateway.http.errors import Refusal
from penstock.gateway.http.headers import refusal_body
from penstock.gateway.http.upstream_connection import UpstreamConnection
from penstock.gateway.http.websocket import (
    CLOSE,
    FAILED,
    GOING_AWAY,
    RESTART,
    TEXT,
    TOO_LARGE,
    UNREADABLE,
    Message,
    Reader,
    close_frame,
    packings,
    text_frame,
)
from penstock.gateway.proxy.shared import Shared
from penstock.gateway.proxy.websocket.response import Response
from penstock.gateway.proxy.websocket.way import Carrier, Way

_BY_CLIENT: Final = ("cancelled", "client_gone")
_BY_UPSTREAM: Final = ("error", "upstream_closed")


class Connection(Carrier):
    """One WebSocket."""

    def __init__(self, shared: Shared, client: ClientConnection, upstream: UpstreamConnection, way: Way) -> None:
        self._shared, self.client, self._upstream, self.way = shared, client, upstream, way
        self._limit = shared.config.limits.request_bytes
        agreed = b",".join(value for name, value in way.headers if name.lower() == b"sec-websocket-extensions")
        asked, told = packings(agreed)
        self._asked = Reader(self._limit, asked)
        self._told = Reader(shared.config.limits.recorded_bytes, told)
        self._messages: deque[Message] = deque()
        """Of the client, not looked at yet."""
        self._out = bytearray()
        """What the client has sent and was not passed on."""
        self._passed = 0
        """Bytes of the client that were passed on."""
        self._waiting: Response | None = None
        """A request that is not sent yet; what the client says after it waits, too."""
        self._asking = False
        """Whether that is being looked at right now."""
        self._open: deque[Response] = deque()
        """Requests that were sent and not answered to their end."""
        self._unkept = 0
        """Answers whose end waits for the tape."""
        self._behind = b""
        """What came from the upstream meanwhile."""
        self._draining = self._over = self._full = False
        self._leaves: tuple[str, str] | None = None
        """How calls end that are under way when the connection does: who has said first that it leaves."""

    @property
    def held(self) -> bool:
        return self.client.paused or self._unkept > 0

    # From the client ------------------------------------------------------------------------------------------------

    def on_client_data(self, data: bytes) -> None:
        """Passes on what is whole and may pass."""
        self._out += data
        self._messages += self._asked.feed(data)
        self._go_on()
        self._listen()

    def _listen(self) -> None:
        """Reads from the client while what it says can be passed on."""
        if self.client.closing:
            return
        if self._full or len(self._out) > 2 * self._limit:
            self.client.transport.pause_reading()
        else:
            self.client.transport.resume_reading()

    def _go_on(self) -> None:
        while self._messages and self._waiting is None and not self._over:
            message = self._messages.popleft()
            if message.kind == TEXT and self.way.dialect.asks(message.body):
                self._ask(message)
            else:
                if message.kind == CLOSE:
                    self._leaves = self._leaves or _BY_CLIENT
                self._pass_until(message.end)
        if self._waiting is not None or self._over:
            return
        self._pass_until(self._asked.whole)
        if (problem := self._asked.problem) is not None:
            self.close(TOO_LARGE if "larger" in problem else UNREADABLE, problem)

    def _pass_until(self, end: int) -> None:
        count = end - self._passed
        if count > 0:
            self._upstream.transport.write(bytes(self._out[:count]))
            del self._out[:count]
            self._passed = end

    def _ask(self, message: Message) -> None:
        admission = self._shared.admission
        admitted = admission.admit_message(self.way.admitted, self.way.dialect, message.body, self.client.hints)
        self._waiting = Response(self, self._shared, admitted, message.end)
        self._asking = True
        self._waiting.begin()
        self._asking = False

    def send(self, end: int) -> None:
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        self._open.append(waiting)
        self._pass_until(end)
        if not self._asking:
            self._go_on()
            self._listen()

    def refusal(self, refusal: Refusal) -> bytes:
        spoken = family(self.way.dialect, self.way.admitted.path, self.way.request.headers)
        said: dict[str, object] = orjson.loads(refusal_body(spoken, refusal))
        return self._shared.redactor.own.hide(orjson.dumps({"type": "error", "status": refusal.status, **said}))

    def refuse(self, refusal: Refusal, said: bytes) -> None:
        if self._told.between_messages and not self._behind:
            self.client.transport.write(text_frame(said))
        reason = self._shared.redactor.own.text(refusal.message)
        self.close(RESTART if refusal.status == 426 else FAILED, reason)

    def answers(self, call: object) -> bool:
        return bool(self._open) and self._open[0] is call

    def on_client_gone(self) -> None:
        """Whatever it has said has been passed on; nobody reads an answer any more."""
        self._end_all(*(self._leaves or _BY_CLIENT))
        self._upstream.transport.close()

    def hold(self) -> None:
        """The client reads slower than the upstream sends."""
        if not self._upstream.transport.is_closing():
            self._upstream.transport.pause_reading()

    def go_on(self) -> None:
        """The client has caught up."""
        self._read_on()

    # From the upstream ----------------------------------------------------------------------------------------------

    def on_upstream_data(self, data: bytes) -> None:
        """Passes on a read."""
        if self._over or self.client.closing:
            return
        now = monotonic()
        ended = [response for one in self._told.feed(data) if (response := self._hear(one, now)) is not None]
        if self._open:
            self._open[0].touched = now
        if self._unkept or any(response.waits for response in ended):
            self._behind += data
        else:
            self.client.transport.write(data)
        for response in ended:
            if response.waits:
                self._unkept += 1
                self.hold()
            response.put()
        if (problem := self._told.problem) is not None:
            self.close(UNREADABLE, f"the upstream's frames cannot be read: {problem}")
        self._leave_if_done()

    def _hear(self, message: Message, now: float) -> Response | None:
        """Notes a message of an answer; gives the answer where this is its end."""
        if message.kind == CLOSE:
            self._leaves = self._leaves or _BY_UPSTREAM
        if message.kind != TEXT or not self._open:
            return None
        response = self._open[0]
        response.hear(message.body, now)
        status = self.way.dialect.ends(message.body)
        if not status:
            return None
        response.complete(status)
        return self._open.popleft()

    def kept(self, passes: bool) -> None:
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
        """It has said all it will say."""
        self._end_all(*(self._leaves or _BY_UPSTREAM))
        self._over = True
        self._leave_if_done()

    def on_upstream_full(self, full: bool) -> None:
        """The upstream takes nothing for now, or has caught up."""
        self._full = full
        self._listen()

    # Ends -----------------------------------------------------------------------------------------------------------

    def _leave_if_done(self) -> None:
        if self._unkept or self.client.closing:
            return
        if self._over:
            self.client.close()
        elif self._draining and not self._open and self._waiting is None:
            self.close(GOING_AWAY, "the gateway stops")

    def drain(self) -> None:
        self._draining = True
        self._leave_if_done()

    def close(self, code: int, reason: str) -> None:
        """Ends it: both sides are told why."""
        if self._over:
            return
        self._over = True
        self._end_all("error", "websocket")
        if not self._upstream.transport.is_closing():
            # Only whole messages were passed on, so a frame may begin here.
            self._upstream.transport.write(close_frame(code, "", masked=True))
            self._upstream.transport.close()
        if not self.client.closing:
            if self._told.between_frames and not self._behind:
                self.client.transport.write(close_frame(code, reason))
            self.client.linger()

    def _break_off(self) -> None:
        self._over = True
        self._end_all("error", "tape")
        self._upstream.transport.abort()
        if not self.client.closing:
            self.client.break_off(framed=False)

    def _end_all(self, status: str, error: str) -> None:
        """Ends what is under way."""
        waiting, self._waiting = self._waiting, None
        under_way = [*self._open, *([] if waiting is None else [waiting])]
        self._open.clear()
        for response in under_way:
            response.cut_off(status, error)
