"""Upstreams that are given so many calls at a time (`max_concurrent`): who waits, goes elsewhere or is refused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from fakes.odd import Connection, Script, close, request, send, wait
from fakes.raw import PATIENCE, reply
from fakes.rig import Inside, inside, odd_on
from fakes.waiting import until

OK = reply(200, b'{"fine":1}')
ONE = {"max_concurrent": 1, "read_timeout": 30.0}


@pytest.fixture
def spares() -> Iterator[socket.socket]:
    """Where the second upstream listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


async def asked(connection: Connection) -> None:
    connection.upstream.go("asked")


SLOW: Script = [request(), asked, wait("on"), send(OK), request(), send(OK)]


async def waiting(rig: Inside, count: int) -> None:
    """Comes back when so many calls wait."""
    places = rig.gateway.proxy.pools["up"].places

    async def there() -> bool:
        return places.waiting == count

    await until(there)


async def test_calls_beyond_it_wait_in_their_order(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(inside(tmp_path, http, (), ONE))
        up = await stack.enter_async_context(rig.upstream([*SLOW, request(), send(OK)]))
        first, second, third = [await stack.enter_async_context(rig.client()) for _ in range(3)]
        for number, client in enumerate((first, second, third)):
            client.send(rig.call(b'{"model":"m","n":%d}' % number))
            await waiting(rig, number)
        shown = (await rig.tape.get("/api/upstreams"))["upstreams"]
        assert {one["name"]: one["waiting"] for one in shown}["up"] == 2
        up.go("on")
        for client in (first, second, third):
            assert await client.message() == OK
        assert [it[-2:-1] for it in up.connections[0].requests] == [b"0", b"1", b"2"], "one connection, one at a time"
        places = rig.gateway.proxy.pools["up"].places
        assert (places.running, places.waiting) == (0, 0)
        shown = (await rig.tape.get("/api/upstreams"))["upstreams"]
        assert {one["name"]: (one["waiting"], one["waited"]) for one in shown}["up"] == (0, 2)


async def test_they_go_elsewhere_where_another_upstream_has_a_place(
    tmp_path: Path, http: aiohttp.ClientSession, spares: socket.socket
) -> None:
    spare = {"name": "spare", "base_url": f"http://127.0.0.1:{spares.getsockname()[1]}/v1"}
    async with AsyncExitStack() as stack:
        route = {"model": "m", "upstream": ["up", "spare"]}
        rig = await stack.enter_async_context(inside(tmp_path, http, [spare], ONE, route=[route]))
        up = await stack.enter_async_context(rig.upstream(SLOW))
        _ = await stack.enter_async_context(odd_on(spares, [request(), send(OK)]))
        first, second = [await stack.enter_async_context(rig.client()) for _ in range(2)]
        first.send(rig.call())
        async with asyncio.timeout(PATIENCE):
            await up.signal("asked").wait()
        second.send(rig.call())
        assert await second.message() == OK
        up.go("on")
        assert await first.message() == OK
        assert sorted(span.upstream or "" for span in await rig.tape.spans(rig.rollout, 2)) == ["spare", "up"]


async def test_one_that_waits_in_vain_is_refused(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(inside(tmp_path, http, (), ONE | {"first_byte_timeout": 0.3}))
        _ = await stack.enter_async_context(rig.upstream([request(), send(OK[:-1])]))
        first, second = [await stack.enter_async_context(rig.client()) for _ in range(2)]
        first.send(rig.call())
        assert await first.until(OK[:-1]) == OK[:-1]
        second.send(rig.call())
        answer = await second.message()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"has 1 call under way and is given no more (upstream.max_concurrent = 1); this one has" in answer
        assert rig.gateway.proxy.pools["up"].places.waiting == 0


async def test_one_that_leaves_or_fails_gives_its_place_back(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(inside(tmp_path, http, (), ONE))
        up = await stack.enter_async_context(
            rig.upstream([request(), asked, wait("on"), close()], [request(), send(OK)])
        )
        first, last = [await stack.enter_async_context(rig.client()) for _ in range(2)]
        first.send(rig.call())
        async with asyncio.timeout(PATIENCE):
            await up.signal("asked").wait()
        async with rig.client() as leaves:
            leaves.send(rig.call())
            await waiting(rig, 1)
        await waiting(rig, 0)
        last.send(rig.call())
        await waiting(rig, 1)
        up.go("on")
        assert (await first.message()).startswith(b"HTTP/1.1 502 ")
        assert await last.message() == OK
        assert rig.gateway.proxy.pools["up"].places.running == 0
