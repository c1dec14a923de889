"""A cleaned answer on its way to the client: its head, and the transfer framing of what is left. Sans-I/O.

A plain answer is held until it is whole, because engines write it in one go, and gets its new length. A stream passes
event by event; its chunks are made anew. An answer that needs no change passes as it came, framing included. Errors,
encoded answers and answers that are neither JSON nor events are not looked into. What an answer is its bytes tell, and
not its type: servers answer JSON under the type of streams, under that of plain texts, or without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Protocol

from penstock.gateway.calls.capture.answer import Changes, Cleaner, Events
from penstock.gateway.calls.capture.request import Asked
from penstock.gateway.dialects.sse import begins
from penstock.gateway.http.upstream_connection import Headers, UpstreamConnection

LIMIT: Final = 64 << 20
"""Bytes of a plain answer, or of one event, beyond which it passes as it came."""
LENGTH: Final = re.compile(rb"(?<=\r\n)(content-length:[ \t]*)[0-9]+", re.IGNORECASE)
_IDENTITY: Final = (None, b"identity")
_LINES: Final = (b"ndjson", b"jsonl", b"json-seq", b"stream+json")
"""In content types of streams of another format: these are not held back."""
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"


class Framing(Protocol):
    """The way of one answer."""

    @property
    def ids(self) -> bool:
        """True once there were token ids of an answer."""
        ...

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """What the client gets of the head and of the bytes in the same read."""
        ...

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """What the client gets of a read."""
        ...

    def broken(self) -> bytes:
        """What the client still gets of an answer that breaks off."""
        ...


def cleaned(asked: Asked, connection: UpstreamConnection, chunked: bool, limit: int = LIMIT) -> Framing | None:
    """How an answer is cleaned; None if it is not. `chunked`: whether the client gets it in chunks; `limit`: the most
    bytes that are held back.
    """
    if connection.status >= 300 or connection.encoding not in _IDENTITY:
        return None
    if connection.events and not connection.length_known:
        return Stream(Cleaner(asked), chunked, limit)
    told = connection.events or _is_json(connection.headers)
    lines = any(name in connection.content_type for name in _LINES)
    if not told and (lines or _is_json_body(connection.pieces) is False):
        return None
    return Whole(Cleaner(asked), connection.events, chunked, limit, told)


def _is_json(headers: Headers) -> bool:
    types = [value for name, value in headers if name.lower() == b"content-type"]
    return len(types) == 1 and types[0].partition(b";")[0].strip().lower() == b"application/json"


def _is_json_body(pieces: Iterable[bytes]) -> bool | None:
    """Whether a body that begins with these is a JSON object; None while that cannot be told."""
    first = b"".join(pieces).lstrip(_BLANK)
    return first.startswith(b"{") if first else None


class Stream:
    """A stream of events."""

    def __init__(self, cleaner: Changes, chunked: bool, limit: int) -> None:
        self.cleaner = cleaner
        self._events = Events(cleaner, limit)
        self._chunked = chunked
        self._limit = limit
        self._document: list[bytes] | None = None
        """A plain answer under the type of streams, as far as it has come."""
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
        """The head at once."""
        return head + self.go_on(connection, raw)

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """The events that are whole now."""
        data = b"".join(connection.pieces)
        if not self._begun and (first := data.lstrip(_BLANK)):
            self._begun, self._document = True, [] if first.startswith(b"{") else None
        if self._document is None:
            out = self._events.feed(data) + (self._events.rest() if connection.done else b"")
        else:
            self._document.append(data)
            out = self._cleaned(self._document, connection.done)
        return framed(connection, out) if self._chunked else out

    def _cleaned(self, pieces: list[bytes], done: bool) -> bytes:
        """A plain answer, once it is whole or too large."""
        whole = b"".join(pieces) if done or sum(map(len, pieces)) > self._limit else b""
        if whole:
            pieces.clear()
        return self.cleaner.document(whole) if done and whole else whole

    def broken(self) -> bytes:
        """Nothing: half an event says nothing."""
        return b""


class Whole:
    """A plain answer, or a stream whose length was known when it began."""

    def __init__(self, cleaner: Changes, events: bool, chunked: bool, limit: int, told: bool = True) -> None:
        """`told`: whether its type says that it is one; else its first bytes do, which may come later than its head."""
        self.cleaner = cleaner
        self._told: bool | None = told or None
        self._limit = limit
        self._events = Events(cleaner, limit)
        self._labelled = events
        self._chunked = chunked
        self._head = b""
        self._raw: list[bytes] = []
        self._pieces: list[bytes] = []
        self._size: int | None = 0
        """How much is held; None once nothing is any more."""

    @property
    def ids(self) -> bool:
        """True once there were token ids of an answer."""
        return self.cleaner.ids

    @property
    def held(self) -> int:
        """Bytes that are held back."""
        return self._size or 0

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """The head waits for the length."""
        self._head = head
        return self.go_on(connection, raw)

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Everything, once it is whole or too large."""
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
        """The head; the client sees that the rest is missing."""
        held, self._size = self._size is not None, None
        return self._head if held else b""

    def _cleaned(self, connection: UpstreamConnection) -> bytes:
        body = b"".join(self._pieces)
        stream = begins(body) or (self._labelled and not body.lstrip(_BLANK).startswith(b"{"))
        made = self._events.feed(body) + self._events.rest() if stream else self.cleaner.document(body)
        if made == body:
            return self._head + b"".join(self._raw)
        return LENGTH.sub(rb"\g<1>%d" % len(made), self._head) + (framed(connection, made) if self._chunked else made)


def framed(connection: UpstreamConnection, body: bytes) -> bytes:
    """A piece of an answer as a chunk; after the last one, the end of them with the answer's trailers."""
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    if not connection.done:
        return chunk
    trailers = b"".join([b"%b: %b\r\n" % field for field in connection.headers[connection.head_fields :]])
    return b"%b0\r\n%b\r\n" % (chunk, trailers)
