"""Followers sleep until a commit has passed them."""

from __future__ import annotations

import asyncio

from fakes.waiting import PATIENCE_S

from penstock.gateway.model.rollout import RolloutStatus
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tape.store.view import ALL_CHANGES, ChangeFilter


async def test_who_is_behind_returns_at_once() -> None:
    assert await ChangeFeed(7).wait(6) == 7


async def test_all_who_wait_are_woken_once_it_is_their_turn() -> None:
    feed = ChangeFeed(1)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        near = [group.create_task(feed.wait(1)) for _ in range(3)]
        far = group.create_task(feed.wait(3))
        await asyncio.sleep(0)
        feed.committed(3)
        assert await asyncio.gather(*near) == [3, 3, 3]
        assert not far.done()
        feed.committed(9)
        assert await far == 9


async def test_a_commit_that_told_nothing_new_wakes_nobody() -> None:
    feed = ChangeFeed(4)
    waiting = asyncio.ensure_future(feed.wait(4))
    await asyncio.sleep(0)
    feed.committed(4)
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_a_follower_sleeps_through_what_it_does_not_want() -> None:
    feed = ChangeFeed(4)
    with feed.subscribe(ChangeFilter(["rollout"], ["run-*"])) as watch, feed.subscribe(ALL_CHANGES) as curious:
        waiting, other = asyncio.ensure_future(watch.wait(4)), asyncio.ensure_future(curious.wait(4))
        await asyncio.sleep(0)
        feed.committed(7, [b"srun-1\0a1\0\0\0\0\1", b"rother\0", b"erun-1\0"])
        assert await other == 4
        await asyncio.sleep(0)
        assert not waiting.done()
        feed.committed(8, [b"rrun-1\0"])
        # It need not look at what it has slept through.
        assert await waiting == 7


async def test_a_follower_that_is_behind_does_not_wait() -> None:
    feed = ChangeFeed(4)
    with feed.subscribe(ChangeFilter(["run"])) as watch:
        # What came while it was busy may be for it.
        feed.committed(9, [b"rother\0"])
        assert await watch.wait(4) == 4
        waiting = asyncio.ensure_future(watch.wait(9))
        await asyncio.sleep(0)
        assert not waiting.done()
        feed.committed(10, [b"tr\0"])
        assert await waiting == 9


def test_what_is_wanted_is_told_by_the_first_bytes_of_a_record() -> None:
    records = [b"rshop-1\0", b"ashop-1\0a1\0", b"sshop-1\0a1\0\0\0\0\1", b"rshop-12\0", b"eshop-1\0", b"tx\0"]

    def found(wanted: ChangeFilter) -> list[int]:
        return [at for at, record in enumerate(records) if wanted.matches(record)]

    assert found(ALL_CHANGES) == [0, 1, 2, 3, 4, 5]
    assert found(ChangeFilter(["rollout"])) == [0, 3]
    assert found(ChangeFilter(names=["shop-1"])) == [0, 1, 2, 4]
    assert found(ChangeFilter(names=["shop-1*"])) == [0, 1, 2, 3, 4]
    assert found(ChangeFilter(["rollout", "run"], ["shop-1", "x"])) == [0, 5]
    assert found(ChangeFilter(names=["x*", "shop-12"])) == [3, 5]
    ended = ChangeFilter(status=[RolloutStatus.FAILED])
    for status, wanted in ((RolloutStatus.FAILED, True), (RolloutStatus.RUNNING, False), (None, False)):
        assert (ended.matches_status(status), ALL_CHANGES.matches_status(status)) == (wanted, True)
