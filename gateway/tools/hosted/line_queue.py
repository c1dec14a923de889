"""Lines that a process has written and a client has not read yet."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from penstock.gateway.wire.dialects.mcp import JsonRpcMessage

_FULL: Final = 1 << 20
"""Waiting bytes above which the process is read no further."""
_WAITING, _WAITING_BYTES = 1000, 8 << 20
"""Most messages, and bytes, that wait while no client listens."""


class LineQueue:
    """Lines for one client. `next` returns them in order."""

    def __init__(self) -> None:
        self.attached = False
        """True if a client reads them."""
        self.dropped = 0
        """Lines that were dropped because too many waited while no client listened."""
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def at_end(self) -> bool:
        """True if no line follows those that `next` has returned."""
        return self._ended and not self._lines

    def put(self, line: bytes) -> None:
        self._lines.append(line)
        self._size += len(line)
        if self._size > _FULL:
            self._room.clear()
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._room.set()
        self._changed.set()

    async def next(self) -> bytes | None:
        """Returns the next line, waiting for it; None at the end of the stream."""
        while not self._lines:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        line = self._lines.popleft()
        self._size -= len(line)
        if self._size <= _FULL:
            self._room.set()
        return line

    async def wait_for_room(self) -> None:
        """Waits for a slow client. Without a client, drops the oldest lines above the limit."""
        if self.attached:
            await self._room.wait()
        else:
            while len(self._lines) > _WAITING or (self._size > _WAITING_BYTES and len(self._lines) > 1):
                self._size -= len(self._lines.popleft())
                self.dropped += 1

    def detach(self) -> None:
        """Called when the client has left."""
        self.attached = False
        self._room.set()

    def take_over(self, other: LineQueue) -> None:
        """Takes the waiting lines of another stream and ends that."""
        for line in other._lines:
            self.put(line)
        other._lines.clear()
        other.end()


class PostExchange(LineQueue):
    """The requests of a client in one POST, and the lines that belong to them."""

    def __init__(self, asks: list[JsonRpcMessage], tokens: set[bytes], listens: bool) -> None:
        """`tokens`: its progress tokens; `listens`: True if its answer is an endless stream."""
        super().__init__()
        self.requests, self.tokens, self.listens = asks, tokens, listens
        self.attached = True
        self.waiting = {one.id for one in asks}
        """Ids that are not answered."""
        self.over = asyncio.Event()
        """Set when its ids may be used again."""

    def answered(self, id: bytes) -> None:
        """Removes an answered request; the last one ends the exchange."""
        self.waiting.discard(id)
        if not self.waiting:
            self.end()
            self.over.set()
