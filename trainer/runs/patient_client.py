"""A client that waits for a gateway that is away: a gateway restarts in a moment, and a run must survive that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, TypeVar

from penstock.gateway.client.client import Client, ClientError, Recorded
from penstock.gateway.client.connection import Params

T = TypeVar("T")

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
PATIENCE_S: Final = 600.0
"""How long a gateway may be away before the run stops; it can be resumed."""


class Patient(Client):
    """The typed client; all its requests are safe to send again."""

    async def read(self, method: str, path: str, params: Params | None = None, body: str | None = None) -> bytes:
        """The bytes of a good answer, as soon as the gateway gives one. Raises ClientError when it refuses, or is away
        for too long."""
        ask = super().read
        return await self._patiently(lambda: ask(method, path, params, body))

    async def exchanges(self, rollout: str, of: str | None = None) -> AsyncGenerator[Recorded]:
        """See `Client.exchanges`. They are given when all are there: a gateway that goes away among them gives the
        first ones twice."""
        ask = super().exchanges

        async def every() -> list[Recorded]:
            return [call async for call in ask(rollout, of)]

        for call in await self._patiently(every):
            yield call

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        clock = asyncio.get_running_loop().time
        pause, end = FIRST_PAUSE_S, clock() + PATIENCE_S
        while True:
            try:
                return await ask()
            except ClientError as error:
                if not error.temporary or clock() + pause > end:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
