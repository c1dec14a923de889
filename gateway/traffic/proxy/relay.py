"""The way of an answer from an upstream connection to a client: the base of calls (`gateway.traffic.proxy.call`) and
of control requests (`gateway.process.control_plane`).

The callback that reads from the upstream writes to the client, byte for byte, with two exceptions. A client of HTTP/1.0
gets a chunked answer without its chunks. The gateway's own keys are taken out of errors
(`gateway.traffic.calls.answer_masking`). A call has further reasons to change its answer (`framing`). While the client
is slow, nothing more is read from the upstream.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from time import monotonic

from penstock.gateway.model.known_secrets import NO_SECRETS
from penstock.gateway.traffic.calls.answer_masking import masking_framing
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.headers import HOP, client_head
from penstock.gateway.wire.http.request import HttpRequest
from penstock.gateway.wire.http.upstream_connection import UpstreamCaller, UpstreamConnection
from penstock.gateway.wire.rewriting import Framing


class Relay(UpstreamCaller):
    """One request being served, and its answer."""

    __slots__ = (
        "_changes",
        "_framing",
        "_unchunk",
        "_until_close",
        "client",
        "connecting",
        "connection",
        "head_only",
        "held",
        "own",
        "request",
        "started",
        "touched",
    )  # fmt: skip

    def __init__(self, client: ClientConnection, request: HttpRequest) -> None:
        self.client = client
        self.request = request
        self.head_only = request.method == "HEAD"
        self.connecting: asyncio.Task[None] | None = None
        self.connection: UpstreamConnection | None = None
        self.held = client.paused
        """True while the client does not take what is written."""
        self.started = False
        """True once the answer's head was passed on."""
        self.touched = request.started
        """When the upstream last sent something or was written to; monotonic seconds."""
        self.own = NO_SECRETS
        """The gateway's keys, which no error answer may disclose."""
        self._changes = self._unchunk = self._until_close = False
        self._framing: Framing | None = None

    def send(self, connection: UpstreamConnection, head: bytes, body: bytes) -> None:
        """Write the request to the upstream."""
        self.connecting = None
        self.connection = connection
        self.touched = monotonic()
        connection.send(self, head, body)
        if self.held:
            connection.transport.pause_reading()

    @abstractmethod
    def on_client_gone(self) -> None:
        """Called when the client has left."""

    def on_interim(self, head: bytes) -> None:
        """Pass on a 1xx answer."""
        if not self.request.http10:
            self.client.transport.write(self.own.hide(head))

    @property
    def keep_alive(self) -> bool:
        """True if the client may send another request on this connection."""
        return self.request.keep_alive and not self.client.draining

    def begin_answer(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Return the bytes for the client: the answer's head and the body bytes of the same read."""
        self.started = True
        self._changes = self._unchunk = self.request.http10 and connection.chunked
        self._until_close = not connection.ends_itself
        close = not self.keep_alive or self._until_close
        if close or connection.hops or head[5:8] != b"1.1":
            drop = connection.hops or HOP
            head = client_head(head, drop | {b"transfer-encoding"} if self._unchunk else drop, close)
        self._framing = self.framing(connection)
        if self._framing is not None:
            self._changes = True
            return self._framing.begin(connection, head, raw)
        return head + self.continue_answer(connection, raw)

    def framing(self, connection: UpstreamConnection) -> Framing | None:
        """The framing that changes the answer; None if the answer passes unchanged."""
        if connection.status >= 300 and self.own:
            return masking_framing(self.own, connection, connection.chunked and not self._unchunk)
        return None

    def continue_answer(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Return the bytes for the client of one read."""
        return self._changed(connection, raw) if self._changes else raw

    @property
    def token_ids(self) -> bool:
        """True if the answer had token ids that the gateway had asked for."""
        return self._framing is not None and self._framing.ids

    def _changed(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        return b"".join(connection.pieces) if self._framing is None else self._framing.go_on(connection, raw)

    def end_answer(self) -> None:
        """Finish the answer: everything was written, so the connection's next request may come."""
        self.client.finish(self.request.keep_alive and not self._until_close)

    def release_upstream(self) -> None:
        """Give the connection back to its pool: the answer is complete."""
        connection, self.connection = self.connection, None
        if connection is not None:
            if self.held:
                connection.transport.resume_reading()
            connection.release()

    def cancel_upstream(self) -> None:
        """Cancel the upstream at once: nobody waits for the answer."""
        connecting, self.connecting = self.connecting, None
        connection, self.connection = self.connection, None
        if connecting is not None:
            connecting.cancel()
        if connection is not None:
            connection.cancel()

    def break_off(self) -> None:
        """End an answer that cannot be completed, so that the client notices."""
        if self._framing is not None and (held := self._framing.broken()):
            self.client.transport.write(held)
        self.client.break_off(framed=not (self._until_close or self._unchunk))

    def hold(self) -> None:
        """Stop reading from the upstream: the client is slower."""
        self.held = True
        if self.connection is not None:
            self.connection.transport.pause_reading()

    def go_on(self) -> None:
        """Read from the upstream again: the client has caught up."""
        self.held = False
        self.touched = monotonic()
        if self.connection is not None:
            self.connection.transport.resume_reading()
