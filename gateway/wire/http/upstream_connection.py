"""One connection to an upstream: an asyncio protocol that carries one call at a time.

It gives its caller (`gateway.traffic.proxy.call_lifecycle`) each read as raw wire bytes, which can be sent on
unchanged. Beside them it finds the head, the payload and the end. One regular expression checks a head; llhttp decodes
chunks, which it does five times as fast as Python could. No function of Python is called for a header or a chunk.
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Final, Protocol

import httptools

from penstock.gateway.wire.dialects.base import EVENT_STREAM
from penstock.gateway.wire.http.headers import HOP, Fields, header_fields

_log = logging.getLogger("penstock.upstream")
_HEAD_LIMIT: Final = 256 << 10
"""Largest head of an answer, and most bytes of framing in a row without any of the body."""
_INTERIM: Final = 100
"""Most 1xx answers before an answer: each costs its client as much as an answer."""
_REST: Final = rb"[\t -~\x80-\xff]*+\r\n"
_HEAD: Final = re.compile(
    rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?:\r\n| " + _REST + rb")((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:" + _REST + rb")*+)\r\n"
)
"""RFC 9112: no bare CR, LF or NUL, no space before a colon, no line that continues another."""
_LENGTH: Final = re.compile(rb"[0-9]{1,19}+[ \t]*+")
_ELEMENT: Final = re.compile(rb"[^,\s](?:[^,]*[^,\s])?")
"""An element of a comma-separated list, without the whitespace around it."""
_ENDLESS: Final = 1 << 64
"""More bytes than the connection of an answer without a length brings."""
_CHUNKED: Final = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_FRAMING: Final = {b"content-length", b"transfer-encoding"}
_LISTS: Final = _FRAMING | {b"content-encoding", b"connection", b"proxy-connection"}
"""Headers of which several lines count as one list."""
_BODY_FIELDS: Final = _FRAMING | {b"content-type", b"content-encoding"}
_WATCHED: Final = HOP | _LISTS | _BODY_FIELDS
_WATCHED_FIELD: Final = re.compile(rb"\n(" + b"|".join(sorted(_WATCHED)) + rb"):[ \t]*+([^\r]*+)")
_NO_HOPS: Final[frozenset[bytes]] = frozenset()
_NOT_YET: Final = (b"", b"")


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


def _add(fields: Fields, name: bytes, value: bytes) -> None:
    fields.append((name, value))


class ChunkDecoder:
    """llhttp as a decoder of chunked bodies. Its callbacks are functions of C, except for trailers."""

    __slots__ = ("ends", "parser", "payload", "trailers")

    def __init__(self) -> None:
        self.payload: list[bytes] = []
        self.ends: list[None] = []
        """Has a member for the end of the body, and one for the first byte of garbage after it."""
        self.trailers: Fields = []
        end = partial(self.ends.append, None)
        self.parser = httptools.HttpResponseParser(
            SimpleNamespace(
                on_message_begin=end,
                on_header=partial(_add, self.trailers),
                on_body=self.payload.append,
                on_message_complete=end,
            )
        )

    def begin(self) -> None:
        """Expect the body of the next answer."""
        self.parser.feed_data(_CHUNKED)
        self.ends.clear()
        self.trailers.clear()


class UpstreamConnection(asyncio.Protocol):
    __slots__ = ("_buffer", "_counted", "_decoder", "_framing", "_headed", "_interim", "_left", "caller", "chunked",
                 "content_type", "cut", "done", "encoding", "head", "hops", "idle_since", "keep_alive",
                 "length_known", "owner", "pieces", "reused", "seen", "status", "switched", "trailers",
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
        self._decoder = ChunkDecoder()
        self._buffer: bytes = b""
        self._interim = self._framing = 0
        self._left = 0
        """Bytes until the end of a body without chunks."""
        self.seen = self._headed = self.done = False
        # What follows is the answer's: of the last one until there is a new head.
        self.status = 0
        self.head = b""
        """From the status line to the empty line."""
        self.trailers: Sequence[tuple[bytes, bytes]] = ()
        self.hops = _NO_HOPS
        """Names of headers that concern this connection only; empty when there are none."""
        self.pieces: list[bytes] = []
        """Payload of the last read, without transfer framing."""
        self.chunked = self.length_known = False
        self.cut = False
        """True if only the end of the connection has ended the answer."""
        self.content_type = b""
        """Content-Type in lower case."""
        self.encoding: bytes | None = None
        self.keep_alive = True

    # -- transport callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment] # asyncio's signature is wider than what it gives
        self.owner.connections += 1
        self._counted = True

    def data_received(self, data: bytes) -> None:
        """Passes a read to the call. On an idle connection any byte is an error."""
        caller, head, garbage = self.caller, b"", False
        try:
            if caller is None:
                if self.switched is None:
                    self.transport.abort()
                else:
                    self.switched.on_upstream_data(data)
                return
            if not self._headed:
                self.seen = True
                head, data = self._read_head(caller, data)
                if not head:
                    return
            if self.chunked and not self.done:
                decoder = self._decoder
                try:
                    decoder.parser.feed_data(data)
                except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                    garbage = True
                if decoder.payload:
                    self.pieces += decoder.payload
                    decoder.payload.clear()
                    self._framing = 0
                else:
                    self._framing += len(data)
                    garbage = garbage or self._framing > _HEAD_LIMIT
                if decoder.ends:
                    self.done, garbage = True, garbage or len(decoder.ends) > 1
                    self.trailers = (*decoder.trailers,)
                    for name, _ in self.trailers:
                        self.keep_alive = self.keep_alive and name.lower() not in _WATCHED
            else:
                self._left -= len(data)
                if self._left < 0:
                    # Line ends behind an answer are ignored, as llhttp does.
                    data, garbage = data[: self._left], bool(data[self._left :].strip(b"\r\n"))
                    self._left, self.keep_alive = 0, False
                if data:
                    self.pieces.append(data)
                self.done = not self._left
            if garbage:
                self._break("upstream_protocol")
            elif head:
                caller.on_answer(self, head, data)
            else:
                caller.on_data(self, data)
        except Exception:
            # The loop would only close this connection, and the client would wait for ever.
            _log.exception("an answer of upstream %r could not be handled", self.owner.name)
            self._break("internal")

    def _read_head(self, caller: UpstreamCaller, data: bytes) -> tuple[bytes, bytes]:
        """Returns the head and what came behind it; `_NOT_YET` if it is not complete, or refused. The call gets 1xx
        answers that come before it."""
        self._buffer = data = self._buffer + data if self._buffer else data
        while (end := data.find(b"\r\n\r\n") + 4) > 3:
            head, data = data[:end], data[end:]
            read = _HEAD.fullmatch(head)
            if read is None or head[9:10] != b"1":
                break
            if head[9:12] == b"101":
                if caller.on_switched(self, head, data):
                    return _NOT_YET
            elif head[9:12] != b"100":
                caller.on_interim(head)
            self._buffer = data
            self._interim += 1
            if self._interim > _INTERIM:
                self._break("upstream_protocol")
                return _NOT_YET
        else:
            if len(data) > _HEAD_LIMIT or not (data.startswith(b"HTTP/") or b"HTTP/".startswith(data)):
                self._break("upstream_protocol")
            return _NOT_YET
        fields = _WATCHED_FIELD.findall(head.lower())
        found: dict[bytes, bytes] = dict(fields)
        if len(found) < len(fields):
            for name in found.keys() & _LISTS:
                found[name] = b",".join([value for other, value in fields if other == name])
        length, coding = found.get(b"content-length"), found.get(b"transfer-encoding")
        codings: Sequence[bytes] = _ELEMENT.findall(coding) if coding else ()
        if (
            read is None
            or (length is not None and (coding is not None or _LENGTH.fullmatch(length) is None))
            # Readers differ on empty elements and on tabs.
            or (coding is not None and (len(codings) != coding.count(b",") + 1 or b"\t" in coding))
        ):
            self._break("upstream_protocol")
            return _NOT_YET
        self._headed, self._buffer, self._interim, self._framing = True, b"", 0, 0
        self.status, self.head, self.trailers, self.pieces, self.cut = int(read[2]), head, (), [], False
        self.content_type, self.encoding = found.get(b"content-type", b""), found.get(b"content-encoding")
        self.hops = options = _NO_HOPS
        if not found.keys() <= _BODY_FIELDS:
            said = found.get(b"connection", b"") + b"," + found.get(b"proxy-connection", b"")
            options = frozenset(_ELEMENT.findall(said))
            self.hops = HOP | options - _FRAMING
        self.chunked, self.length_known = bool(codings) and codings[-1] == b"chunked", length is not None
        empty = self.status in (204, 304)
        stays = read[1] == b"1" or b"keep-alive" in options
        self.keep_alive = stays and b"close" not in options and (self.chunked or self.length_known or empty)
        if caller.head_only:
            self.keep_alive, data = self.keep_alive and not data, b""
        self.done = empty or caller.head_only
        self._left = 0 if self.done or self.chunked else _ENDLESS if length is None else int(length)
        if self.chunked and not self.done:
            self._decoder.begin()
        return head, data

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
    def headers(self) -> Fields:
        """The header fields of the answer."""
        return header_fields(self.head)

    @property
    def events(self) -> bool:
        """True if the answer is server-sent events; known once the head is complete."""
        return self.content_type.startswith(EVENT_STREAM)

    def send(self, caller: UpstreamCaller, head: bytes, body: bytes) -> None:
        """Writes a request; a small one in one packet."""
        self.caller = caller
        self.seen = self.done = self._headed = False
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
