"""Reads the messages of a stream of events while it passes to its client. Sans-I/O.

Held and unpacked bytes are limited: beyond the limit the stream is read no further. Its bytes pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Final

from penstock.gateway.tools.sessions import McpSession
from penstock.gateway.wire.dialects import sse
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, messages

LONGEST: Final = 32 << 20
"""Largest event that is read, in bytes."""
UNPACKED: Final = 8 << 20
"""Most bytes of one read after its content encoding is removed."""
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32
_PLAIN: Final = (None, b"identity")
_PACKED: Final = (b"gzip", b"deflate")
_BLANK: Final = (b"\n\n", b"\n\r\n", b"\r\r")


class McpStreamReader:
    """The reader of one stream."""

    __slots__ = ("_begun", "_events", "_packed", "_resumes", "_session", "resumable")

    def __init__(self, encoding: bytes | None, session: McpSession | None = None, resumes: bool = False) -> None:
        """`encoding`: content encoding; a stream with an unknown one is not read. `resumes`: True if the client
        continues an earlier stream of the session; the server then repeats the messages that the client has missed."""
        self._events: sse.SseParser | None = sse.SseParser() if encoding in (*_PLAIN, *_PACKED) else None
        self._packed = zlib.decompressobj(_GZIP_OR_ZLIB) if encoding in _PACKED else None
        self._session, self._resumes = session, resumes
        self._begun = 0
        """Bytes of the incomplete event."""
        self.resumable = False
        """True if the stream has numbered its events, so that another stream may continue it."""

    @property
    def unread(self) -> bool:
        """True if messages pass that cannot be read."""
        return self._events is None

    def feed(self, pieces: Iterable[bytes]) -> Iterator[JsonRpcMessage]:
        """The messages that are complete now, without those of the server that passed in an earlier stream."""
        for event in self._whole(pieces):
            self.resumable = self.resumable or bool(event.id)
            for one in messages(event.data.encode()) if event.type == "message" else ():
                if one.kind == "answer" or not self._repeats(event.id, one):
                    yield one

    def _whole(self, pieces: Iterable[bytes]) -> list[sse.ServerSentEvent]:
        if self._events is None:
            return []
        data = b"".join(pieces)
        try:
            if self._packed is not None:
                data = self._packed.decompress(data, UNPACKED)
        except zlib.error:
            self._events = None
            return []
        found = self._events.feed(data)
        blank = max(map(data.rfind, _BLANK))
        self._begun = len(data) - blank if blank >= 0 else self._begun + len(data)
        if self._begun > LONGEST or (self._packed is not None and self._packed.unconsumed_tail):
            self._events = None
        return found

    def _repeats(self, event: str, one: JsonRpcMessage) -> bool:
        if not event or self._session is None:
            return False
        return self._session.is_repeated(event, one.raw) and self._resumes
