"""Two ends of a connection that get each other's bytes as they come, no faster than the other takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast


class End(asyncio.Protocol):
    """One of the two ends."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: End | None = None
        self.received = 0
        """Bytes that came."""
        self.lost = self.ended = False
        self.on_lost: Callable[[], None] | None = None
        """Called once, when it is gone."""
        self.room = 0
        """Bytes that may wait for the other end before nothing more is read, and nobody sees that this one leaves."""
        self._waiting: list[bytes] = []
        """What came before there was another end."""
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        self.transport = cast(asyncio.Transport, transport)

    def join(self, other: End) -> None:
        """From now on the bytes of each go to the other."""
        self.other, other.other = other, self
        for one in (self, other):
            one.flush()
            one.go_on()
            if one.lost:
                one.connection_lost(None)

    def leave(self) -> None:
        """Parts from the other end, which closes."""
        other, self.other = self.other, None
        if other is not None:
            other.other = None
            if other.transport is not None:
                other.transport.close()

    def flush(self) -> None:
        """Passes on what has waited for the other end."""
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.pass_on(data)

    def data_received(self, data: bytes) -> None:
        """Passes it on."""
        self.received += len(data)
        if self.other is None:
            self._waiting.append(data)
            if self.received > self.room:
                self.hold()
        else:
            self.pass_on(data)

    def pass_on(self, data: bytes) -> None:
        """Writes to the other end."""
        other = self.other
        if other is not None and other.transport is not None and not other.transport.is_closing():
            other.transport.write(data)

    def hold(self) -> None:
        """Nothing more is read for now."""
        if not self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def go_on(self) -> None:
        """Reads again."""
        if self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        """It takes less than the other sends."""
        if self.other is not None:
            self.other.hold()

    def resume_writing(self) -> None:
        """It has caught up."""
        if self.other is not None:
            self.other.go_on()

    def eof_received(self) -> bool:
        """It sends no more. Over plain TCP the other is told, and what it still has to say passes."""
        self.ended, other = True, self.other
        if other is None or other.ended or other.transport is None or not other.transport.can_write_eof():
            return False
        other.transport.write_eof()
        return self.transport is not None and self.transport.can_write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone: so is the other, once it has taken what was written."""
        first, self.lost = not self.lost, True
        if self.other is not None and self.other.transport is not None:
            if exc is None:
                self.other.transport.close()
            else:
                self.other.transport.abort()
        if first and self.on_lost is not None:
            self.on_lost()
