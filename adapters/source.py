"""Episodes from a gateway, through its control API, with bounded memory.

    async for episode in load(client, client.rollouts("mode:train group:q1 status:over")): ...

    ended, cursor = await changed(client, cursor, Query(mode="train"))     # what is new since the last time
    async for episode in load(client, ended): ...

    async for episode in load(client, await by_group(listed(client, "mode:train"))): ...    # a group after the other

Episodes come in the order of their rollouts. One request asks for `AT_ONCE` of them, and its answer is read as they are
taken: one episode is held in memory, besides the bytes in transit.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from penstock.adapters.episode import Episode, read_episode
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.exchanges import WholeRollout
from penstock.gateway.model.base import Mode, SpanKind
from penstock.gateway.model.rollout import FINAL, RolloutStatus, RolloutSummary

AT_ONCE: Final = 100
"""The most rollouts of one request."""
KINDS: Final[tuple[SpanKind, ...]] = ("llm", "tool", "reward")
"""Kinds of spans that episodes are made of."""
PAGE: Final = 1000
NOT_FOUND: Final = 404


@dataclass(frozen=True, slots=True)
class Query:
    """Conditions on rollouts; None is any."""

    mode: Mode | None = None
    """The mode of the rollouts."""
    group: str | None = None
    """The task that they repeat."""
    status: frozenset[RolloutStatus] | None = FINAL
    """Their states; None is any. Rollouts that never came from the queue end when they are quiet."""

    def wants(self, rollout: RolloutSummary) -> bool:
        """True if a rollout meets the conditions."""
        return (
            self.mode in (None, rollout.mode)
            and self.group in (None, rollout.group)
            and (self.status is None or rollout.status in self.status)
        )


async def changed(client: Client, since: int, query: Query | None = None) -> tuple[list[RolloutSummary], int]:
    """Rollouts that have changed after the cursor `since`, in their present state, and the next cursor. Late rewards
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


async def list_rollouts(client: Client, filter: str = "") -> AsyncGenerator[RolloutSummary]:
    """Yield rollouts, newest first, without their tasks and metadata, which may be large and come again with the
    episodes.
    """
    cursor = None
    while True:
        page = await client.rollout_page(filter, PAGE, cursor)
        for rollout in page.rollouts:
            yield rollout
        cursor = page.next
        if cursor is None:
            return


async def by_group(rollouts: AsyncIterable[RolloutSummary]) -> list[str]:
    """The ids of the rollouts, those of a group after each other; groups, and rollouts in them, in the order given."""
    groups: dict[str, list[str]] = {}
    async for rollout in rollouts:
        groups.setdefault(rollout.group or rollout.id, []).append(rollout.id)
    return [name for names in groups.values() for name in names]


async def load(
    client: Client,
    rollouts: AsyncIterable[RolloutSummary] | Iterable[RolloutSummary | str],
    gone: Callable[[str], None] | None = None,
    kinds: Sequence[SpanKind] = KINDS,
) -> AsyncGenerator[Episode]:
    """Yield the episode of each rollout, given by id or summary, in its present state, with the bytes of its calls;
    calls whose bytes are not stored (any more) have none. Raises ClientError, also for a rollout that does not exist;
    but with `gone`, calls `gone` with its id instead, because retention may delete rollouts at the end of a long list
    meanwhile. `kinds`: of the spans that are loaded.
    """
    async for names in _batches(rollouts):
        left = names
        while left:
            try:
                async with aclosing(client.whole_rollouts(left, kinds)) as found:
                    async for whole in found:
                        episode, left = episode_of(whole), left[1:]
                        # Released before the next one is read.
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
    """The episode of a rollout that was loaded whole."""
    bodies = {(call.attempt, call.sequence): (call.request, call.response) for call in whole.calls}
    return read_episode(whole.rollout, whole.spans, lambda span: bodies.get((span.attempt, span.sequence)))


async def _batches(
    rollouts: AsyncIterable[RolloutSummary] | Iterable[RolloutSummary | str],
) -> AsyncIterator[list[str]]:
    """The ids of rollouts, as many as fit one request."""
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
