"""One connection to an upstream: an asyncio protocol over httptools that carries one call at a time.

It gives its caller (`gateway.traffic.proxy.call_lifecycle`) each read as raw wire bytes, which can be sent on
unchanged. The parser runs beside them only to find the head, the end and the payload.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from typing import Protocol

import httptools

from penstock.gateway.wire.dialects.base import EVENT_STREAM
from penstock.gateway.wire.http.headers import HOP

_log = logging.getLogger("penstock.upstream")
_HEAD_LIMIT = 256 << 10
"""Largest head of an answer, and most bytes of framing in a row without any of the body."""
_INTERIM = 100
"""Most 1xx answers before an answer: each costs its client as much as an answer."""
_WATCHED = HOP | {b"transfer-encoding", b"content-length", b"content-type", b"content-encoding"}
_NO_HOPS: frozenset[bytes] = frozenset()
Headers = list[tuple[bytes, bytes]]


class UpstreamCaller(Protocol):
    """A call as its upstream connection sees it."""

    __slots__ = ()

    head_only: bool
    """True for HEAD: the answer has no body whatever its headers say."""

    @abstractmethod
    def on_connected(self, connection: UpstreamConnection) -> None:
        """Called when a connection is ready for the request."""

    @abstractmethod
    def on_unreachable(self, reason: str, detail: str) -> None:
        """Called when no connection could be made."""

    @abstractmethod
    def on_interim(self, head: bytes) -> None:
        """Called with a 1xx answer (never 100 or 101) before the answer itself."""

    def on_switched(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bool:
        """Called when the server switches to another protocol (101) and `raw` came behind that. Returns False if the
        call has not asked for one."""
        return False

    @abstractmethod
    def on_answer(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Called with the answer's head (status line to empty line) and the raw body bytes that came with it."""

    @abstractmethod
    def on_data(self, connection: UpstreamConnection, raw: bytes) -> None:
        """Called with more raw body bytes. `connection.done` is True if they are the last."""

    @abstractmethod
    def on_broken(self, connection: UpstreamConnection, reason: str) -> None:
        """Called when the connection ended, or sent bytes that are not HTTP, before the answer was complete."""


class UpstreamUpgradeHandler(Protocol):
    """The reader of a connection that no longer speaks HTTP."""

    def on_upstream_data(self, data: bytes) -> None:
        """Called with every read of the server's bytes."""
        ...

    def on_upstream_gone(self) -> None:
        """Called when the connection has ended."""
        ...

    def on_upstream_full(self, full: bool) -> None:
        """Called with True when the server reads slower than bytes are written, with False when it has caught up."""
        ...


class ConnectionOwner(Protocol):
    """The pool that makes connections and takes them back."""

    name: str
    connections: int

    def put_back(self, connection: UpstreamConnection) -> None:
        """Takes a connection whose answer is complete."""
        ...

    def forget(self, connection: UpstreamConnection) -> None:
        """Called when a connection has ended."""
        ...


class UpstreamConnection(asyncio.Protocol):
    __slots__ = ("_buffer", "_counted", "_framing", "_garbage", "_headed", "_interim", "_parser", "caller", "chunked",
                 "content_type", "cut", "done", "encoding", "head_fields", "headers", "hops", "idle_since",
                 "keep_alive", "length_known", "owner", "pieces", "reused", "seen", "status", "switched",
                 "transport")  # fmt: skip

    def __init__(self, owner: ConnectionOwner) -> None:
        self.owner = owner
        self.transport: asyncio.Transport
        self.caller: UpstreamCaller | None = None
        self.reused = False
        """True once the connection has been idle between two calls."""
        self.idle_since = 0.0
        self.switched: UpstreamUpgradeHandler | None = None
        self._counted = False
        self._parser = httptools.HttpResponseParser(self)
        self._clear()

    def _clear(self) -> None:
        self._buffer = b""
        self._headed = self._garbage = False
        self._framing = self._interim = 0
        self.status = 0
        self.headers: Headers = []
        """Header fields, and once the body has begun, trailer fields."""
        self.head_fields = 0
        """The number of header fields in `headers`; 0 until the head is complete."""
        self.hops = _NO_HOPS
        """Names of headers that concern this connection only; empty when there are none."""
        self.pieces: list[bytes] = []
        """Payload of the last read, without transfer framing."""
        self.seen = self.done = self.chunked = self.length_known = False
        self.cut = False
        """True if only the end of the connection has ended the answer."""
        self.content_type = b""
        """Content-Type in lower case."""
        self.encoding: bytes | None = None
        self.keep_alive = True

    # -- parser callbacks --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Marks a second message in one answer as garbage after its end."""
        self._garbage = self.done

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header, or a trailer once the body has begun."""
        self.headers.append((name, value))
        low = name.lower()
        if low in _WATCHED and not self.head_fields:
            self._note(low, value)

    def _note(self, low: bytes, value: bytes) -> None:
        if low == b"transfer-encoding":
            self.chunked = value.lower().endswith(b"chunked")
        elif low == b"content-length":
            self.length_known = True
        elif low == b"content-type":
            self.content_type = value.lower()
        elif low == b"content-encoding":
            self.encoding = value if self.encoding is None else self.encoding + b"," + value
        else:
            self.hops |= HOP
            if low == b"connection":
                named = {name.strip() for name in value.lower().split(b",")}
                self.hops |= named - {b"content-length", b"transfer-encoding"}

    def on_headers_complete(self) -> None:
        """Marks the end of the header fields: further members of `headers` are trailers."""
        self.head_fields = len(self.headers)

    def on_body(self, piece: bytes) -> None:
        """Adds payload, without transfer framing."""
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        self.done = True
        self.keep_alive = self._parser.should_keep_alive()

    # -- transport callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment] # asyncio's signature is wider than what it gives
        self.owner.connections += 1
        self._counted = True

    def data_received(self, data: bytes) -> None:
        """Passes a read to the call. On an idle connection any byte is an error."""
        caller, switched = self.caller, self.switched
        if caller is None and switched is None:
            self.transport.abort()
            return
        self.seen = True
        try:
            if switched is not None:
                switched.on_upstream_data(data)
            elif caller is None:
                return
            elif not self._headed:
                self._await_head(caller, data)
            elif self._parse(data) and (self.pieces or self.done or self._frames(len(data))):
                caller.on_data(self, data)
        except Exception:
            # The loop would only close this connection, and the client would wait for ever.
            _log.exception("an answer of upstream %r could not be handled", self.owner.name)
            self._break("internal")

    def _await_head(self, caller: UpstreamCaller, data: bytes) -> None:
        self._buffer = data = self._buffer + data if self._buffer else data
        end = data.find(b"\r\n\r\n") + 4
        while end > 3 and data[9:10] == b"1" and data[:5] == b"HTTP/":
            if data[9:12] == b"101":
                if caller.on_switched(self, data[:end], data[end:]):
                    return
            elif data[9:12] != b"100":
                caller.on_interim(data[:end])
            self._interim += 1
            if self._interim > _INTERIM:
                self._break("upstream_protocol")
                return
            self._buffer = data = data[end:]
            end = data.find(b"\r\n\r\n") + 4
        if end > 3:
            self._head_arrived(caller, data, end)
        elif len(data) > _HEAD_LIMIT or not (data.startswith(b"HTTP/") or b"HTTP/".startswith(data)):
            self._break("upstream_protocol")

    def _head_arrived(self, caller: UpstreamCaller, data: bytes, end: int) -> None:
        self._headed, self._buffer = True, b""
        head, raw = data[:end], data[end:]
        if not self._parse(head if caller.head_only else data):
            return
        self.status = self._parser.get_status_code()
        if caller.head_only:
            self.keep_alive = not raw and self._parser.should_keep_alive()
            self.done, raw = True, b""
            self._parser = httptools.HttpResponseParser(self)
        caller.on_answer(self, head, raw)

    def _frames(self, size: int) -> bool:
        """Counts a read without any of the body (chunk extensions, trailers). False, and breaks, if they do not end."""
        self._framing += size
        if self._framing > _HEAD_LIMIT:
            self._break("upstream_protocol")
        return self._framing <= _HEAD_LIMIT

    def _parse(self, data: bytes) -> bool:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError:
            self._garbage = True
        if self._garbage:
            self._break("upstream_protocol")
        return not self._garbage

    def _break(self, reason: str) -> None:
        caller, self.caller = self.caller, None
        self.transport.abort()
        if caller is not None:
            caller.on_broken(self, reason)

    def eof_received(self) -> None:
        """Returns None, which lets the transport close: the upstream sends nothing more."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the answer if only the end of the connection marks its end, else reports it as broken."""
        self._uncount()
        self.owner.forget(self)
        caller, self.caller = self.caller, None
        if self.switched is not None:
            self.switched.on_upstream_gone()
        if caller is None:
            return
        if self._headed and exc is None and not (self.chunked or self.length_known):
            self.done, self.cut, self.keep_alive = True, True, False
            caller.on_data(self, b"")
        else:
            caller.on_broken(self, "upstream_closed")

    def _uncount(self) -> None:
        self.owner.connections -= self._counted
        self._counted = False

    def pause_writing(self) -> None:
        """Tells the reader of a switched protocol. A request is held in memory as a whole, so a call has nothing to
        hold back."""
        if self.switched is not None:
            self.switched.on_upstream_full(True)

    def resume_writing(self) -> None:
        if self.switched is not None:
            self.switched.on_upstream_full(False)

    # -- for the call ------------------------------------------------------------------------------------------------

    @property
    def events(self) -> bool:
        """True if the answer is server-sent events; known once the head is complete."""
        return self.content_type.startswith(EVENT_STREAM)

    @property
    def ends_itself(self) -> bool:
        """False if only the end of the connection ends the answer; known once the head is complete."""
        return self.chunked or self.length_known or (self.done and not self.cut)

    def send(self, caller: UpstreamCaller, head: bytes, body: bytes) -> None:
        """Writes a request; a small one in one packet."""
        self.caller = caller
        self._clear()
        if self.transport.is_closing():
            # The connection ended before it was used; the caller has not been told yet.
            asyncio.get_running_loop().call_soon(self._break, "upstream_closed")
            return
        if len(body) < 16384:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def release(self) -> None:
        """Called when the answer is complete: returns the connection to its pool, or closes it if it cannot be used
        again."""
        self.caller = None
        if self.keep_alive and self.done and not self.transport.get_write_buffer_size():
            self.owner.put_back(self)
        else:
            self.transport.abort()

    def switch(self, to: UpstreamUpgradeHandler) -> None:
        """Gives the connection to the reader of another protocol."""
        self.caller, self.switched = None, to

    def cancel(self) -> None:
        """Aborts the connection: the answer is no longer wanted."""
        self.caller = None
        self.transport.abort()

    def give_up(self) -> None:
        """Abandons an attempt to connect. The connection may have been made this very moment: uvloop then does not
        report its loss."""
        if self._counted:
            self.transport.abort()
            self._uncount()
