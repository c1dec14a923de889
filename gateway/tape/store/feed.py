"""The change cursor and its wake-ups: followers sleep until a commit has changes that they want."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from penstock.gateway.tape.store.view import ChangeFilter, TapeView


class ChangeFeed:
    """The newest cursor of the log. The recorder wakes it after every commit, on the loop."""

    def __init__(self, cursor: int) -> None:
        self.cursor = cursor
        self._moved = asyncio.Event()
        self._watches: set[FeedSubscription] = set()

    def committed(self, cursor: int, records: Sequence[bytes] = ()) -> None:
        """Wake the followers: everything up to `cursor` is durable. `records`: the records added to the log since. A
        commit of which the log does not tell wakes nobody."""
        before, self.cursor = self.cursor, cursor
        if cursor == before:
            return
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        for watch in self._watches:
            watch.notify(before, cursor, records)

    async def wait(self, since: int) -> int:
        """Return the newest cursor once it is beyond `since`."""
        while self.cursor <= since:
            await self._moved.wait()
        return self.cursor

    @contextmanager
    def subscribe(self, wanted: ChangeFilter) -> Generator[FeedSubscription]:
        """Register a follower of the changes in `wanted`."""
        watch = FeedSubscription(self, wanted)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)


class FeedSubscription:
    """A follower of the feed. Commits that do not concern it only move its cursor while it sleeps."""

    def __init__(self, feed: ChangeFeed, wanted: ChangeFilter) -> None:
        self._feed, self._wanted = feed, wanted
        self.passed = 0
        """The cursor up to which it needs nothing."""
        self._news = asyncio.Event()

    def notify(self, before: int, cursor: int, records: Sequence[bytes]) -> None:
        """Take a commit that moved the feed from the cursor `before` to `cursor`."""
        if self.passed == before and not any(map(self._wanted.matches, records)):
            self.passed = cursor
        else:
            self._news.set()

    async def wait(self, since: int) -> int:
        """Wait until there may be a wanted change after `since`, and return the cursor to go on from."""
        self.passed = max(self.passed, since)
        while self._feed.cursor <= self.passed:
            self._news.clear()
            await self._news.wait()
        return self.passed


# Followers: copies of parts of the tape in memory, which save other packages reads. The writer keeps them up to date.


class Follower(Protocol):
    """State in memory that equals a part of the tape. Operations change both, so it may be a moment ahead of the
    tape."""

    def recall(self, view: TapeView) -> None:
        """Read everything back from the tape: it was opened, or a transaction has failed."""
        ...

    def follow(self, view: TapeView, changes: Sequence[bytes]) -> None:
        """Read back what other processes have written since. `changes`: the records that they have added to the log;
        none of these has been wiped."""
        ...
