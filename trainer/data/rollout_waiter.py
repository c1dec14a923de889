"""Waits for rollouts to end: the gateway's change feed says when. Those that do not end in time are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

from penstock.adapters.source import ENDED
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.queue import MOST_ROLLOUTS, RolloutSpec
from penstock.gateway.model.rollout import RolloutStatus

ENDED_ALREADY: Final = 409
FORGOTTEN: Final = 404


class RolloutWaiter:
    """Rollouts that were queued and are waited for. `run` must run beside it: it follows the gateway's changes."""

    def __init__(self, client: Client, names: Sequence[str] = ()) -> None:
        """`names`: patterns that all rollout ids match, such as RUN-*; every rollout when empty."""
        self._client, self._names = client, names
        self._waiting: dict[str, RolloutStatus] = {}
        """Newest known status by rollout id."""
        self._news = asyncio.Condition()
        self._follows = asyncio.Event()

    async def run(self) -> None:
        """Follows the changes of rollouts, for ever."""
        cursor = (await self._client.stats(spans=0)).cursor
        self._follows.set()
        async with aclosing(self._client.changes(cursor, ["rollout"], self._names, ENDED)) as changes:
            async for change in changes:
                if change.rollout is not None and change.rollout.id in self._waiting:
                    await self._note(change.rollout.id, change.rollout.status)

    async def _note(self, name: str, status: RolloutStatus) -> None:
        async with self._news:
            self._waiting[name] = status
            self._news.notify_all()

    async def enqueue(self, specs: Sequence[RolloutSpec]) -> None:
        """Queue rollouts, which must have names. One that is queued already is not queued again, and may have ended."""
        # Follow the changes first: a rollout that ends at once must not be missed.
        await self._follows.wait()
        self._waiting |= {spec.id or "": RolloutStatus.QUEUING for spec in specs}
        for start in range(0, len(specs), MOST_ROLLOUTS):
            for queued in await self._client.enqueue(specs[start : start + MOST_ROLLOUTS]):
                if queued.status in ENDED:
                    await self._note(queued.id, queued.status)

    async def wait_for(self, names: Sequence[str], timeout_s: float) -> int:
        """Wait until all have ended. Those that have not ended after `timeout_s` are cancelled; return how many."""
        late, left = list[str](), self._open(names)

        def over() -> bool:
            # Each rollout is checked once per wake-up at most: there may be very many rollouts and changes.
            while left and not self._open(left[-1:]):
                left.pop()
            return not left

        try:
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(over)
        except TimeoutError:
            late = [name for name in self._open(names) if await self._cancel(name)]
        return len(late)

    def pending(self) -> int:
        """Return how many awaited rollouts have not ended."""
        return len(self._open(list(self._waiting)))

    def forget(self, names: Sequence[str]) -> None:
        """Stop waiting for these rollouts."""
        for name in names:
            self._waiting.pop(name, None)

    def _open(self, names: Sequence[str]) -> list[str]:
        # Another caller may have awaited the same rollout and forgotten it since.
        return [name for name in dict.fromkeys(names) if name in self._waiting and self._waiting[name] not in ENDED]

    async def _cancel(self, name: str) -> bool:
        """Cancel a rollout. False if it had ended already and the change feed has not said so yet."""
        try:
            await self._note(name, (await self._client.cancel(name)).status)
        except ClientError as error:
            if error.status not in (ENDED_ALREADY, FORGOTTEN):
                raise
            return error.status == FORGOTTEN
        return True
