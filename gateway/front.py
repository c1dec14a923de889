"""The client-facing side of a connection: HTTP/1.1 over httptools, one request at a time, in order.

A request is taken in whole before it is served (its model decides where it goes); its chunks are remembered, so that a
chunked body leaves as it came. Requests that arrive while one is being served wait their turn, and so does the refusal
of bytes that are no request: an answer is never written into another. A client that pipelines without end is read no
further until it is served.

A half-closed client counts as gone. Only so is it noticed at once that nobody waits for a plain answer any more.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from time import monotonic
from typing import Protocol

import httptools

from gateway.errors import ClientFault
from gateway.request import Request

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)
_PIPELINED = 16
"""Requests that may wait behind the one being served before no more are read."""
_WATCHED = frozenset({b"connection", b"content-length", b"expect", b"transfer-encoding", b"upgrade"})
_FRAMING = frozenset({b"content-length", b"host", b"transfer-encoding"})


class Served(Protocol):
    """What is being served, as its connection sees it."""

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
    epoch_ns: int
    """What the monotonic clock's zero is on the clock of the tape."""
    header_bytes: int
    request_bytes: int

    def serve(self, front: Front, request: Request) -> None:
        """Answers a request: sets `front.served` until it calls `front.finish`, or ends the connection."""
        ...


class Front(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_deaf",
        "_draining",
        "_expects",
        "_head_began",
        "_head_read",
        "_in_head",
        "_parser",
        "_read",
        "_request",
        "_serving",
        "_waiting",
        "closing",
        "paused",
        "planes",
        "seen",
        "served",
        "session",
        "transport",
    )

    def __init__(self, planes: Planes) -> None:
        self.planes = planes
        self.transport: asyncio.Transport
        self.served: Served | None = None
        """The request being served."""
        self.closing = False
        self.paused = False
        """True while the client takes nothing of what is written."""
        self.seen = 0.0
        """When the last byte of an unfinished request, or the end of the last answer, was seen; monotonic seconds."""
        self.session: str | None = None
        """The implicit rollout that unaddressed calls without a conversation on this connection join."""
        self._parser = httptools.HttpRequestParser(self)
        self._request: Request | None = None
        self._waiting: deque[Request] = deque()
        self._in_head = self._deaf = self._draining = self._expects = self._serving = False
        self._read = self._head_read = self._head_began = 0

    # -- transport callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self.transport = transport  # type: ignore[assignment]
        self.seen = monotonic()
        self.planes.fronts.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, whatever it was waiting for."""
        self.planes.fronts.discard(self)
        self.closing = self._deaf = True
        served, self.served = self.served, None
        if served is not None:
            served.on_client_gone()

    def data_received(self, data: bytes) -> None:
        """Parses what arrived and serves what is whole."""
        if self._deaf:
            return
        self._read = len(data)
        waiting = len(self._waiting)
        self._feed(data)
        if self._in_head and len(self._waiting) == waiting:
            # No request ended in this read, so that all of it belongs to the head.
            self._head_read += len(data)
            self._limit_head(self._head_read)
        elif self._in_head:
            # What came before the head in this read is not its own: only an upper bound.
            self._head_began = len(data)
        if self._waiting:
            self._serve_waiting()
        if self.served is None:
            self.seen = monotonic()

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError as error:
            self._refuse(400, f"the request is not valid HTTP/1.1: {error}", "request")

    def eof_received(self) -> None:
        """A half-closed client counts as gone; None lets the transport close."""

    def pause_writing(self) -> None:
        """The client does not take what is written."""
        self.paused = True
        if self.served is not None:
            self.served.hold()

    def resume_writing(self) -> None:
        """The client has taken what was written."""
        self.paused = False
        if self.served is not None:
            self.served.go_on()

    # -- parser callbacks --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A new request."""
        self._request = Request()
        self._in_head = True
        self._head_read = self._head_began = 0

    def on_url(self, url: bytes) -> None:
        """The request target; may come in pieces."""
        if self._request is not None:
            self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; after the body, a trailer."""
        if self._request is not None:
            (self._request.headers if self._in_head else self._request.trailers).append((name.lower(), name, value))

    def on_headers_complete(self) -> None:
        """The head is there: what it says about its body and the connection."""
        request = self._request
        if request is None:
            return
        self._in_head = False
        request.method = self._parser.get_method().decode("ascii")
        request.started = monotonic()
        request.started_ns = self.planes.epoch_ns + int(request.started * 1e9)
        version = self._parser.get_http_version()
        if version != "1.1":
            request.http10 = True
            if version != "1.0":
                return self._refuse(505, f"HTTP/{version} is not spoken here: use HTTP/1.1", "request")
        for low, _, value in request.headers:
            if low in _WATCHED:
                self._note(request, low, value)
        if self._head_began + self._head_read + self._read > self.planes.header_bytes:
            self._limit_head(sum(len(name) + len(value) + 4 for _, name, value in request.headers))
        if request.length > self.planes.request_bytes:
            return self._too_large()
        if self._expects and self.served is None and not self._waiting:
            self._continue()
        return None

    def _note(self, request: Request, low: bytes, value: bytes) -> None:
        if low == b"transfer-encoding":
            request.chunked = True
        elif low == b"content-length":
            request.length = int(value)
        elif low == b"upgrade":
            request.upgrade = self._parser.should_upgrade()
        elif low == b"expect":
            self._expects = value.lower() == b"100-continue" and not request.http10
        elif value.lower() not in (b"keep-alive", b"close"):
            # What frames the request stays whatever it names: a body without its length would be read as a request.
            request.hops |= {name.strip() for name in value.lower().split(b",")} - _FRAMING

    def on_body(self, piece: bytes) -> None:
        """Payload."""
        request = self._request
        if request is None:
            return
        if request.size + len(piece) > self.planes.request_bytes:
            self._too_large()
        else:
            request.add(piece)

    def on_chunk_complete(self) -> None:
        """The end of a chunk, which may have come in several pieces."""
        if self._request is not None:
            self._request.end_chunk()

    def on_message_complete(self) -> None:
        """The request is whole."""
        request = self._request
        if request is None or request.upgrade or request.method == "CONNECT":
            return
        self._request, self._expects = None, False
        request.keep_alive = not request.http10 and self._parser.should_keep_alive()
        self._enqueue(request)

    # -- what is refused before it is a request ----------------------------------------------------------------------

    def _refuse(self, status: int, message: str, field: str) -> None:
        """Nothing more is read; the refusal waits its turn."""
        if self._deaf:
            return
        request, self._request = self._request or Request(), None
        request.keep_alive = False
        request.refusal = ClientFault(status, "refused", message, field)
        self._deaf, self._in_head = True, False
        self._enqueue(request)

    def _limit_head(self, size: int) -> None:
        limit = self.planes.header_bytes
        if size > limit:
            self._refuse(431, f"the request head is larger than limits.header_bytes = {limit}", "headers")

    def _too_large(self) -> None:
        limit = self.planes.request_bytes
        self._refuse(413, f"the request body is larger than limits.request_bytes = {limit}", "body")

    def _decline_upgrade(self, rest: bytes) -> None:
        """WebSockets are refused, so that the client falls back; an offer to speak another HTTP may be ignored."""
        request = self._request
        if request is None:
            return
        offered = b",".join(value.lower() for low, _, value in request.headers if low == b"upgrade")
        if request.method == "CONNECT":
            self._refuse(400, "this is not a forward proxy: give it to the client as its base URL", "request")
        elif b"websocket" in offered:
            self._refuse(426, "WebSockets are not supported here: use plain HTTP, which streams events", "upgrade")
        else:
            kept = [header for header in request.headers if header[0] not in (b"upgrade", b"connection")]
            lines = b"".join([b"%b: %b\r\n" % (name, value) for _, name, value in kept])
            head = b"%b %b HTTP/1.1\r\n%b\r\n" % (request.method.encode(), request.target, lines)
            self._parser = httptools.HttpRequestParser(self)
            self._feed(head + rest)

    # -- serving -----------------------------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        self._waiting.append(request)
        if len(self._waiting) == _PIPELINED:
            self.transport.pause_reading()

    def _serve_waiting(self) -> None:
        if self._serving:
            return
        self._serving = True
        while self._waiting and self.served is None and not self.closing:
            request = self._waiting.popleft()
            if len(self._waiting) == _PIPELINED - 1:
                self.transport.resume_reading()
            self.planes.serve(self, request)
        self._serving = False

    def finish(self, keep_alive: bool) -> None:
        """The answer has been written; the next request may come."""
        self.served = None
        self.seen = monotonic()
        if not keep_alive or self._draining:
            self.close()
        elif self._waiting:
            self._serve_waiting()
        elif self._expects:
            self._continue()

    def _continue(self) -> None:
        self._expects = False
        self.transport.write(_CONTINUE)

    def close(self) -> None:
        """Closes once everything written has been taken."""
        self.closing = self._deaf = True
        self.transport.close()

    def linger(self) -> None:
        """Ends the answering side and reads on: closing at once would reset an answer that is still on its way."""
        self.served = None
        self.closing = self._deaf = True
        self.transport.write_eof()

    def drain(self) -> None:
        """No further request: closes now when idle, else after the answer."""
        self._draining = True
        if self.served is None and self._request is None and not self.closing:
            self.close()

    def break_off(self, framed: bool) -> None:
        """Ends an answer that is not complete, so that the client sees it: one that is `framed` lacks its end, any
        other is reset, because closing is how it would end."""
        self.served = None
        if framed:
            self.close()
            return
        self.closing = self._deaf = True
        connection: socket.socket = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def overdue(self, now: float, head_timeout: float, keepalive_timeout: float) -> bool:
        """True when the rest of a request, or a new one, has been awaited for too long."""
        if self.served is not None:
            return False
        return now - self.seen > (head_timeout if self._request is not None or self.closing else keepalive_timeout)
