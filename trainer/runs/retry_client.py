"""A client that waits for a gateway that is away: a gateway restarts in a moment, and a run must survive that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import Params
from penstock.gateway.client.exchanges import WholeRollout
from penstock.gateway.model.base import SpanKind
from penstock.gateway.model.times import Backoff

T = TypeVar("T")

PAUSES: Final = Backoff(0.1, 5.0)
MOST_BROKEN: Final = 8
"""Most times that an answer of a gateway that is there may break off at one place."""
PATIENCE_S: Final = 600.0
"""Seconds that a gateway may be away before the run stops; it can be resumed."""


class RetryClient(Client):
    """The typed client, with retries; all its requests are safe to send again."""

    async def read(self, method: str, path: str, params: Params | None = None, body: str | None = None) -> bytes:
        """Return the body of a successful answer, waiting for the gateway. Raises ClientError when it refuses, or is
        away for too long."""
        ask = super().read
        return await self._patiently(lambda: ask(method, path, params, body))

    async def whole_rollouts(self, ids: Sequence[str], kinds: Sequence[SpanKind] = ()) -> AsyncGenerator[WholeRollout]:
        """See `Client.whole_rollouts`. When the gateway goes away in between, the remaining rollouts are requested
        again."""
        given, broken = 0, 0
        while given < len(ids):
            try:
                async with aclosing(super().whole_rollouts(ids[given:], kinds)) as found:
                    async for whole in found:
                        given, broken = given + 1, 0
                        yield whole
            except ClientError as error:
                broken += 1
                if not error.temporary or broken > MOST_BROKEN:
                    raise
                # This request waits until the gateway is back.
                _ = await self.stats(spans=0)

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        clock = asyncio.get_running_loop().time
        failures, end = 0, clock() + PATIENCE_S
        while True:
            try:
                return await ask()
            except ClientError as error:
                failures += 1
                if not error.temporary or clock() + PAUSES.after(failures) > end:
                    raise
            await asyncio.sleep(PAUSES.after(failures))
