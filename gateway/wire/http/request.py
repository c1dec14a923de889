"""Requests as they came from clients, and the gateway's own refusals of them: a class for each party that can be at
fault. Each is answered in the error shape of the API being spoken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from time import time
from types import MappingProxyType


class Refusal(Exception):
    """A call that is answered by the gateway itself."""

    code: int | None = None
    """JSON-RPC error code, if this refusal has one of its own."""
    data: Mapping[str, str] = MappingProxyType({})
    """Further members of a JSON-RPC error's `data`, for programs."""
    headers: Sequence[tuple[bytes, bytes]] = ()
    """Additional headers of the answer."""

    def __init__(self, status: int, kind: str, message: str, field: str | None = None) -> None:
        """`status`: HTTP; `kind`: short reason for the span; `field`: the part of the request that is at fault."""
        super().__init__(message)
        self.status, self.kind, self.message, self.field = status, kind, message, field


class ClientFault(Refusal):
    """The request cannot be served as it is: 4xx."""


class GatewayFault(Refusal):
    """The gateway cannot serve it now: 500, 503."""


class UpstreamFault(Refusal):
    """The upstream could not be reached or did not answer in time: 502, 504."""


def internal_fault() -> Refusal:
    return GatewayFault(500, "internal", "the gateway failed on this call; its log says why")


# The header `Retry-After` (RFC 9110, 10.2.3): how long a client should wait. Pure.


def retry_after(value: str | None, longest_s: float) -> float | None:
    """Seconds to wait, at most `longest_s`; the header holds a number of them, or a date. None if it cannot be read."""
    try:
        seconds = float(value or "")
    except ValueError:
        try:
            seconds = max(0.0, parsedate_to_datetime(value or "").timestamp() - time())
        except (ValueError, OverflowError):
            return None
    # NaN is not >= 0 either.
    return min(seconds, longest_s) if seconds >= 0 else None


# A request as it came from a client.

Headers = list[tuple[bytes, bytes, bytes]]
"""(lower-case name, name as sent, value), in order."""

_CHUNKS = 65536
_PIECES = 4096


class RequestHead:
    """A head that a client may send again: what it was parsed to, and what was decided for it."""

    __slots__ = ("decision", "headers", "hops", "length", "method", "places", "target")

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        hops: frozenset[bytes],
        places: list[tuple[int, bytes, bytes]],
        length: int | None,
    ) -> None:
        """`places`: index and names of each header whose value differs from request to request. `length`: the index of
        Content-Length among these; None without one."""
        self.method, self.target, self.headers, self.hops = method, target, headers, hops
        self.places, self.length = places, length
        self.decision: object = None
        """What the gateway has decided for calls with this head, whatever their bodies; None if nothing was decided."""


class HttpRequest:
    """Filled in by its connection; whole when it is served."""

    __slots__ = (
        "_gathered",
        "_pieces",
        "chunked",
        "chunks",
        "head",
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

    def __init__(self, head: RequestHead | None = None, values: Sequence[bytes] = (), body: bytes = b"") -> None:
        """`head`: the one that it has in common with earlier requests, with these values of the headers that differ.
        `body`: the beginning of its payload."""
        self.head = head
        self.method = ""
        self.target = b""
        self.headers: Headers = []
        self.trailers: Headers | tuple[()] = ()
        self.hops: frozenset[bytes] = frozenset()
        """Headers that its Connection header makes hop-by-hop (RFC 9110 §7.6.1)."""
        self.http10 = self.keep_alive = self.chunked = False
        if head is not None:
            self.method, self.target, self.hops, self.keep_alive = head.method, head.target, head.hops, True
            self.headers = headers = head.headers.copy()
            for value, (at, low, name) in zip(values, head.places, strict=True):
                headers[at] = low, name, value
        self.upgrade = self.websocket = False
        """True if the request asks for another protocol, and `websocket` if that is a WebSocket."""
        self.length = 0
        """The value of Content-Length."""
        self.size = len(body)
        """Payload bytes received."""
        self.chunks: list[int] | tuple[()] = ()
        """The offsets at which the client's chunks ended; at most `_CHUNKS` of them."""
        self.started = 0.0
        """Monotonic seconds at which its head was complete."""
        self.started_ns = 0
        """`started` on the clock of the tape, in nanoseconds."""
        self.refusal: Refusal | None = None
        """The reason why it cannot be served; None if it can."""
        self._pieces: list[bytes] = [body] if body else []
        self._gathered: bytearray | None = None

    def add(self, piece: bytes) -> None:
        """Appends payload. Pieces are joined when the request is whole, or before there are too many small ones."""
        self.size += len(piece)
        self._pieces.append(piece)
        if len(self._pieces) == _PIECES:
            self._gathered = self._gathered or bytearray()
            self._gathered += b"".join(self._pieces)
            self._pieces.clear()

    def end_chunk(self) -> None:
        """Notes the end of a chunk. Ends beyond an absurd number of chunks are forgotten."""
        self.chunks = self.chunks or []
        if len(self.chunks) < _CHUNKS:
            self.chunks.append(self.size)

    def body(self) -> bytes:
        """The payload without transfer framing. It is stored once, however often it is read."""
        if self._gathered:
            self._pieces = [bytes(self._gathered), *self._pieces]
            self._gathered = None
        if len(self._pieces) != 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0]
