"""Waiting for what becomes true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PATIENCE_S = 60.0


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Comes back as soon as it holds."""
    limit = asyncio.timeout(PATIENCE_S)
    try:
        async with limit:
            while True:
                found = condition()
                if found if isinstance(found, bool) else await found:
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        if not limit.expired():  # the condition's own
            raise
        name = getattr(condition, "__qualname__", repr(condition))
        raise AssertionError(f"after {PATIENCE_S:g} s it does not hold: {name}") from None
