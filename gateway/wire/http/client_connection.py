"""The client-facing side of a connection: one request at a time, in order.

Requests that arrive while one is being served wait their turn, and so does the refusal of bytes that are no request, so
that no answer is written into another. Reading never stops, because only reading shows that a client is gone; a client
that pipelines without end is refused (`gateway.wire.http.request`). A half-closed client counts as gone, for
the same reason.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from penstock.gateway.wire.http.request import HttpRequest, KnownHeads, RequestReader

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_AGREED = b"HTTP/1.1 200 OK\r\n\r\n"
_LINGER_SECONDS = 1.0
_RESET = struct.pack("ii", 1, 0)


class ServedRequest(Protocol):
    """The connection's view of what is being served."""

    def on_client_gone(self) -> None:
        """Called when the client has disconnected."""
        ...

    def hold(self) -> None:
        """Called when the client reads slower than the upstream sends."""
        ...

    def go_on(self) -> None:
        """Called when the client has caught up."""
        ...


class ClientUpgradeHandler(ServedRequest, Protocol):
    """The reader of a connection that no longer speaks HTTP."""

    def on_client_data(self, data: bytes) -> None:
        """Called with every read of the client's bytes."""
        ...

    def drain(self) -> None:
        """Starts nothing new on the connection and ends it as soon as nothing is in progress."""
        ...


class HttpApplication(Protocol):
    """The application as a client connection needs it."""

    clients: set[ClientConnection]
    epoch_ns: int
    """The zero of the monotonic clock, in nanoseconds on the clock of the tape."""
    request_bytes: int
    heads: KnownHeads

    def serve(self, client: ClientConnection, request: HttpRequest) -> None:
        """Answers a request: sets `client.served` until it calls `client.finish`, or ends the connection."""
        ...


class ClientConnection(asyncio.Protocol):
    __slots__ = ("_reader", "_serving", "closing", "draining", "hints", "paused", "planes", "seen", "served",
                 "switched", "transport", "tunnel")  # fmt: skip

    def __init__(self, planes: HttpApplication) -> None:
        self.planes = planes
        self.transport: asyncio.Transport
        self.served: ServedRequest | None = None
        """The request being served."""
        self.switched: ClientUpgradeHandler | None = None
        """The reader of a connection that no longer speaks HTTP, else None. `served` is then the same object."""
        self.closing = False
        self.paused = False
        """True while the client does not read what is written."""
        self.seen = 0.0
        """Monotonic seconds of the last byte of an unfinished body, of the first byte of an unfinished head, of the end
        of the last answer, or since when the client does not read."""
        self.hints = ConnectionHints()
        """Evidence for the rollouts of the calls on this connection."""
        self.tunnel: object | None = None
        """The sidecar's description of all calls on this connection; None without one."""
        self._reader = RequestReader(planes.request_bytes, planes.epoch_ns, planes.heads)
        self.draining = False
        """True when no further request is served. An answer that has not begun is sent with `Connection: close`."""
        self._serving = False

    # -- transport callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment] # asyncio's signature is wider than what it gives
        self.seen = monotonic()
        peer: tuple[str, int] | str | None = transport.get_extra_info("peername")
        self.hints.peer = peer[0] if isinstance(peer, tuple) else ""
        self.planes.clients.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells what is being served that the client has disconnected."""
        self.planes.clients.discard(self)
        self.closing = True
        served, self.served = self.served, None
        if served is not None:
            served.on_client_gone()

    def data_received(self, data: bytes) -> None:
        """Parses a read and serves the requests that are whole."""
        reader = self._reader
        if self.switched is not None and not self.closing:
            self.switched.on_client_data(data)
            return
        if self.closing or reader.over:
            return
        in_head = reader.in_head
        reader.feed(data)
        if reader.requests:
            self._serve_waiting()
        if self.served is None:
            if not (in_head and reader.in_head):
                # A head has all its time from the first byte on, however slowly it comes.
                self.seen = monotonic()
            if reader.expects:
                self._continue()

    def eof_received(self) -> None:
        """A half-closed client counts as gone; None lets the transport close."""

    def pause_writing(self) -> None:
        """Holds the upstream back while the client does not read."""
        self.paused, self.seen = True, monotonic()
        if self.served is not None:
            self.served.hold()

    def resume_writing(self) -> None:
        self.paused = False
        if self.served is not None:
            self.served.go_on()

    # -- serving -----------------------------------------------------------------------------------------------------

    def _serve_waiting(self) -> None:
        """Serves waiting requests in order, as long as each is answered at once."""
        if self._serving:
            return
        self._serving = True
        requests = self._reader.requests
        while requests and self.served is None and not self.closing:
            self.planes.serve(self, requests.pop(0))
        self._serving = False

    def enter(self, tunnel: object) -> None:
        """Accepts a CONNECT; the requests that follow belong to `tunnel`."""
        self.tunnel = tunnel
        self.transport.write(_AGREED)
        self._reader.enter()

    def switch(self, to: ClientUpgradeHandler) -> None:
        """Gives the connection to the reader of another protocol, with the bytes that came behind the request."""
        self.switched = self.served = to
        if behind := self._reader.leave():
            to.on_client_data(behind)

    def finish(self, keep_alive: bool) -> None:
        """Called when an answer has been written: serves the next request, or closes."""
        self.served = None
        self.seen = monotonic()
        if not keep_alive or self.draining:
            self.close()
        elif self._reader.requests:
            self._serve_waiting()
        elif self._reader.expects:
            self._continue()

    def _continue(self) -> None:
        self._reader.expects = False
        self.transport.write(_CONTINUE)

    def close(self) -> None:
        """Closes the connection once all written bytes are sent."""
        self.closing = True
        self.transport.close()

    def linger(self) -> None:
        """Stops writing but still reads: closing at once would reset an answer that is still on its way. TLS
        cannot close one direction, so both are closed a little later."""
        self.served = None
        self.closing = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            asyncio.get_running_loop().call_later(_LINGER_SECONDS, self.transport.close)

    def drain(self) -> None:
        """Serves no further request: closes now when idle, else after the current answer."""
        self.draining = True
        if self.switched is not None:
            self.switched.drain()
        elif self.served is None and not self._reader.unfinished and not self.closing:
            self.close()

    def break_off(self, framed: bool) -> None:
        """Ends an incomplete answer so that the client notices: a `framed` one lacks its end, any other is reset,
        because a normal close would look like its end.
        """
        self.served = None
        if framed:
            self.close()
            return
        self.closing = True
        connection: socket.socket = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def overdue(self, now: float, timeout: float) -> bool:
        """True if the client has for more than `timeout` seconds not completed its request, sent a new one, or read
        anything."""
        return (self.served is None or self.paused) and now - self.seen > timeout

    def expire(self, now: float, timeout: float) -> None:
        """Ends an overdue connection: aborts it if the client does not read, otherwise closes it."""
        if not self.overdue(now, timeout):
            return
        if self.paused:
            # The client will not read what was written.
            self.transport.abort()
        else:
            self.close()


@dataclass(slots=True, eq=False)
class ConnectionHints:
    """Evidence on a connection for the rollouts of its calls."""

    peer: str = ""
    """The client's address."""
    last: str | None = None
    """The implicit rollout of its last call."""
    mixed: bool = False
    """True if conversations took turns on the connection, which then belongs to a client's pool."""
    number: int = 0
    """The connection's number at the worker that keeps the conversations, if that is another worker."""
    failed: bool = False
    """True if its last call without an address has failed."""
