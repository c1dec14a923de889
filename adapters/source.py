"""Episodes from a gateway, through its control API, with bounded memory.

    async for episode in load(client, client.rollouts("mode:train group:q1 status:ended")): ...

    ended, cursor = await changed(client, cursor, Query(mode="train"))     # what is new since the last time
    async for episode in load(client, ended): ...

Episodes come in the order of their rollouts; at most `AHEAD` of them are being read or wait to be taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from penstock.adapters.turns import Bodies, Episode, read
from penstock.gateway.client.client import Client
from penstock.gateway.model.base import Mode
from penstock.gateway.model.rollout import RolloutStatus, RolloutSummary

AHEAD: Final = 4
"""Rollouts that are read at a time."""
PAGE: Final = 1000
ENDED: Final = frozenset({RolloutStatus.SUCCEEDED, RolloutStatus.FAILED, RolloutStatus.CANCELLED})


@dataclass(frozen=True, slots=True)
class Query:
    """Which rollouts are wanted."""

    mode: Mode | None = None
    """What they are for."""
    group: str | None = None
    """The task they repeat."""
    status: frozenset[RolloutStatus] | None = ENDED
    """Where they stand; None wherever. Those that never came from the queue end when they are quiet."""

    def wants(self, rollout: RolloutSummary) -> bool:
        """True for a rollout that is wanted."""
        return (
            self.mode in (None, rollout.mode)
            and self.group in (None, rollout.group)
            and (self.status is None or rollout.status in self.status)
        )


async def changed(client: Client, since: int, query: Query | None = None) -> tuple[list[RolloutSummary], int]:
    """Rollouts that have changed after the cursor `since`, as they are now, and the cursor to go on from. Late rewards
    and calls are changes too: a rollout may come again. Raises ClientError.
    """
    names: dict[str, None] = {}
    while True:
        page = await client.change_page(since, PAGE)
        for change in page.changes:
            for noun in (change.span, change.attempt):
                names |= {noun.rollout: None} if noun is not None else {}
            names |= {change.rollout.id: None} if change.rollout is not None else {}
        if page.next == since:
            break
        since = page.next
    found = [await client.rollout(name) for name in names]
    return [rollout for rollout in found if (query or Query()).wants(rollout)], since


async def load(
    client: Client, rollouts: AsyncIterable[RolloutSummary] | Iterable[RolloutSummary]
) -> AsyncGenerator[Episode]:
    """Each rollout, read with the bytes of its calls. Raises ClientError; then what was under way is cancelled."""
    ahead: deque[asyncio.Task[Episode]] = deque()
    try:
        async for rollout in _each(rollouts):
            ahead.append(asyncio.ensure_future(one(client, rollout)))
            if len(ahead) >= AHEAD:
                yield await ahead.popleft()
        while ahead:
            yield await ahead.popleft()
    finally:
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)


async def one(client: Client, rollout: RolloutSummary) -> Episode:
    """One rollout. Calls of which no bytes are stored (any more) have none. Raises ClientError."""
    spans = [span async for span in client.spans(rollout.id, filter="kind:llm,tool,reward")]
    bodies: dict[tuple[str, int], Bodies] = {}
    async with aclosing(client.exchanges(rollout.id)) as recorded:
        async for call in recorded:
            bodies[call.attempt, call.sequence] = call.request, call.response
    return read(rollout, spans, lambda span: bodies.get((span.attempt, span.sequence)))


async def _each(rollouts: AsyncIterable[RolloutSummary] | Iterable[RolloutSummary]) -> AsyncIterator[RolloutSummary]:
    if isinstance(rollouts, AsyncIterable):
        async for rollout in rollouts:
            yield rollout
    else:
        for rollout in rollouts:
            yield rollout
