"""A request as it came from a client."""

from __future__ import annotations

from gateway.errors import Refusal

Headers = list[tuple[bytes, bytes, bytes]]
"""(lower-case name, name as sent, value), in order."""

_CHUNKS = 65536


class Request:
    """Filled in by its connection; whole when it is served."""

    __slots__ = (
        "_first",
        "_rest",
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
    )

    def __init__(self) -> None:
        self.method = ""
        self.target = b""
        self.headers: Headers = []
        self.trailers: Headers = []
        self.hops: frozenset[bytes] = frozenset()
        """Headers that its Connection header makes hop-by-hop (RFC 9110 §7.6.1)."""
        self.http10 = self.keep_alive = self.chunked = False
        self.upgrade = False
        """Whether it asks for another protocol."""
        self.length = 0
        """What Content-Length says."""
        self.size = 0
        """Payload bytes that have come."""
        self.chunks: list[int] = []
        """Where the chunks it came in ended, as far as there are not too many."""
        self.started = 0.0
        """When its head was there; monotonic seconds."""
        self.started_ns = 0
        """The same on the clock of the tape."""
        self.refusal: Refusal | None = None
        """Why it cannot be served, whatever it asks for."""
        self._first = b""
        self._rest: bytearray | None = None

    def add(self, piece: bytes) -> None:
        """Payload; the first piece is kept as it is, because it is mostly the only one."""
        if not self.size:
            self._first = piece
        elif self._rest is None:
            self._rest = bytearray(self._first + piece)
        else:
            self._rest += piece
        self.size += len(piece)

    def end_chunk(self) -> None:
        """Notes where a chunk ended. Of an absurd number of chunks the boundaries are forgotten."""
        if len(self.chunks) < _CHUNKS:
            self.chunks.append(self.size)

    def body(self) -> bytes:
        """The payload without transfer framing."""
        if self._rest is not None:
            self._first, self._rest = bytes(self._rest), None
        return self._first
