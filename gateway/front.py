"""The client-facing side of a connection: HTTP/1.1 over httptools, one call at a time.

One port serves both planes. A request for the control plane (`/api`, `/metrics`, `/healthz`, `/readyz`) is handed as it
came to an embedded aiohttp protocol on the same transport; anything else is a call and goes to `gateway.proxy`. The parser
runs along in both cases, so that it is known where each request ends and either plane can follow the other on a
keep-alive connection.

A request is taken in whole before it is forwarded (its model decides where it goes). Its transfer framing is kept, so a
chunked body leaves as it came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

import httptools

_CONTROL = (b"/api", b"/metrics", b"/healthz", b"/readyz")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

Headers = list[tuple[bytes, bytes, bytes]]
"""(lower-case name, name as sent, value), in order."""


@dataclass(slots=True, eq=False)
class Request:
    """A request as it came."""

    method: str
    target: bytes
    headers: Headers
    http10: bool = False
    keep_alive: bool = True
    pieces: list[bytes] = field(default_factory=list[bytes])
    size: int = 0
    chunked: bool = False
    started: float = 0.0
    started_ns: int = 0

    @property
    def body(self) -> bytes:
        """The payload without transfer framing."""
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)


class Served(Protocol):
    """The slice of a call that its connection talks to."""

    def on_client_gone(self) -> None:
        """The client went away."""
        ...

    def hold(self) -> None:
        """The client reads slower than the upstream sends."""
        ...

    def go_on(self) -> None:
        """The client has caught up."""
        ...


class Planes(Protocol):
    """What a connection needs of the application."""

    fronts: set[Front]
    header_bytes: int
    request_bytes: int

    def serve(self, front: Front, request: Request) -> Served | None:
        """Begins a call; None when it was answered at once."""
        ...

    def refuse(self, front: Front, request: Request | None, status: int, message: str, field: str) -> None:
        """Answers a request that cannot become a call, and closes."""
        ...

    def control(self) -> asyncio.Protocol:
        """A new protocol of the control plane."""
        ...

    def now_ns(self) -> int:
        """The clock of the tape."""
        ...


class Front(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_control",
        "_draining",
        "_head_size",
        "_in_control",
        "_parser",
        "_pending",
        "_request",
        "_waiting",
        "call",
        "closing",
        "planes",
        "seen",
        "session",
        "transport",
    )

    def __init__(self, planes: Planes) -> None:
        self.planes = planes
        self.transport: asyncio.Transport
        self.call: Served | None = None
        self.closing = False
        self.seen = 0.0
        """When the last byte of an unfinished request, or the end of the last call, was seen; monotonic seconds."""
        self.session: str | None = None
        """The implicit rollout that unaddressed calls without a conversation on this connection join."""
        self._parser = httptools.HttpRequestParser(self)
        self._request: Request | None = None
        self._waiting: deque[Request] = deque()
        self._pending: list[bytes] = []
        self._control: asyncio.Protocol | None = None
        self._in_control = self._draining = False
        self._head_size = 0

    # -- transport callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self.transport = transport  # type: ignore[assignment]
        self.seen = monotonic()
        self.planes.fronts.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, whatever it was waiting for."""
        self.planes.fronts.discard(self)
        self.closing = True
        call, self.call = self.call, None
        if call is not None:
            call.on_client_gone()
        if self._control is not None:
            self._control.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses what arrived; control requests are passed on as bytes."""
        if self.closing:
            return
        self._pending.append(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(
                426, "upgrades are not supported here: use plain HTTP, events come as text/event-stream", "upgrade"
            )
            return
        except httptools.HttpParserError as error:
            if not self.closing:
                self._refuse(400, f"the request is not valid HTTP/1.1: {error}", "request")
            return
        if self._in_control:
            self._to_control()
        elif self._request is None or self._head_size < 0:
            self._pending.clear()
        elif sum(map(len, self._pending)) > self.planes.header_bytes:
            self._refuse(431, f"the request head is larger than {self.planes.header_bytes} bytes", "headers")
        if self.call is None:
            self.seen = monotonic()

    def _to_control(self) -> None:
        if self._control is None:
            self._control = self.planes.control()
            self._control.connection_made(self.transport)
        pending, self._pending = self._pending, []
        for data in pending:
            self._control.data_received(data)

    def eof_received(self) -> None:
        """A half-closed client counts as gone; None lets the transport close."""

    def pause_writing(self) -> None:
        """The client does not take what is written."""
        if self.call is not None:
            self.call.hold()
        elif self._control is not None:
            self._control.pause_writing()

    def resume_writing(self) -> None:
        """The client has taken what was written."""
        if self.call is not None:
            self.call.go_on()
        elif self._control is not None:
            self._control.resume_writing()

    # -- parser callbacks --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A new request."""
        self._request = Request("", b"", [])
        self._head_size = 0
        self._in_control = False

    def on_url(self, url: bytes) -> None:
        """The request target; may come in pieces."""
        assert self._request is not None
        self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; after the body has begun, a trailer, which is not forwarded."""
        assert self._request is not None
        if self._head_size >= 0:
            self._request.headers.append((name.lower(), name, value))

    def on_headers_complete(self) -> None:
        """The head is there: decide whose request it is."""
        request = self._request
        assert request is not None
        self._head_size = -1
        target = request.target
        if target.startswith(_CONTROL) and _is_control(target):
            self._in_control = True
            return
        request.method = self._parser.get_method().decode("ascii")
        request.http10 = self._parser.get_http_version() == "1.0"
        request.started = monotonic()
        request.started_ns = self.planes.now_ns()
        for low, _, value in request.headers:
            if low == b"expect" and value.lower() == b"100-continue":
                self.transport.write(_CONTINUE)
            elif low == b"transfer-encoding":
                request.chunked = True

    def on_body(self, piece: bytes) -> None:
        """Payload."""
        request = self._request
        if request is None or self._in_control or self.closing:
            return
        request.size += len(piece)
        if request.size > self.planes.request_bytes:
            self._refuse(
                413, f"the request body is larger than limits.request_bytes = {self.planes.request_bytes}", "body"
            )
            return
        request.pieces.append(piece)

    def on_message_complete(self) -> None:
        """The request is whole."""
        request, self._request = self._request, None
        if request is None or self._in_control or self.closing:
            return
        request.keep_alive = self._parser.should_keep_alive()
        if self.call is not None:
            self._waiting.append(request)
            return
        self._serve(request)

    # -- for the call ------------------------------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        if self._control is not None:
            # Its keep-alive timer must not close the connection under a call; the next control request gets a new one.
            self._control.connection_lost(None)
            self._control = None
        call = self.planes.serve(self, request)
        if call is not None and not self.closing:
            self.call = call

    def finish(self, keep_alive: bool) -> None:
        """The answer has been written; the next request may come."""
        self.call = None
        self.seen = monotonic()
        if not keep_alive or self._draining:
            self.close()
        elif self._waiting and not self.closing:
            self._serve(self._waiting.popleft())

    def close(self) -> None:
        """Closes once everything written has been taken."""
        self.closing = True
        self.transport.close()

    def linger(self) -> None:
        """Ends the answering side and reads on: closing at once would reset an answer that is still on its way."""
        self.closing = True
        self.transport.write_eof()

    def drain(self) -> None:
        """No further request: closes now when idle, else after the answer."""
        self._draining = True
        if self.call is None and self._request is None and self._control is None:
            self.close()

    def break_off(self) -> None:
        """Ends an answer that is not complete: what was written goes out, the framing stays open."""
        self.call = None
        self.close()

    def _refuse(self, status: int, message: str, field: str) -> None:
        self.planes.refuse(self, self._request, status, message, field)

    def overdue(self, now: float, head_timeout: float, keepalive_timeout: float) -> bool:
        """True when the rest of a request, or a new one, has been awaited for too long."""
        if self.call is not None or self._in_control or self._control is not None:
            return False
        return now - self.seen > (head_timeout if self._request is not None else keepalive_timeout)


def _is_control(target: bytes) -> bool:
    path = target.partition(b"?")[0]
    return any(path == name or path.startswith(name + b"/") for name in _CONTROL)
