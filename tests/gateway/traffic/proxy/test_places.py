"""Upstreams that are given so many calls at a time (`max_concurrent`): who waits, goes elsewhere or is refused."""

from __future__ import annotations

from contextlib import AsyncExitStack

from fakes.odd import Script, close, request, send, wait
from fakes.raw import reply
from fakes.rig import Inside, Within
from fakes.two_upstreams import Two, says_so
from fakes.waiting import until

from penstock.gateway.model.facts import QUEUE_MS

OK = reply(200, b'{"fine":1}')
ONE = {"max_concurrent": 1, "read_timeout": 30.0}
SLOW: Script = [request(), says_so(), wait("on"), send(OK), request(), send(OK)]


async def waiting(rig: Inside, count: int) -> None:
    """Comes back when so many calls wait."""
    await until(lambda: rig.gateway.pools["up"].concurrency_limit.waiting == count)


async def test_calls_beyond_it_wait_in_their_order(within: Within) -> None:
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(within(first=ONE))
        up = await stack.enter_async_context(rig.upstream([*SLOW, request(), send(OK)]))
        clients = [await stack.enter_async_context(rig.client()) for _ in range(3)]
        for number, client in enumerate(clients):
            client.send(rig.call(b'{"model":"m","n":%d}' % number))
            await waiting(rig, number)
        shown = (await rig.tape.get("/api/upstreams"))["upstreams"]
        assert {one["name"]: one["waiting"] for one in shown}["up"] == 2
        up.go("on")
        for client in clients:
            assert await client.message() == OK
        assert [it[-2:-1] for it in up.connections[0].requests] == [b"0", b"1", b"2"], "one connection, one at a time"
        places = rig.gateway.pools["up"].concurrency_limit
        assert (places.running, places.waiting) == (0, 0)
        shown = (await rig.tape.get("/api/upstreams"))["upstreams"]
        assert {one["name"]: (one["waiting"], one["waited"]) for one in shown}["up"] == (0, 2)
        waits = [(it.attributes or {}).get(QUEUE_MS) for it in await rig.tape.spans(rig.rollout, 3)]
    assert [wait is not None and wait > 0 for wait in waits] == [False, True, True]


async def test_they_go_elsewhere_where_another_upstream_has_a_place(two: Two) -> None:
    async with two(SLOW, [request(), send(OK)], ONE) as it, it.rig.client() as second:
        it.client.send(it.rig.call())
        await it.asked()
        second.send(it.rig.call())
        assert await second.message() == OK
        it.up.go("on")
        assert await it.client.message() == OK
        spans = await it.rig.tape.spans(it.rig.rollout, 2)
    assert sorted(span.upstream or "" for span in spans) == ["spare", "up"]


async def test_one_that_waits_in_vain_is_refused(within: Within) -> None:
    async with (
        within(first=ONE | {"read_timeout": 0.3}) as rig,
        rig.client() as client,
    ):
        rig.gateway.pools["up"].concurrency_limit.running += 1
        client.send(rig.call())
        answer = await client.message()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"upstream.max_concurrent = 1" in answer
        assert rig.gateway.pools["up"].concurrency_limit.waiting == 0


async def test_one_that_leaves_or_fails_gives_its_place_back(within: Within) -> None:
    async with (
        within(first=ONE) as rig,
        rig.upstream([request(), says_so(), wait("on"), close()], [request(), send(OK)]) as up,
        rig.client() as first,
        rig.client() as last,
    ):
        first.send(rig.call())
        await until(lambda: up.signal("asked").is_set())
        async with rig.client() as leaves:
            leaves.send(rig.call())
            await waiting(rig, 1)
        await waiting(rig, 0)
        last.send(rig.call())
        await waiting(rig, 1)
        up.go("on")
        assert (await first.message()).startswith(b"HTTP/1.1 502 ")
        assert await last.message() == OK
        assert rig.gateway.pools["up"].concurrency_limit.running == 0
