"""What waits for a client: it holds the process up while the client is there, and is bounded while it is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from penstock.gateway.mcp.hosted.streams import Stream


async def test_a_client_that_is_slow_is_waited_for() -> None:
    stream = Stream()
    stream.attached = True
    stream.put(b"x" * (1 << 20))
    await stream.room()
    stream.put(b"y")
    waiting = asyncio.ensure_future(stream.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await stream.next() == b"x" * (1 << 20)
    await waiting
    stream.put(b"z" * (2 << 20))
    waiting = asyncio.ensure_future(stream.room())
    stream.leave()
    await waiting


@pytest.mark.parametrize(("count", "size"), [(1500, 1), (30, 1 << 20)])
async def test_of_what_waits_for_nobody_the_oldest_is_dropped(count: int, size: int) -> None:
    stream = Stream()
    for number in range(count):
        stream.put(b"%d" % number + b"x" * size)
        await stream.room()
    later = Stream()
    later.take_over(stream)
    assert await stream.next() is None
    later.end()
    found = [line async for line in lines(later)]
    assert len(found) == count - stream.dropped
    assert (len(found), found[-1]) == (1000 if size == 1 else 7, b"%d" % (count - 1) + b"x" * size)


async def lines(stream: Stream) -> AsyncGenerator[bytes]:
    while (line := await stream.next()) is not None:
        yield line
