"""Waiting for what becomes true."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE_S, PAUSE_S = float(os.environ.get("PATIENCE_S", "60")), 0.02
T = TypeVar("T")


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Comes back as soon as it holds."""

    async def ask() -> bool:
        found = condition()
        return found if isinstance(found, bool) else await found

    _ = await when(ask, bool, getattr(condition, "__qualname__", repr(condition)))


async def when(
    ask: Callable[[], Awaitable[T]], wanted: Callable[[T], bool], what: str = "the answer", pause_s: float = PAUSE_S
) -> T:
    """What is answered, as soon as it is as wanted; fails with what was answered last. `pause_s`: the longest between
    two questions, where they cost much."""
    found: T | None = None
    pause = PAUSE_S / 4
    limit = asyncio.timeout(PATIENCE_S)
    try:
        async with limit:
            while not wanted(found := await ask()):
                await asyncio.sleep(pause)
                pause = min(1.5 * pause, pause_s)
            return found
    except TimeoutError:
        if not limit.expired():  # the question's own
            raise
        raise AssertionError(f"after {PATIENCE_S:g} s {what} is {found!r}") from None


class News:
    """Tells those who wait for a condition that it may hold now."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Something has happened."""
        self._event.set()

    async def until(
        self, condition: Callable[[], bool], state: Callable[[], object] = str, patience_s: float | None = PATIENCE_S
    ) -> None:
        """Comes back as soon as it holds; fails with the state that there is instead."""
        try:
            async with asyncio.timeout(patience_s):
                while not condition():
                    self._event.clear()
                    await self._event.wait()
        except TimeoutError:
            raise AssertionError(f"it is not so, but: {state()}") from None
