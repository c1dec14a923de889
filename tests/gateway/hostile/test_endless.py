"""What never ends: heads, trailers, chunks and messages that go on for ever, clients that say a byte a minute, and ten
thousand that say nothing. The next caller is served."""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import ExitStack

import pytest
from conftest import StartGateway
from fakes.odd import Connection, Script, Step, odd, request, send
from fakes.process import upstreams
from fakes.raw import chunk, connect, events_head, frame, post, reply
from fakes.rig import GOOD, Rig, Within

from penstock.gateway import app
from penstock.gateway.wire.http.websocket import TEXT, WebSocketReader

MEGABYTE = 1 << 20
MUCH = 64
"""Megabytes of framing without an answer in it."""
IDLE = 10_000


def flood(piece: bytes) -> Step:
    """Says the same thing until nobody listens, or it was said for `MUCH` megabytes."""

    async def step(connection: Connection) -> None:
        for _ in range(MUCH * MEGABYTE // len(piece)):
            await asyncio.sleep(0)
            while connection.transport.get_write_buffer_size() > MEGABYTE:  # noqa: ASYNC110 asyncio tells nobody else
                await asyncio.sleep(0)
            if connection.lost or connection.end != "open":
                return
            connection.send(piece)
        raise AssertionError("somebody has listened to all of it")

    return step


FLOODS: dict[str, tuple[Script, bytes]] = {
    "a head": ([send(b"HTTP/1.1 200 OK\r\n"), flood(b"a: b\r\n" * 10_000)], b"upstream_protocol"),
    "a line of a head": ([send(b"HTTP/1.1 200 OK\r\na: "), flood(b"b" * 60_000)], b"upstream_protocol"),
    "a status": ([flood(b"HTTP/1.1 " * 6_000)], b"upstream_protocol"),
    "interim answers": ([flood(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 2_000)], b"upstream_protocol"),
    "continue": ([flood(b"HTTP/1.1 100 Continue\r\n\r\n" * 2_000)], b"upstream_protocol"),
    "trailers": ([send(events_head() + chunk(b"data: x\n\n") + b"0\r\n"), flood(b"a: b\r\n" * 10_000)], b""),
    "a trailer": ([send(events_head() + chunk(b"data: x\n\n") + b"0\r\na: "), flood(b"b" * 60_000)], b""),
    "a chunk's extension": ([send(events_head() + chunk(b"data: x\n\n") + b"5;"), flood(b"b" * 60_000)], b""),
}


@pytest.mark.parametrize("what", FLOODS)
async def test_what_frames_an_answer_ends(rig: Rig, what: str) -> None:
    """With a clear answer where none has begun, else as an answer that breaks off."""
    script, told = FLOODS[what]
    with rig.base.grows_less_than(32 * MEGABYTE):
        async with rig.upstream([request(), *script]) as upstream, rig.client() as client:
            client.send(rig.call())
            if told:
                await client.until(told)
            else:
                assert not (await client.rest()).endswith(b"0\r\n\r\n")
            await (await upstream.connection(0)).finished.wait()
        assert (await rig.span()).status == "error"


async def test_interim_answers_of_common_number_pass(rig: Rig) -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50
    async with rig.upstream([request(), send(hints + reply(200, b"{}"))]), rig.client() as client:
        client.send(rig.call())
        assert await client.exactly(len(hints)) == hints
        assert await client.message() == reply(200, b"{}")


async def test_chunks_of_an_answer_do_not_multiply(rig: Rig) -> None:
    body = b"v" * 1_000_000
    answer = events_head() + b"1\r\nv\r\n" * len(body) + chunk(b"")
    with rig.base.grows_less_than(48 * MEGABYTE):
        async with rig.upstream([request(), send(answer)]), rig.client() as client:
            client.send(rig.call())
            await client.exactly(len(answer))
        assert await rig.tape.raw(await rig.span(), "response") == body


async def test_a_head_that_drips_has_its_time(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a byte of it comes. A body may take as long as its bytes keep coming: more often than a machine
    that is busy keeps a process waiting."""
    start = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    monkeypatch.setattr(app, "CLIENT_S", 4.0)
    async with (
        within() as rig,
        rig.client() as byte,
        rig.client() as line,
        rig.client() as large,
    ):
        for slow in (byte, line):
            slow.send(start)
        large.send(start + b"Content-Length: 100000\r\n\r\n")
        while any(slow.end == "open" and not slow.lost for slow in (byte, line)):
            byte.send(b"x")
            line.send(b"X-A: b\r\n")
            large.send(b"x")
            await asyncio.sleep(0.05)
        assert (large.end, large.received) == ("open", b"")


async def test_who_takes_nothing_of_an_answer_leaves_its_place(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upstream takes one call at a time; the next caller waits for that, and for no client that sleeps."""
    endless = [request(), send(events_head() + chunk(b"v" * (MUCH * MEGABYTE)))]
    monkeypatch.setattr(app, "CLIENT_S", 1.0)
    async with (
        within(first={"max_concurrent": 1}) as rig,
        rig.upstream(endless, [request(), send(GOOD)]) as upstream,
        rig.client() as sleeping,
        rig.client() as client,
    ):
        sleeping.transport.pause_reading()
        sleeping.send(rig.call())
        _ = await upstream.connection(0)
        client.send(post("/rollout/next/v1/chat/completions", b"{}"))
        assert await client.message() == GOOD
        assert (await rig.span()).status == "cancelled"


async def test_ten_thousand_idle_connections(start_gateway: StartGateway) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLE + 1000:
        pytest.skip(f"a process may open {hard} files here (ulimit -Hn), and this needs {IDLE + 1000}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, IDLE + 1000), hard))
    try:
        async with odd([request(), send(reply(200, b"{}"))]) as upstream:
            gateway = await start_gateway(upstreams(openai=f"{upstream.url}/v1"))
            before = gateway.memory
            with ExitStack() as stack:
                for _ in range(IDLE):
                    one = stack.enter_context(socket.socket())
                    one.connect(("127.0.0.1", gateway.port))
                async with connect(gateway.url) as client:
                    client.send(post("/rollout/r1/v1/chat/completions", b"{}", host="localhost"))
                    assert await client.message() == reply(200, b"{}")
                grown = gateway.memory - before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert grown < 200 * MEGABYTE, f"{grown / IDLE:.0f} bytes a connection"


@pytest.mark.parametrize("piece", [frame(0), frame(0, b"x"), frame(0x89, b"ping"), frame(0x8A)])
def test_a_message_comes_in_a_bounded_number_of_frames(piece: bytes) -> None:
    """Empty ones, pings in between: they are held with it, and add nothing to its size."""
    reader = WebSocketReader(1 << 30, None)
    assert reader.feed(frame(TEXT, b"a")) == []
    for _ in range(100):
        assert all(one.kind != TEXT for one in reader.feed(piece * 1000))
    assert reader.problem == "a message is larger than 65536 frames"


@pytest.mark.parametrize("count", [1, 1000])
def test_messages_of_frames_may_follow_each_other(count: int) -> None:
    """What is counted is one message's."""
    reader = WebSocketReader(1 << 30, None)
    message = frame(TEXT, b"a") + frame(0) * count + frame(0x80, b"b")
    for _ in range(100_000 // count):
        assert [one.body for one in reader.feed(message)] == [b"ab"]
    assert reader.problem is None


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (3 << 20) + 7])
def test_a_large_frame_is_unmasked_piece_by_piece(size: int) -> None:
    plain = bytes(range(256)) * (size // 256 + 1)
    key = b"\x01\x02\x03\x04"
    masked = bytes(a ^ key[at % 4] for at, a in enumerate(plain[:size]))
    (message,) = WebSocketReader(1 << 30, None).feed(b"\x81\xff" + size.to_bytes(8, "big") + key + masked)
    assert message.body == plain[:size]
