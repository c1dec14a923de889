"""Episodes from a gateway, through its control API, with bounded memory.

    async for episode in load(client, client.rollouts("mode:train group:q1 status:ended")): ...

    ended, cursor = await changed(client, cursor, Query(mode="train"))     # what is new since the last time
    async for episode in load(client, ended): ...

    async for episode in load(client, await by_group(listed(client, "mode:train"))): ...    # a group after the other

Episodes come in the order of their rollouts. `AT_ONCE` of them are asked for in one request, whose answer is read as
they are taken: one episode is held in memory, besides what stands on the wire.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from penstock.adapters.turns import Episode, read
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.exchanges import WholeRollout
from penstock.gateway.model.base import Kind, Mode
from penstock.gateway.model.rollout import RolloutStatus, RolloutSummary

AT_ONCE: Final = 100
"""Rollouts of one request."""
KINDS: Final[tuple[Kind, ...]] = ("llm", "tool", "reward")
"""Spans that episodes are made of."""
PAGE: Final = 1000
NOT_FOUND: Final = 404
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


async def listed(client: Client, filter: str = "") -> AsyncGenerator[RolloutSummary]:
    """Rollouts, newest first, without their tasks and metadata, which may be large and come with episodes again."""
    cursor = None
    while True:
        page = await client.rollout_page(filter, PAGE, cursor)
        for rollout in page.rollouts:
            yield rollout
        cursor = page.next
        if cursor is None:
            return


async def by_group(rollouts: AsyncIterable[RolloutSummary]) -> list[str]:
    """The names of all of them, those of a group one after the other: groups, and rollouts in them, as they came."""
    groups: dict[str, list[str]] = {}
    async for rollout in rollouts:
        groups.setdefault(rollout.group or rollout.id, []).append(rollout.id)
    return [name for names in groups.values() for name in names]


async def load(
    client: Client,
    rollouts: AsyncIterable[RolloutSummary] | Iterable[RolloutSummary | str],
    gone: Callable[[str], None] | None = None,
) -> AsyncGenerator[Episode]:
    """Each rollout, or that of this name, as it is now, read with the bytes of its calls. Calls of which no bytes are
    stored (any more) have none. Raises ClientError, also when there is no such rollout, unless `gone` is there to be
    told of it: a long list may be read for longer than retention keeps what is at its end.
    """
    async for names in _batches(rollouts):
        left = names
        while left:
            try:
                async with aclosing(client.whole_rollouts(left, KINDS)) as found:
                    async for whole in found:
                        episode, left = episode_of(whole), left[1:]
                        # Nobody holds it while the next one comes.
                        del whole
                        yield episode
                        del episode
                break
            except ClientError as error:
                there = {one.id for one in await client.rollouts_by_id(left)} if error.status == NOT_FOUND else {*left}
                if gone is None or there.issuperset(left):
                    raise
                for name in left:
                    if name not in there:
                        gone(name)
                left = [name for name in left if name in there]


def episode_of(whole: WholeRollout) -> Episode:
    """A rollout, read."""
    bodies = {(call.attempt, call.sequence): (call.request, call.response) for call in whole.calls}
    return read(whole.rollout, whole.spans, lambda span: bodies.get((span.attempt, span.sequence)))


async def _batches(
    rollouts: AsyncIterable[RolloutSummary] | Iterable[RolloutSummary | str],
) -> AsyncIterator[list[str]]:
    """Their names, as many as one request takes."""
    names: list[str] = []
    async for rollout in _each(rollouts):
        names.append(rollout if isinstance(rollout, str) else rollout.id)
        if len(names) >= AT_ONCE:
            yield names
            names = []
    if names:
        yield names


async def _each(
    rollouts: AsyncIterable[RolloutSummary] | Iterable[RolloutSummary | str],
) -> AsyncIterator[RolloutSummary | str]:
    if isinstance(rollouts, AsyncIterable):
        async for rollout in rollouts:
            yield rollout
    else:
        for rollout in rollouts:
            yield rollout
