"""WebSockets of a protocol that is not read: all bytes pass, and the session is kept."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest
from conftest import StartGateway
from fakes.budgets import budget
from fakes.raw import frame
from fakes.rig import Within
from fakes.sessions import Rig, session_rig
from fakes.tape import Tape
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from penstock.gateway.model.facts import SOCKET_SESSION
from penstock.gateway.traffic.proxy.websocket.connection import ClientMessageForwarder, UpstreamMessageForwarder
from penstock.gateway.traffic.proxy.websocket.session import PART_BYTES
from penstock.gateway.wire.dialects.sse import events
from penstock.gateway.wire.http.websocket import FAILED

KEY = {"Authorization": "Bearer sk-not-real"}


@pytest.fixture
async def rig(within: Within, request: pytest.FixtureRequest) -> AsyncGenerator[Rig]:
    more = getattr(request, "param", {})
    async with session_rig(within, "openai", more, subprotocols=[Subprotocol("chatter")]) as made:
        yield made


def open_session(rig: Rig, path: str = "/v1/chatter", **more: Any) -> connect:
    url = rig.base.replace("http", "ws") + path
    offered = [Subprotocol("other"), Subprotocol("chatter")]
    return connect(url, additional_headers=KEY, subprotocols=offered, proxy=None, max_size=None, **more)


@pytest.mark.parametrize("compression", ["deflate", None])
async def test_a_session_passes_and_is_one_span(rig: Rig, compression: str | None) -> None:
    async with open_session(rig, compression=compression) as client:
        assert client.subprotocol == "chatter"
        host = await rig.accepted.get()
        _ = await host.connection.ping()
        opened = await rig.tape.open_span("r1")
        assert opened.dialect == "websocket"
        await client.send(json.dumps({"type": "session.start", "session": {"model": "gpt-live-1"}}))
        assert "gpt-live-1" in str(await host.connection.recv())
        for message in ("two\nlines", b'{"binary": 1}', b"\xff\x00\xfe", "x" * 70_000):
            await client.send(message)
            assert await host.connection.recv() == message
            await host.connection.send(message)
            assert await client.recv() == message
    (span,) = await rig.spans(1)
    assert (span.status, span.http_status, span.usage, span.model) == ("ok", 101, None, "gpt-live-1")
    assert set(span.attributes or {}) == {"penstock.websocket", SOCKET_SESSION}
    for side, first in (("request", 1), ("response", 0)):
        found = list(events(await rig.tape.raw(span, side)))[first:]  # type: ignore[arg-type]
        assert [event.type for event in found] == ["message", "binary", "base64", "message"]
        assert [found[0].data, found[1].data, found[3].data] == ["two\nlines", '{"binary": 1}', "x" * 70_000]
        assert base64.b64decode(found[2].data) == b"\xff\x00\xfe"


@pytest.mark.parametrize(("code", "status", "error"), [(1000, "ok", None), (1011, "error", "closed_1011")])
async def test_the_hosts_close_passes_and_tells_how_it_ended(
    rig: Rig, code: int, status: str, error: str | None
) -> None:
    async with open_session(rig) as client:
        host = await rig.accepted.get()
        await host.connection.send("hello")
        await host.connection.close(code, "quota is used up")
        await client.wait_closed()
        assert (client.close_code, client.close_reason) == (code, "quota is used up")
    (span,) = await rig.spans(1)
    assert (span.status, span.error) == (status, error)
    assert (b"quota is used up" in await rig.tape.raw(span, "response")) == (error is not None)


async def test_a_client_that_breaks_off(rig: Rig) -> None:
    async with open_session(rig) as client:
        host = await rig.accepted.get()
        await client.send("hello")
        _ = await host.connection.recv()
        client.transport.abort()
        await host.connection.wait_closed()
    (span,) = await rig.spans(1)
    assert (span.status, span.error) == ("cancelled", "client_gone")


@pytest.mark.parametrize("rig", [{"budget": [budget(unit="tokens", limit=10, unknown="refuse")]}], indirect=True)
async def test_a_budget_may_refuse_what_cannot_be_counted(rig: Rig) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with open_session(rig):
            pass
    assert refused.value.response.status_code == 403
    assert rig.opened == []


@pytest.mark.parametrize(
    "rig",
    [{"budget": [budget(limit=4), budget(name="t", unit="tokens", limit=10**6, unknown="pass")]}],
    indirect=True,
)
async def test_budgets_count_each_part_of_a_session(rig: Rig) -> None:
    """In whichever order both sides speak; without room for another part a session ends."""
    async with open_session(rig) as client:
        host = await rig.accepted.get()
        for message in ("x" * PART_BYTES, "y" * PART_BYTES):
            await client.send(message)
            _ = await host.connection.recv()
        await host.connection.send("hello")
        _ = await client.recv()
    _ = await rig.spans(3)
    calls, tokens = (await rig.tape.get("/api/budgets"))["budgets"]
    assert (calls["used"], calls["unread"], tokens["unread"]) == (3, 3, 3)
    async with open_session(rig) as client:
        await client.send("x" * PART_BYTES)
        await client.send("one more")
        await client.wait_closed()
        assert client.close_code == FAILED
    spans = await rig.spans(5)
    assert [(span.status, span.error) for span in spans[3:]] == [("ok", None), ("error", "budget")]
    assert b"one more" in await rig.tape.raw(spans[4], "request")
    calls, _ = (await rig.tape.get("/api/budgets"))["budgets"]
    assert calls["used"] == 5  # The message that found no room has passed.
    with pytest.raises(InvalidStatus):
        async with open_session(rig):
            pass


async def test_it_opens_whatever_the_gateways_routes_are_and_without_unknown_extensions(within: Within) -> None:
    more = {"route": [{"model": "a*", "upstream": "host"}]}
    async with session_rig(within, "openai", more) as rig:
        extra = {**KEY, "Sec-WebSocket-Extensions": "mux; max=3"}
        url = rig.base.replace("http", "ws") + "/v1/realtime/translations?model=m"
        async with connect(url, additional_headers=extra, proxy=None, compression=None) as client:
            host = await rig.accepted.get()
            await client.send("hello")
            assert await host.connection.recv() == "hello"
        (span,) = await rig.spans(1)
        assert span.model == "m"
        assert "sec-websocket-extensions" not in rig.opened[0][1]


async def test_routes_choose_the_upstream_by_the_model_in_the_query(within: Within) -> None:
    async with session_rig(within, "openai", {"route": [{"model": "other*", "upstream": "host"}]}) as rig:
        async with open_session(rig, "/v1/realtime?model=other-1"):
            _ = await rig.accepted.get()
        assert len(rig.opened) == 1


async def test_a_reader_that_is_slower_holds_its_writer_up_in_both_directions(rig: Rig) -> None:
    big = os.urandom(1 << 20)
    async with open_session(rig, compression=None, max_queue=1) as client:
        host = await rig.accepted.get()

        async def flood(connection: ClientConnection | ServerConnection) -> int:
            sent = 0
            try:
                while sent < 64:
                    await asyncio.wait_for(connection.send(big), 0.5)
                    sent += 1
            except TimeoutError:
                pass
            return sent

        assert await flood(host.connection) < 48
        assert await client.recv() == big
        assert await flood(client) < 48
        client.transport.abort()
        host.connection.transport.abort()


@given(st.lists(st.tuples(st.sampled_from([0x81, 0x82, 0x89, 0x8A]), st.binary(max_size=120)), max_size=8), st.data())
@settings(max_examples=200, deadline=None)
def test_the_same_bytes_go_out_however_they_come(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    sent = b"".join(frame(first, body, mask=b"abcd") for first, body in frames)
    told = b"".join(frame(first, body) for first, body in frames)
    cuts = sorted(data.draw(st.sets(st.integers(0, max(len(sent), len(told))), max_size=6)))
    out = bytearray()
    client, upstream = ClientMessageForwarder(1 << 20, None, out.extend), UpstreamMessageForwarder(1 << 20, None)
    came = bytearray()
    for start, end in zip([0, *cuts], [*cuts, None], strict=True):
        for message in client.feed(sent[start:end]):
            client.forward(message)
        client.forward_rest()
        came += upstream.feed(told[start:end])[1]
    assert (bytes(out), bytes(came)) == (sent, told)


@pytest.mark.slow
async def test_a_killed_gateway_leaves_an_interrupted_span_with_what_had_come(
    start_gateway: StartGateway, http: aiohttp.ClientSession
) -> None:
    async def talk(connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    async with serve(talk, "127.0.0.1", 0, max_size=None) as server:
        url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        gateway = await start_gateway(f'[[upstream]]\nname = "host"\nbase_url = "{url}/v1"\n')
        rig = Rig(gateway.url, Tape(gateway.url, http))
        async with open_session(rig, "/v1/chatter", compression=None) as client:
            await client.send("first words")
            assert await client.recv() == "first words"
            _ = await rig.tape.open_span("r1")
            for _ in range(5):
                await client.send("x" * (1 << 18))
                _ = await client.recv()
            part, _ = await rig.spans(2)
            _ = await rig.tape.open_span("r1")
            await gateway.kill()
            await client.wait_closed()
        await gateway.start()
        rig = Rig(gateway.url, Tape(gateway.url, http))
        spans = await rig.spans(3)
        assert [span.status for span in spans] == ["ok", "ok", "interrupted"]
        assert b"xxx" in await rig.tape.raw(spans[2], "request")
        assert b"first words" in await rig.tape.raw(part, "response")
