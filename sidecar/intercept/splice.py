"""Two ends of a connection that get each other's bytes as they come, no faster than the other end accepts them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast


class End(asyncio.Protocol):
    """One of the two ends: a protocol whose bytes go to the other end."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: End | None = None
        self.received = 0
        """Bytes received."""
        self.lost = self.ended = False
        self.on_lost: Callable[[], None] | None = None
        """Called once, when the connection is lost."""
        self.room = 0
        """Bytes that may wait for the other end before reading stops; while it stops, the loss of this end is not
        noticed.
        """
        self._waiting: list[bytes] = []
        """Bytes that came before there was another end."""
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def join(self, other: End) -> None:
        """Connect the two ends: from now on the bytes of each go to the other."""
        self.other, other.other = other, self
        for one in (self, other):
            one.flush()
            one.go_on()
            if one.lost:
                one.connection_lost(None)

    def leave(self) -> None:
        """Part from the other end, and close that one."""
        other, self.other = self.other, None
        if other is not None:
            other.other = None
            if other.transport is not None:
                other.transport.close()

    def flush(self) -> None:
        """Pass on the bytes that have waited for the other end."""
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.pass_on(data)

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on, or keep them until there is another end."""
        self.received += len(data)
        if self.other is None:
            self._waiting.append(data)
            if self.received > self.room:
                self.hold()
        else:
            self.pass_on(data)

    def pass_on(self, data: bytes) -> None:
        """Write to the other end."""
        other = self.other
        if other is not None and other.transport is not None and not other.transport.is_closing():
            other.transport.write(data)

    def hold(self) -> None:
        """Stop reading for now."""
        if not self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def go_on(self) -> None:
        """Resume reading."""
        if self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        """Called when this end accepts less than the other sends."""
        if self.other is not None:
            self.other.hold()

    def resume_writing(self) -> None:
        """Called when this end has caught up."""
        if self.other is not None:
            self.other.go_on()

    def eof_received(self) -> bool:
        """Called when this end sends no more. Over plain TCP the other end is told, and its remaining bytes still
        pass.
        """
        self.ended, other = True, self.other
        if other is None or other.ended or other.transport is None or not other.transport.can_write_eof():
            return False
        other.transport.write_eof()
        return self.transport is not None and self.transport.can_write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when this end is gone: close the other one, after the bytes that were written to it."""
        first, self.lost = not self.lost, True
        if self.other is not None and self.other.transport is not None:
            if exc is None:
                self.other.transport.close()
            else:
                self.other.transport.abort()
        if first and self.on_lost is not None:
            self.on_lost()
