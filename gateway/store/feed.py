"""The change cursor and its wake-ups: followers sleep until a commit has passed them, or has what they want."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from penstock.gateway.store.wanted import Wanted


class Feed:
    """Woken by the recorder after every commit, on the loop."""

    def __init__(self, cursor: int) -> None:
        self.cursor = cursor
        self._moved = asyncio.Event()
        self._watches: set[Watch] = set()

    def committed(self, cursor: int, records: Sequence[bytes] = ()) -> None:
        """Everything up to `cursor` is durable: wake who waits. `records`: what the log has got since."""
        before, self.cursor = self.cursor, cursor
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        for watch in self._watches:
            watch.note(before, cursor, records)

    async def wait(self, since: int) -> int:
        """Returns the newest cursor once it is beyond `since`."""
        while self.cursor <= since:
            await self._moved.wait()
        return self.cursor

    @contextmanager
    def watching(self, wanted: Wanted) -> Generator[Watch]:
        """A follower of what is wanted."""
        watch = Watch(self, wanted)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)


class Watch:
    """One follower. While it sleeps, commits that do not concern it only move its place."""

    def __init__(self, feed: Feed, wanted: Wanted) -> None:
        self._feed, self._wanted = feed, wanted
        self.passed = 0
        """It needs nothing up to here."""
        self._news = asyncio.Event()

    def note(self, before: int, cursor: int, records: Sequence[bytes]) -> None:
        """The feed went from one cursor to another."""
        if self.passed == before and not any(map(self._wanted.concerns, records)):
            self.passed = cursor
        else:
            self._news.set()

    async def wait(self, since: int) -> int:
        """The follower has seen all up to `since`. Returns where it goes on, once there may be something for it."""
        self.passed = max(self.passed, since)
        while self._feed.cursor <= self.passed:
            self._news.clear()
            await self._news.wait()
        return self.passed
