"""A raw socket end: the exact bytes that arrived, when, and how the other side went away.

`Wire` is one end of a TCP connection and serves both as the client of a test (`connect`) and, in `fakes.odd`, as the
upstream. Nothing is parsed and nothing is added, so a test reads like a transcript:

    async with connect(gateway.url) as client:
        client.send(post("/rollout/r1/attempt/a1/v1/chat/completions", b"{}"))
        await client.until(b"data: 1\\n\\n")
        client.abort()

Waiting is always for a condition; a peer that goes away, or a minute without it, fail the test with what had come.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from fakes.process import PATIENCE

Headers = Iterable[tuple[str, str]]


class Gone(AssertionError):
    """The peer went away, or stayed silent, before what the test waited for."""


class Wire(asyncio.Protocol):
    """One end of a connection."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.arrivals: list[tuple[float, bytes]] = []
        """Each read: `time.monotonic()` and its bytes."""
        self.end: Literal["open", "eof", "reset"] = "open"
        """How the peer left, if it did."""
        self.end_at: float | None = None
        self.lost = False
        """True once the connection is closed on this side too."""
        self._changed = asyncio.Event()
        self._seen = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.socket = cast(socket.socket, transport.get_extra_info("socket"))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.monotonic(), data))
        self.received += data
        self._changed.set()

    def eof_received(self) -> bool:
        self._ended("eof")
        return True  # stay open for writing: the script decides when this side closes

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._ended("reset")
        self.lost = True
        self._changed.set()

    def _ended(self, how: Literal["eof", "reset"]) -> None:
        self.end, self.end_at = how, time.monotonic()
        self._changed.set()

    async def when(self, condition: Callable[[], bool], patience: float = PATIENCE) -> None:
        """Wait until the condition holds; it is asked again whenever something happens on the wire."""
        try:
            async with asyncio.timeout(patience):
                while not condition():
                    if self.lost:
                        raise Gone(f"connection {self.end} after {bytes(self.received)!r}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Gone(f"nothing more within {patience} s ({self.end}) after {bytes(self.received)!r}") from None

    def send(self, data: bytes) -> None:
        """Write bytes."""
        self.transport.write(data)

    async def until(self, wanted: bytes) -> bytes:
        """Wait for these bytes after what was taken so far; take and return everything up to and including them."""
        await self.when(lambda: self.received.find(wanted, self._seen) >= 0 or self._stopped())
        at = self.received.find(wanted, self._seen)
        if at < 0:
            raise Gone(f"connection {self.end}; wanted {wanted!r} after {bytes(self.received)!r}")
        return self._take(at + len(wanted))

    async def exactly(self, size: int) -> bytes:
        """Wait for and take that many bytes."""
        await self.when(lambda: len(self.received) >= self._seen + size or self._stopped())
        if len(self.received) < self._seen + size:
            raise Gone(f"connection {self.end}; wanted {size} bytes after {bytes(self.received)!r}")
        return self._take(self._seen + size)

    async def message(self) -> bytes:
        """Take one whole HTTP message: head, and a body by its Content-Length, its chunks, or (a response) none."""
        head = await self.until(b"\r\n\r\n")
        fields = header_fields(head)
        if "chunked" in fields.get("transfer-encoding", ""):
            return head + await self._chunks()
        return head + await self.exactly(int(fields.get("content-length", "0")))

    async def _chunks(self) -> bytes:
        taken = b""
        while True:
            line = await self.until(b"\r\n")
            size = int(line.split(b";")[0], 16)
            if size == 0:
                return taken + line + await self._trailers()
            taken += line + await self.exactly(size + 2)

    async def _trailers(self) -> bytes:
        taken = b""
        while not taken.endswith(b"\r\n\r\n") and taken != b"\r\n":
            taken += await self.until(b"\r\n")
        return taken

    async def rest(self) -> bytes:
        """Wait for the peer to leave; take everything that came before it did."""
        await self.gone()
        return self._take(len(self.received))

    async def gone(self, patience: float = PATIENCE) -> Literal["open", "eof", "reset"]:
        """Wait for the peer to leave and say how it did."""
        await self.when(self._stopped, patience)
        return self.end

    def _stopped(self) -> bool:
        return self.end != "open" or self.lost

    def _take(self, end: int) -> bytes:
        taken, self._seen = bytes(self.received[self._seen : end]), end
        return taken

    def pause(self) -> None:
        """Read no more, so that the peer's writes pile up."""
        self.transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        self.transport.resume_reading()

    def half_close(self) -> None:
        """Say that nothing more will be sent; go on receiving."""
        self.transport.write_eof()

    def close(self) -> None:
        """Close in order, after what was written has been sent."""
        self.transport.close()

    def abort(self) -> None:
        """Break the connection off: the peer sees a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


@asynccontextmanager
async def connect(url: str, tls: ssl.SSLContext | None = None) -> AsyncGenerator[Wire]:
    """A connection to the host and port of a URL."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, wire = await loop.create_connection(Wire, str(parts.hostname), parts.port or 80, ssl=tls)
    try:
        yield wire
    finally:
        wire.transport.abort()
        await wire.when(lambda: wire.lost)


def header_fields(head: bytes) -> dict[str, str]:
    """Header fields of a head by lower-case name; of a repeated one the last."""
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name.lower(): value.strip() for name, _, value in pairs}


def head(first: str, headers: Headers = ()) -> bytes:
    """A start line and headers, in this order and spelling."""
    lines = [first, *(f"{name}: {value}" for name, value in headers)]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1")


def post(path: str, body: bytes, headers: Headers = (), host: str = "agent.test") -> bytes:
    """A POST of a body with its length."""
    own = [("Host", host), ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    return head(f"POST {path} HTTP/1.1", [*own, *headers]) + body


def get(path: str, headers: Headers = (), host: str = "agent.test") -> bytes:
    """A GET."""
    return head(f"GET {path} HTTP/1.1", [("Host", host), *headers])


def reply(status: int, body: bytes, headers: Headers = ()) -> bytes:
    """A response of a body with its length."""
    own = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    return head(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", [*own, *headers]) + body


def events_head(headers: Headers = ()) -> bytes:
    """The head of a chunked stream of events."""
    own = [("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked")]
    return head("HTTP/1.1 200 OK", [*own, *headers])


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; the empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def frame(first: int, payload: bytes = b"", mask: bytes = b"", long: bool = False) -> bytes:
    """A frame of a WebSocket; `first`: its first byte, `long`: its length takes eight bytes however small it is."""
    size = len(payload)
    kind, count = (127, 8) if long or size >= 1 << 16 else (126, 2) if size > 125 else (size, 0)
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload)) if mask else payload
    return bytes([first, kind | bool(mask) << 7]) + (size.to_bytes(count, "big") if count else b"") + mask + masked


def body_of(message: bytes) -> bytes:
    """The body of a whole message, chunks joined."""
    start, _, body = message.partition(b"\r\n\r\n")
    if "chunked" not in header_fields(start + b"\r\n").get("transfer-encoding", ""):
        return body
    joined = b""
    while not body.startswith(b"0\r\n"):
        line, _, rest = body.partition(b"\r\n")
        size = int(line.split(b";")[0], 16)
        joined, body = joined + rest[:size], rest[size + 2 :]
    return joined


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    """What is said of the error in an answer with this status."""
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    return json.loads(body_of(answer))["error"]
