"""Reads the messages of a stream of events beside its way to the client. Sans-I/O."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Final

from penstock.gateway.dialects import sse
from penstock.gateway.dialects.mcp import Sent, messages

_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32
_PLAIN: Final = (None, b"identity")
_PACKED: Final = (b"gzip", b"deflate")


class StreamReader:
    """One stream."""

    def __init__(self, encoding: bytes | None) -> None:
        """`encoding`: content encoding. Of one that is not known here nothing is read."""
        self._events: sse.Parser | None = sse.Parser() if encoding in (*_PLAIN, *_PACKED) else None
        self._unpack = zlib.decompressobj(_GZIP_OR_ZLIB).decompress if encoding in _PACKED else None
        self.resumable = False
        """Whether the stream has numbered its events, so that another one may go on from there."""

    def feed(self, pieces: Iterable[bytes]) -> Iterator[Sent]:
        """The messages that are whole now."""
        data = b"".join(pieces) if self._events is not None else b""
        if self._unpack is not None:
            try:
                data = self._unpack(data)
            except zlib.error:
                self._events = None
        for event in self._events.feed(data) if self._events is not None else ():
            self.resumable = self.resumable or bool(event.id)
            yield from messages(event.data.encode()) if event.type == "message" else ()
