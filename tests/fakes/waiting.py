"""Waiting for what becomes true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE_S = 60.0
T = TypeVar("T")


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Comes back as soon as it holds."""

    async def ask() -> bool:
        found = condition()
        return found if isinstance(found, bool) else await found

    _ = await when(ask, bool, getattr(condition, "__qualname__", repr(condition)))


async def when(ask: Callable[[], Awaitable[T]], wanted: Callable[[T], bool], what: str = "the answer") -> T:
    """What is answered, as soon as it is as wanted; fails with what was answered last."""
    found: T | None = None
    limit = asyncio.timeout(PATIENCE_S)
    try:
        async with limit:
            while not wanted(found := await ask()):  # noqa: ASYNC110 - whoever is asked tells nobody
                await asyncio.sleep(0.02)
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
