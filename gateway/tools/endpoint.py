"""Replaces the path for messages in the first event of HTTP with SSE by one of the gateway's own. Sans-I/O.

A stream of streamable HTTP begins with another event, or stays silent for hours. So bytes are held back only while they
may be the beginning of that event; after that everything passes unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.rewriting import encode_chunk

_FIRST: Final = re.compile(rb"\A(?:\xef\xbb\xbf)?event: ?endpoint(?:\r\n|\r|\n)data: ?([^\r\n]*)(?:\r\n|\r|\n){2}")
_NAME: Final = (b"event: endpoint", b"event:endpoint", b"\xef\xbb\xbfevent: endpoint", b"\xef\xbb\xbfevent:endpoint")
_LONGEST: Final = 8192
"""Largest event that may name a path, in bytes."""


class EndpointFraming:
    """The framing of one stream."""

    __slots__ = ("_changed", "_held", "_named", "_plain", "_raw")
    ids = False

    def __init__(self, named: Callable[[str], str | None], plain: bool) -> None:
        """`named`: returns the gateway's path for one of the server's, or None to leave it; `plain`: True if the client
        takes no chunks (HTTP/1.0)."""
        self._named, self._plain = named, plain
        self._held: bytes | None = b""
        """Payload that may begin the event; None once that is settled."""
        self._raw = b""
        """`_held` with its transfer framing."""
        self._changed = False

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Returns the head at once, with what `go_on` passes."""
        return head + (self.go_on(connection, raw) if raw else b"")

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Returns the bytes of a read that go to the client."""
        payload = b"".join(connection.pieces)
        if self._held is None:
            return self._framed(connection, payload) if self._changed or self._plain else raw
        self._held += payload
        self._raw += raw
        held, found = self._held, _FIRST.match(self._held)
        if found is not None:
            return self._settle(connection, found)
        if connection.done or len(held) > _LONGEST or not _may_begin(held):
            self._held = None
            return held if self._plain else self._raw
        return b""

    def _settle(self, connection: UpstreamConnection, found: re.Match[bytes]) -> bytes:
        held, raw = self._held or b"", self._raw
        self._held, self._raw = None, b""
        ours = self._named(found[1].decode("utf-8", "replace"))
        if ours is None:
            return held if self._plain else raw
        self._changed = True
        return self._framed(connection, held[: found.start(1)] + ours.encode() + held[found.end(1) :])

    def _framed(self, connection: UpstreamConnection, payload: bytes) -> bytes:
        return payload if self._plain or not connection.chunked else encode_chunk(connection, payload)

    def broken(self) -> bytes:
        """Returns nothing: held bytes are an incomplete event."""
        return b""


def _may_begin(held: bytes) -> bool:
    return any(held.startswith(name) or name.startswith(held) for name in _NAME)
