"""An upstream that is paused while its weights change: calls wait at the socket and are then served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from fakes.odd import Step, abort, close, gone, odd, request, send, wait
from fakes.raw import body_of, chunk, events_head, reply
from fakes.rig import Inside, inside

from penstock.gateway.http.upstream_connection import UpstreamConnection
from penstock.gateway.upstreams.gate import Gate

OK = reply(200, b'{"fine":1}')
EVENT = chunk(b"data: 1\n\n")


@pytest.fixture
async def rig(tmp_path: Path, http: aiohttp.ClientSession) -> AsyncGenerator[Inside]:
    async with inside(tmp_path, http) as made:
        yield made


def gate(rig: Inside) -> Gate:
    return rig.gateway.pools["up"].gate


async def waiting(rig: Inside, calls: int) -> None:
    """Until so many calls wait at the gate."""
    await rig.tape.when(rig.rollout, "a1", lambda _: gate(rig).waiting == calls)


async def test_calls_wait_and_are_served_in_order(rig: Inside) -> None:
    """For as long as it takes: they are announced, and nobody takes them for lost."""
    async with rig.upstream([request(), send(OK)]) as upstream, rig.client() as first, rig.client() as second:
        gate(rig).pause(60)
        for number, client in enumerate((first, second), 1):
            client.send(rig.call(json.dumps({"model": f"m{number}"}).encode()))
            await waiting(rig, number)
        await rig.tape.when(rig.rollout, "a1", lambda heads: [one.status for one in heads] == ["open", "open"])
        assert not upstream.connections
        gate(rig).open()
        assert [await client.message() for client in (first, second)] == [OK, OK]
        seen = [(await upstream.connection(n)).requests[0] for n in (0, 1)]
        assert [json.loads(body_of(one))["model"] for one in seen] == ["m1", "m2"]
    spans = await rig.tape.spans(rig.rollout, 2)
    assert [(span.status, span.upstream) for span in spans] == [("ok", "up")] * 2


async def test_a_stream_that_has_begun_goes_on(rig: Inside) -> None:
    end = EVENT + b"0\r\n\r\n"
    script = [request(), send(events_head() + EVENT), wait("on"), send(end)]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(rig.call())
        await client.until(EVENT)
        gate(rig).pause(60)
        upstream.go("on")
        assert (await client.message()).endswith(end)


async def test_what_waits_for_too_long_gets_a_clear_answer(rig: Inside) -> None:
    async with rig.upstream([gone()]) as upstream, rig.client() as client:
        gate(rig).pause(0.05)
        client.send(rig.call())
        answer = await client.message()
        assert answer.startswith(b"HTTP/1.1 504 ")
        error = json.loads(body_of(answer))["error"]
        assert error["code"] == "paused"
        assert "POST /api/upstreams/up/open" in error["message"]
        # The connection lives on, and the next call does not wait in vain.
        client.send(rig.call())
        assert (await client.message()).startswith(b"HTTP/1.1 504 ")
        assert not upstream.connections
    assert [span.error for span in await rig.tape.spans(rig.rollout, 2)] == ["paused", "paused"]


async def test_then_the_next_upstream_is_asked(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    route = [{"model": "*", "upstream": ["up", "spare"]}]
    async with odd([request(), send(OK)]) as spare:
        spares = [{"name": "spare", "base_url": spare.url}]
        async with inside(tmp_path, http, spares, route=route) as rig, rig.client() as client:
            gate(rig).pause(0.05)
            client.send(rig.call())
            assert await client.message() == OK
            assert (await rig.span()).upstream == "spare"


async def test_a_client_that_leaves_while_it_waits(rig: Inside) -> None:
    async with rig.upstream([gone()]) as upstream:
        gate(rig).pause(60)
        async with rig.client() as client:
            client.send(rig.call())
            await waiting(rig, 1)
            client.abort()
        span = await rig.span()
        assert (span.status, span.error, gate(rig).waiting) == ("cancelled", "client_gone", 0)
        gate(rig).open()
        assert not upstream.connections


@pytest.mark.parametrize("end", [close(), abort()])
async def test_a_call_that_was_not_answered_when_the_engine_stopped_is_asked_again(rig: Inside, end: Step) -> None:
    async with rig.upstream([request(), wait("stop"), end], [request(), send(OK)]) as upstream, rig.client() as client:
        client.send(rig.call())
        await (await upstream.connection(0)).when(lambda: len(upstream.connections[0].requests) == 1)
        gate(rig).pause(60)
        upstream.go("stop")
        await waiting(rig, 1)
        gate(rig).open()
        assert await client.message() == OK
    assert (await rig.span()).status == "ok"


async def test_a_connection_that_fails_while_the_engine_starts_again(
    rig: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, fails = asyncio.Event(), asyncio.Event()

    async def refused(_: UpstreamConnection) -> None:
        began.set()
        await fails.wait()
        raise ConnectionRefusedError("planted")

    async with rig.upstream([request(), send(OK)]), rig.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(rig.gateway.pools["up"], "open", refused)
            client.send(rig.call())
            await began.wait()
            gate(rig).pause(60)
            fails.set()
            await waiting(rig, 1)
        gate(rig).open()
        assert await client.message() == OK


async def test_many_that_waited_are_all_served(rig: Inside) -> None:
    """More than go in one turn."""
    async with rig.upstream([request(), send(OK), request(), send(OK)]):
        gate(rig).pause(60)
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(rig.client()) for _ in range(100)]
            for client in clients:
                client.send(rig.call())
            await waiting(rig, 100)
            gate(rig).open()
            assert {await client.message() for client in clients} == {OK}
    assert not gate(rig).must_wait


async def test_a_gateway_that_stops_does_not_wait_for_the_gate(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with AsyncExitStack() as stack:
        async with inside(tmp_path, http, limits={"drain_seconds": 0}) as rig:
            client = await stack.enter_async_context(rig.client())
            gate(rig).pause(60)
            client.send(rig.call())
            await waiting(rig, 1)
        assert await client.gone() in ("eof", "reset")
        assert gate(rig).waiting == 0
