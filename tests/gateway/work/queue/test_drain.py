"""SIGTERM: no new connections, running answers finish, everything is on the tape; and what cannot finish is cut off."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from fakes import process
from fakes.odd import gone, request, send, wait
from fakes.raw import Gone, chunk, connect, events_head, get, post, reply
from fakes.rig import CHAT, Base, Rig, based
from fakes.tape import Tape

from penstock.console.commands.check import examine
from penstock.gateway.model.span import Span
from penstock.gateway.tape.store import Store

pytestmark = pytest.mark.slow

EVENT = chunk(b"data: 1\n\n")
END = chunk(b"data: [DONE]\n\n") + chunk(b"")


@contextmanager
def stopping(tmp_path: Path, http: aiohttp.ClientSession, config: str = "") -> Generator[Rig]:
    """A gateway that the test stops itself."""
    with based(tmp_path, config) as base:
        yield Rig(base, Tape(base.url, http), "drained")


def recorded(base: Base) -> list[Span]:
    """The spans on the tape of a gateway that has ended."""
    assert examine(base.data)[1] == []
    with Store(base.data, readonly=True) as store:
        return list(store.spans("drained"))


async def refuses_connections(base: Base) -> None:
    """Waits until nobody listens any more."""
    try:
        while True:
            async with connect(base.url) as client:
                client.send(get("/healthz", host="127.0.0.1"))
                await client.message()
    except (OSError, Gone):
        return


@pytest.mark.smoke
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_what_runs_finishes(http: aiohttp.ClientSession, tmp_path: Path, number: signal.Signals) -> None:
    """A stream goes on, a request that is being sent is still served, and an answer that had not begun says that it is
    the last. Who is not being served is closed, as is who follows changes, and who comes is turned away."""
    streams = [request(), send(events_head() + EVENT), wait("signalled"), send(END)]
    waits = [request(), wait("signalled"), send(reply(200, b"{}"))]
    last = reply(200, b"{}").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with stopping(tmp_path, http) as rig:
        async with (
            rig.upstream(streams, waits, [request(), send(reply(200, b"{}"))]) as upstream,
            rig.client() as stream,
            rig.client() as waiting,
            rig.client() as sending,
            rig.client() as follower,
            rig.client() as idle,
        ):
            follower.send(get("/api/changes", host="127.0.0.1"))
            await follower.until(b"penstock changes")
            stream.send(rig.call())
            await stream.until(EVENT)
            waiting.send(rig.call())
            await (await upstream.connection(1)).when(lambda: bool(upstream.connections[1].requests))
            sending.send(rig.call()[:-1])
            idle.send(get("/readyz", host="127.0.0.1"))
            assert (await idle.message()).startswith(b"HTTP/1.1 200 ")
            os.kill(rig.base.pid, number)
            assert await idle.gone() == "eof"
            await refuses_connections(rig.base)
            sending.send(rig.call()[-1:])
            assert await sending.message() == last
            upstream.go("signalled")
            assert await waiting.message() == last
            assert await waiting.gone() == "eof"
            assert await stream.rest() == END
            assert stream.end == "eof"
            await follower.gone()
            await process.gone(rig.base.pid)
        spans = recorded(rig.base)
    assert sorted((span.status, span.response_bytes) for span in spans) == [("ok", 2), ("ok", 2), ("ok", 23)]


async def test_what_is_queued_is_written(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    with stopping(tmp_path, http) as rig:
        script = [step for _ in range(100) for step in (request(), send(reply(200, b"{}")))]
        async with rig.upstream(script), rig.client() as client:
            for _ in range(100):
                client.send(rig.call())
                await client.message()
            os.kill(rig.base.pid, signal.SIGTERM)
            await process.gone(rig.base.pid)
        assert len(recorded(rig.base)) == 100


@pytest.mark.parametrize("second_signal", [False, True])
async def test_what_does_not_finish_is_interrupted(
    http: aiohttp.ClientSession, tmp_path: Path, second_signal: bool
) -> None:
    config = "[limits]\ndrain_seconds = " + ("60.0\n" if second_signal else "0.3\n")
    waiting = [request(), gone()]
    with stopping(tmp_path, http, config) as rig:
        async with (
            rig.upstream([request(), send(events_head() + EVENT), gone()], waiting) as upstream,
            rig.client() as streaming,
            rig.client() as plain,
        ):
            streaming.send(rig.call())
            await streaming.until(EVENT)
            plain.send(post(f"/rollout/drained/attempt/plain{CHAT}", b"{}"))
            await (await upstream.connection(1)).when(lambda: bool(upstream.connections[1].requests))
            os.kill(rig.base.pid, signal.SIGTERM)
            if second_signal:
                await refuses_connections(rig.base)
                os.kill(rig.base.pid, signal.SIGTERM)
            assert await streaming.rest() == b""
            assert await plain.rest() == b""
            for connection in upstream.connections:
                await connection.gone()
            await process.gone(rig.base.pid)
        spans = recorded(rig.base)
    assert [(span.status, span.error) for span in spans] == [("interrupted", "gateway_stopped")] * 2
    assert [span.response_bytes for span in spans] == [9, 0]
