"""Waiting for what becomes true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PATIENCE_S = 60.0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Comes back as soon as it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)
