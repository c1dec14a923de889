"""A client's connection: one call at a time, with as little of HTTP/1.1 as a soak needs."""

from __future__ import annotations

import asyncio
import random
import zlib
from typing import cast

from bench.soak.answers import ENDS
from bench.soak.kinds import Kind, Seen

PATIENCE_S = 60.0
LEAVES_S = 0.02, 0.4
"""Seconds after which a client leaves that waits for an answer, at random in this range: the call may be announced on
the tape by then, or not."""
_END = b"\r\n\r\n"


class Line(asyncio.Protocol):
    """Connects when needed; a broken or left connection is not used again."""

    def __init__(self, port: int, chance: random.Random) -> None:
        self._port, self._chance = port, chance
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] = self._loop.create_future()
        self._received = bytearray()
        self._kind = Kind("")
        self._begun = self._whole = 0
        """Begin of the body, and length of the whole answer; 0: not known yet, -1: it is chunked."""

    async def call(self, kind: Kind, request: bytes, name: bytes) -> Seen:
        """Make a call; return the client's observation."""
        if self._transport is None:
            try:
                await self._loop.create_connection(lambda: self, "127.0.0.1", self._port)
            except OSError:
                return Seen.UNSENT
        assert self._transport is not None
        self._kind, self._begun, self._whole, self._waiter = kind, 0, 0, self._loop.create_future()
        self._received.clear()
        seconds = self._chance.uniform(*LEAVES_S) if kind.leaves == "before" else PATIENCE_S
        timer = self._loop.call_later(seconds, self._wake)
        self._transport.write(request)
        await self._waiter
        timer.cancel()
        return self._seen(name)

    def _seen(self, name: bytes) -> Seen:
        if self._is_whole():
            return self._judged(name)
        broken = self._transport is None
        self.close()
        return Seen.LEFT if self._kind.leaves and not broken else Seen.BROKEN

    def _judged(self, name: bytes) -> Seen:
        head, body = self._received[: self._begun], self._received[self._begun :]
        if b"\r\nconnection: close" in head.lower():
            self.close()
        if not head.startswith(b"HTTP/1.1 2"):
            return Seen.REFUSED
        if b"\r\ncontent-encoding: gzip" in head.lower():
            body = zlib.decompress(dechunked(body), wbits=31)
        ended = not self._kind.stream or any(end in body[-1024:] or end in body for end in ENDS)
        return Seen.ANSWERED if ended and name in body else Seen.WRONG

    def close(self) -> None:
        """Close the connection: the next call needs another."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._begun and (at := self._received.find(_END)) >= 0:
            self._begun = at + 4
            head = bytes(self._received[:at]).lower()
            _, found, length = head.partition(b"\r\ncontent-length:")
            self._whole = self._begun + int(length.split(b"\r\n", 1)[0]) if found else -1
        enough = self._kind.leaves == "middle" and self._begun and len(self._received) > self._begun
        if enough or self._is_whole():
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the present connection; that of a connection left earlier changes nothing."""
        if self._transport is not None and self._transport.is_closing():
            self._transport = None
            self._wake()

    def _is_whole(self) -> bool:
        if self._whole < 0:
            return self._received.endswith(b"\r\n0\r\n\r\n")
        return 0 < self._whole <= len(self._received)

    def _wake(self) -> None:
        if not self._waiter.done():
            self._waiter.set_result(None)


def dechunked(body: bytes | bytearray) -> bytes:
    """Return the data of chunks."""
    at, found = 0, list[bytes]()
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if size == 0:
            return b"".join(found)
        found.append(bytes(body[end + 2 : end + 2 + size]))
        at = end + size + 4
