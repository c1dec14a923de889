"""A request as it came from a client."""

from __future__ import annotations

from penstock.gateway.wire.http.errors import Refusal

Headers = list[tuple[bytes, bytes, bytes]]
"""(lower-case name, name as sent, value), in order."""

_CHUNKS = 65536
_PIECES = 4096


class HttpRequest:
    """Filled in by its connection; whole when it is served."""

    __slots__ = (
        "_gathered",
        "_pieces",
        "chunked",
        "chunks",
        "headers",
        "hops",
        "http10",
        "keep_alive",
        "length",
        "method",
        "refusal",
        "size",
        "started",
        "started_ns",
        "target",
        "trailers",
        "upgrade",
        "websocket",
    )

    def __init__(self) -> None:
        self.method = ""
        self.target = b""
        self.headers: Headers = []
        self.trailers: Headers = []
        self.hops: frozenset[bytes] = frozenset()
        """Headers that its Connection header makes hop-by-hop (RFC 9110 §7.6.1)."""
        self.http10 = self.keep_alive = self.chunked = False
        self.upgrade = self.websocket = False
        """True if the request asks for another protocol, and `websocket` if that is a WebSocket."""
        self.length = 0
        """The value of Content-Length."""
        self.size = 0
        """Payload bytes received."""
        self.chunks: list[int] = []
        """The offsets at which the client's chunks ended; at most `_CHUNKS` of them."""
        self.started = 0.0
        """Monotonic seconds at which its head was complete."""
        self.started_ns = 0
        """`started` on the clock of the tape, in nanoseconds."""
        self.refusal: Refusal | None = None
        """The reason why it cannot be served; None if it can."""
        self._pieces: list[bytes] = []
        self._gathered = bytearray()

    def add(self, piece: bytes) -> None:
        """Appends payload. Pieces are joined when the request is whole, or before there are too many small ones."""
        self.size += len(piece)
        self._pieces.append(piece)
        if len(self._pieces) == _PIECES:
            self._gathered += b"".join(self._pieces)
            self._pieces.clear()

    def end_chunk(self) -> None:
        """Notes the end of a chunk. Ends beyond an absurd number of chunks are forgotten."""
        if len(self.chunks) < _CHUNKS:
            self.chunks.append(self.size)

    def body(self) -> bytes:
        """The payload without transfer framing. It is stored once, however often it is read."""
        if self._gathered:
            self._pieces = [bytes(self._gathered), *self._pieces]
            self._gathered = bytearray()
        if len(self._pieces) != 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0]
