"""Frames a cleaned answer for the client: its head, and the transfer framing of its body. Sans-I/O.

A plain answer is held until it is complete, because engines write it in one go, and gets its new length. A stream
passes event by event; its chunks are made anew. An answer that needs no change passes unchanged, framing included.
Errors, encoded answers and answers that are neither JSON nor events are not looked into. The bytes of an answer decide
what it is, and not its content type: servers send JSON with the type of streams, that of plain texts, or without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Protocol

from penstock.gateway.wire.capture.answer import AnswerRewriter, CaptureCleaner, EventStreamRewriter
from penstock.gateway.wire.capture.request import CaptureRequest
from penstock.gateway.wire.dialects.sse import begins_event_stream
from penstock.gateway.wire.http.upstream_connection import Headers, UpstreamConnection

LIMIT: Final = 64 << 20
"""Bytes of a plain answer, or of one event, beyond which it passes as it came."""
LENGTH: Final = re.compile(rb"(?<=\r\n)(content-length:[ \t]*)[0-9]+", re.IGNORECASE)
_IDENTITY: Final = (None, b"identity")
_LINES: Final = (b"ndjson", b"jsonl", b"json-seq", b"stream+json")
"""Parts of the content types of streams in other formats, which are not held back."""
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"


class Framing(Protocol):
    """Carries one answer to the client, changed or unchanged."""

    @property
    def ids(self) -> bool:
        """True once there were token ids of an answer."""
        ...

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Return the bytes for the client of the head and the body bytes of the same read."""
        ...

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Return the bytes for the client of one read."""
        ...

    def broken(self) -> bytes:
        """Return the last bytes for the client of an answer that breaks off."""
        ...


def capture_framing(
    asked: CaptureRequest, connection: UpstreamConnection, chunked: bool, limit: int = LIMIT
) -> Framing | None:
    """The framing that cleans an answer; None if it passes unchanged. `chunked`: the client gets it in chunks; `limit`:
    the most bytes that are held back."""
    if connection.status >= 300 or connection.encoding not in _IDENTITY:
        return None
    if connection.events and not connection.length_known:
        return StreamFraming(CaptureCleaner(asked), chunked, limit)
    told = connection.events or _is_json(connection.headers)
    lines = any(name in connection.content_type for name in _LINES)
    if not told and (lines or _is_json_body(connection.pieces) is False):
        return None
    return BufferedFraming(CaptureCleaner(asked), connection.events, chunked, limit, told)


def _is_json(headers: Headers) -> bool:
    types = [value for name, value in headers if name.lower() == b"content-type"]
    return len(types) == 1 and types[0].partition(b";")[0].strip().lower() == b"application/json"


def _is_json_body(pieces: Iterable[bytes]) -> bool | None:
    """True if a body that begins so is a JSON object; None while that is open."""
    first = b"".join(pieces).lstrip(_BLANK)
    return first.startswith(b"{") if first else None


class StreamFraming:
    """A streamed answer."""

    def __init__(self, cleaner: AnswerRewriter, chunked: bool, limit: int) -> None:
        self.cleaner = cleaner
        self._events = EventStreamRewriter(cleaner, limit)
        self._chunked = chunked
        self._limit = limit
        self._document: list[bytes] | None = None
        """Pieces of a plain answer with the type of streams; None for a stream."""
        self._begun = False

    @property
    def ids(self) -> bool:
        """True once there were token ids of an answer."""
        return self.cleaner.ids

    @property
    def held(self) -> int:
        """Bytes that are held back."""
        return self._events.held + sum(map(len, self._document or ()))

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Return the head at once."""
        return head + self.go_on(connection, raw)

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Return the events that are complete now."""
        data = b"".join(connection.pieces)
        if not self._begun and (first := data.lstrip(_BLANK)):
            self._begun, self._document = True, [] if first.startswith(b"{") else None
        if self._document is None:
            out = self._events.feed(data) + (self._events.flush() if connection.done else b"")
        else:
            self._document.append(data)
            out = self._cleaned(self._document, connection.done)
        return encode_chunk(connection, out) if self._chunked else out

    def _cleaned(self, pieces: list[bytes], done: bool) -> bytes:
        """A plain answer, once it is complete or too large."""
        whole = b"".join(pieces) if done or sum(map(len, pieces)) > self._limit else b""
        if whole:
            pieces.clear()
        return self.cleaner.document(whole) if done and whole else whole

    def broken(self) -> bytes:
        """Return nothing: half an event is useless."""
        return b""


class BufferedFraming:
    """A plain answer, or a stream whose length was known when it began."""

    def __init__(self, cleaner: AnswerRewriter, events: bool, chunked: bool, limit: int, told: bool = True) -> None:
        """`told`: its content type says that it is JSON or events; else its first bytes tell, which may come after the
        head."""
        self.cleaner = cleaner
        self._told: bool | None = told or None
        self._limit = limit
        self._events = EventStreamRewriter(cleaner, limit)
        self._labelled = events
        self._chunked = chunked
        self._head = b""
        self._raw: list[bytes] = []
        self._pieces: list[bytes] = []
        self._size: int | None = 0
        """Bytes that are held; None once nothing is held any more."""

    @property
    def ids(self) -> bool:
        """True once there were token ids of an answer."""
        return self.cleaner.ids

    @property
    def held(self) -> int:
        """Bytes that are held back."""
        return self._size or 0

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Hold the head, because the length may change."""
        self._head = head
        return self.go_on(connection, raw)

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Return everything once it is complete or too large."""
        passed = raw if self._chunked or not connection.chunked else b"".join(connection.pieces)
        if self._size is None:
            return passed
        self._raw.append(passed)
        self._pieces += connection.pieces
        self._size += len(raw)
        if connection.done:
            self._size = None
            return self._cleaned(connection)
        if self._told is None:
            self._told = _is_json_body(self._pieces)
        return self.broken() + b"".join(self._raw) if self._told is False or self._size > self._limit else b""

    def broken(self) -> bytes:
        """Return the head; the client sees that the rest is missing."""
        held, self._size = self._size is not None, None
        return self._head if held else b""

    def _cleaned(self, connection: UpstreamConnection) -> bytes:
        body = b"".join(self._pieces)
        stream = begins_event_stream(body) or (self._labelled and not body.lstrip(_BLANK).startswith(b"{"))
        made = self._events.feed(body) + self._events.flush() if stream else self.cleaner.document(body)
        if made == body:
            return self._head + b"".join(self._raw)
        return LENGTH.sub(rb"\g<1>%d" % len(made), self._head) + (
            encode_chunk(connection, made) if self._chunked else made
        )


def encode_chunk(connection: UpstreamConnection, body: bytes) -> bytes:
    """A piece of an answer as a chunk; with the last piece, also the final chunk and the answer's trailers."""
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    if not connection.done:
        return chunk
    trailers = b"".join([b"%b: %b\r\n" % field for field in connection.headers[connection.head_fields :]])
    return b"%b0\r\n%b\r\n" % (chunk, trailers)
