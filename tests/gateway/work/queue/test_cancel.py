"""A client that goes away ends its call at once: the upstream sees it, and the tape has one span with what had come."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from fakes.local import locally
from fakes.odd import Connection, Step, gone, request, request_head, send, wait
from fakes.process import upstream
from fakes.raw import Wire, chunk, connect, events_head, post, reply
from fakes.rig import CHAT, Rig
from fakes.tape import Tape

EVENT, DONE = chunk(b"data: 1\n\n"), chunk(b"data: [DONE]\n\n")

Leave = Callable[[Wire], None]
LEAVES: dict[str, Leave] = {"closes": Wire.close, "resets": Wire.abort, "half-closes": Wire.half_close}


@pytest.mark.parametrize("leave", LEAVES)
async def test_before_the_first_byte(rig: Rig, leave: str) -> None:
    async with rig.upstream([request(), gone()]) as upstream, rig.client() as client:
        client.send(rig.call())
        connection = await upstream.connection(0)
        await connection.when(lambda: bool(connection.requests))
        LEAVES[leave](client)
        await connection.gone()
        span = await rig.span()
    assert (span.status, span.error, span.http_status, span.response_bytes) == ("cancelled", "client_gone", None, 0)
    assert await rig.tape.raw(span, "request") == b'{"model":"m"}'


@pytest.mark.parametrize("leave", LEAVES)
async def test_in_the_middle_of_a_stream(rig: Rig, leave: str) -> None:
    async with rig.upstream([request(), send(events_head() + EVENT), gone()]) as upstream, rig.client() as client:
        client.send(rig.call())
        await client.until(EVENT)
        LEAVES[leave](client)
        await (await upstream.connection(0)).gone()
        span = await rig.span()
    assert (span.status, span.http_status, span.stream) == ("cancelled", 200, True)
    assert await rig.tape.raw(span, "response") == b"data: 1\n\n"


async def test_in_the_middle_of_a_plain_answer(rig: Rig) -> None:
    whole = reply(200, b"0123456789")
    async with rig.upstream([request(), send(whole[:-5]), gone()]) as upstream, rig.client() as client:
        client.send(rig.call())
        await client.until(b"01234")
        client.close()
        await (await upstream.connection(0)).gone()
        span = await rig.span()
    assert span.status == "cancelled"
    assert await rig.tape.raw(span, "response") == b"01234"


async def test_while_the_request_is_still_being_written(rig: Rig) -> None:
    """The upstream takes the head and nothing more of a request that fills every buffer."""
    async with rig.upstream([request_head(), hold(), wait("left"), gone()]) as upstream, rig.client() as client:
        client.send(rig.call(b"x" * 20_000_000))
        connection = await upstream.connection(0)
        await connection.when(lambda: bool(connection.received))
        client.abort()
        span = await rig.span()
        assert span.status == "cancelled"
        connection.resume()
        upstream.go("left")
        await connection.gone()


def hold() -> Step:
    """A step that reads no more."""

    async def step(connection: Connection) -> None:
        connection.pause()

    return step


async def test_before_the_request_is_whole_there_is_no_call(rig: Rig) -> None:
    async with rig.upstream([request(), send(reply(200, b"{}"))]) as upstream:
        async with rig.client() as client:
            client.send(rig.call(b"x" * 1000)[:-1])
        async with rig.client() as client:
            client.send(rig.call())
            await client.message()
        assert len(upstream.connections) == 1
    assert (await rig.span()).status == "ok"


async def test_while_it_connects(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """An upstream whose backlog is full takes no connection and refuses none."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        config = upstream("full", f"http://127.0.0.1:{port}/v1", "openai")
        async with locally(tmp_path, config) as gateway, connect(gateway.url) as client:
            client.send(post(f"/rollout/c/attempt/a1{CHAT}", b'{"model":"m"}'))
            tape = Tape(gateway.url, http)
            await tape.open_span("c")
            client.abort()
            (span,) = await tape.spans("c", 1)
        for filler in fillers:
            filler.close()
    assert (span.status, span.http_status, span.upstream) == ("cancelled", None, "full")


async def test_a_connection_that_comes_too_late_is_closed(rig: Rig) -> None:
    """Clients leave while the gateway connects: whatever it still gets is not kept, and the next call works."""
    async with rig.upstream([step for _ in range(31) for step in (request(), send(reply(200, b"{}")))]):
        for _ in range(30):
            async with rig.client() as client:
                client.send(rig.call())
                client.abort()
        async with rig.client() as client:
            client.send(post(f"/rollout/{rig.rollout}/attempt/last{CHAT}", b"{}"))
            assert await client.message() == reply(200, b"{}")
    await rig.tape.written()
    found = await rig.tape.get(f"/api/rollouts/{rig.rollout}/attempts/last/spans")
    assert [span["status"] for span in found["spans"]] == ["ok"]
    # How many of the others were read before their clients left is chance.
    found = await rig.tape.get(f"/api/spans?limit=1000&filter=rollout:{rig.rollout}")
    assert {span["status"] for span in found["spans"]} <= {"cancelled", "ok"}


async def test_a_call_that_waits_behind_another_is_dropped_with_it(rig: Rig) -> None:
    async with rig.upstream([request(), gone()]) as upstream, rig.client() as client:
        client.send(rig.call() + rig.call())
        connection = await upstream.connection(0)
        await connection.when(lambda: bool(connection.requests))
        client.abort()
        await connection.gone()
        assert (await rig.span()).status == "cancelled"
        assert len(upstream.connections) == 1


async def test_a_client_that_leaves_after_its_answer_has_had_it(rig: Rig) -> None:
    async with rig.upstream([request(), send(reply(200, b"{}"))]), rig.client() as client:
        client.send(rig.call())
        await client.message()
        client.abort()
    assert (await rig.span()).status == "ok"


async def test_other_calls_go_on(rig: Rig) -> None:
    script = [request(), send(events_head() + EVENT), wait("others"), send(EVENT + DONE + chunk(b""))]
    async with rig.upstream([request(), gone()], script) as upstream, rig.client() as leaver, rig.client() as stayer:
        leaver.send(rig.call())
        await upstream.connection(0)
        stayer.send(rig.call())
        await stayer.until(EVENT)
        leaver.abort()
        await (await upstream.connection(0)).gone()
        upstream.go("others")
        await stayer.until(b"0\r\n\r\n")
    assert sorted(span.status for span in await rig.tape.spans(rig.rollout, 2)) == ["cancelled", "ok"]
