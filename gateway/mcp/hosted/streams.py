"""What a process has said and a client has not read yet."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from penstock.gateway.dialects.mcp import Sent

_FULL: Final = 1 << 20
"""Bytes that wait, from which on the process is read no further."""
_WAITING, _WAITING_BYTES = 1000, 8 << 20
"""Messages, and bytes, that wait for somebody to listen."""


class Stream:
    """Lines on their way to one client. `next` gives them in order."""

    def __init__(self) -> None:
        self.attached = False
        """Whether a client is there to read them."""
        self.dropped = 0
        """Lines that were dropped, because too many waited for somebody to listen."""
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def last(self) -> bool:
        """Whether nothing comes after what `next` has given."""
        return self._ended and not self._lines

    def put(self, line: bytes) -> None:
        """Adds a line."""
        self._lines.append(line)
        self._size += len(line)
        if self._size > _FULL:
            self._room.clear()
        self._changed.set()

    def end(self) -> None:
        """No more follow."""
        self._ended = True
        self._room.set()
        self._changed.set()

    async def next(self) -> bytes | None:
        """The next line; None when there is none any more."""
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

    async def room(self) -> None:
        """Waits for a client that is slow. One that is not there does not count."""
        if self.attached:
            await self._room.wait()
        else:
            while len(self._lines) > _WAITING or (self._size > _WAITING_BYTES and len(self._lines) > 1):
                self._size -= len(self._lines.popleft())
                self.dropped += 1

    def leave(self) -> None:
        """The client has gone."""
        self.attached = False
        self._room.set()

    def take_over(self, other: Stream) -> None:
        """Takes what waits in another one, which ends."""
        for line in other._lines:
            self.put(line)
        other._lines.clear()
        other.end()


class Exchange(Stream):
    """Requests of a client, in one POST, and what belongs to them."""

    def __init__(self, asks: list[Sent], tokens: set[bytes], listens: bool) -> None:
        """`tokens`: those under which it wants to hear of progress; `listens`: its answer never ends."""
        super().__init__()
        self.asks, self.tokens, self.listens = asks, tokens, listens
        self.attached = True
        self.waiting = {one.id for one in asks}
        """Ids that are not answered."""
        self.over = asyncio.Event()
        """Its ids may be used again."""

    def answered(self, id: bytes) -> None:
        """One of its requests is answered: the last one ends it."""
        self.waiting.discard(id)
        if not self.waiting:
            self.end()
            self.over.set()
