"""Followers sleep until a commit has passed them."""

from __future__ import annotations

import asyncio

from penstock.gateway.store.feed import Feed


async def test_who_is_behind_returns_at_once() -> None:
    assert await Feed(7).wait(6) == 7


async def test_all_who_wait_are_woken_once_it_is_their_turn() -> None:
    feed = Feed(1)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        near = [group.create_task(feed.wait(1)) for _ in range(3)]
        far = group.create_task(feed.wait(3))
        await asyncio.sleep(0)
        feed.committed(3)
        assert await asyncio.gather(*near) == [3, 3, 3]
        assert not far.done()
        feed.committed(9)
        assert await far == 9


async def test_a_commit_that_told_nothing_new_wakes_nobody() -> None:
    feed = Feed(4)
    waiting = asyncio.ensure_future(feed.wait(4))
    await asyncio.sleep(0)
    feed.committed(4)
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
