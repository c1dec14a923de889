"""The change cursor and its wake-ups: followers sleep until a commit has passed them."""

from __future__ import annotations

import asyncio


class Feed:
    """Woken by the recorder after every commit, on the loop."""

    def __init__(self, cursor: int) -> None:
        self.cursor = cursor
        self._moved = asyncio.Event()

    def committed(self, cursor: int) -> None:
        """Everything up to `cursor` is durable: wake who waits."""
        self.cursor = cursor
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def wait(self, since: int) -> int:
        """Returns the newest cursor once it is beyond `since`."""
        while self.cursor <= since:
            await self._moved.wait()
        return self.cursor
