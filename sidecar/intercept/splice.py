"""Two ends of a connection that get each other's bytes as they come, no faster than the other end accepts them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast


class SpliceEnd(asyncio.Protocol):
    """One of the two ends: a protocol whose bytes go to the other end."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.peer: SpliceEnd | None = None
        self.received = 0
        """Bytes received."""
        self.lost = self.ended = False
        self.on_lost: Callable[[], None] | None = None
        """Called once, when the connection is lost."""
        self.buffer_limit = 0
        """Bytes that may wait for the other end before reading stops; while it stops, the loss of this end is not
        noticed.
        """
        self._waiting: list[bytes] = []
        """Bytes that came before there was another end."""
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def join(self, other: SpliceEnd) -> None:
        """Connect the two ends: from now on the bytes of each go to the other."""
        self.peer, other.peer = other, self
        for one in (self, other):
            one.flush()
            one.resume_reading()
            if one.lost:
                one.connection_lost(None)

    def detach(self) -> None:
        """Part from the other end, and close that one."""
        other, self.peer = self.peer, None
        if other is not None:
            other.peer = None
            if other.transport is not None:
                other.transport.close()

    def flush(self) -> None:
        """Pass on the bytes that have waited for the other end."""
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.forward(data)

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on, or keep them until there is another end."""
        self.received += len(data)
        if self.peer is None:
            self._waiting.append(data)
            if self.received > self.buffer_limit:
                self.pause_reading()
        else:
            self.forward(data)

    def forward(self, data: bytes) -> None:
        """Write to the other end."""
        other = self.peer
        if other is not None and other.transport is not None and not other.transport.is_closing():
            other.transport.write(data)

    def pause_reading(self) -> None:
        """Stop reading until `resume_reading`; no effect on a closing transport."""
        if not self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again after `pause_reading`; no effect otherwise."""
        if self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        """Called when this end accepts less than the other sends."""
        if self.peer is not None:
            self.peer.pause_reading()

    def resume_writing(self) -> None:
        """Called when this end has caught up."""
        if self.peer is not None:
            self.peer.resume_reading()

    def eof_received(self) -> bool:
        """Called when this end sends no more. Over plain TCP the other end is told, and its remaining bytes still
        pass.
        """
        self.ended, other = True, self.peer
        if other is None or other.ended or other.transport is None or not other.transport.can_write_eof():
            return False
        other.transport.write_eof()
        return self.transport is not None and self.transport.can_write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when this end is gone: close the other one, after the bytes that were written to it."""
        first, self.lost = not self.lost, True
        if self.peer is not None and self.peer.transport is not None:
            if exc is None:
                self.peer.transport.close()
            else:
                self.peer.transport.abort()
        if first and self.on_lost is not None:
            self.on_lost()
