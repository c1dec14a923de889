"""SIGTERM: no new connections, running answers finish, everything is on the tape; and what cannot finish is cut off."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from fakes.odd import gone, request, send, wait
from fakes.process import PATIENCE
from fakes.raw import Gone, chunk, connect, events_head, get, post, reply
from fakes.rig import CHAT, Base, Rig, based
from fakes.tape import Tape

from penstock.gateway.cli.check import examine
from penstock.gateway.model.span import Span
from penstock.gateway.store import Store

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


async def ended(base: Base) -> None:
    """Waits until the process is gone."""
    handle = os.pidfd_open(base.pid)
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(handle, over.set)
    try:
        async with asyncio.timeout(PATIENCE):
            await over.wait()
    except TimeoutError:
        raise AssertionError(f"the gateway did not end\n{base.log}") from None
    finally:
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)


async def refuses_connections(base: Base) -> None:
    """Waits until nobody listens any more."""
    try:
        while True:
            async with connect(base.url) as client:
                client.send(get("/healthz", host="127.0.0.1"))
                await client.message()
    except (OSError, Gone):
        return


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_what_runs_finishes(http: aiohttp.ClientSession, tmp_path: Path, number: signal.Signals) -> None:
    script = [request(), send(events_head() + EVENT), wait("signalled"), send(END)]
    with stopping(tmp_path, http) as rig:
        async with rig.upstream(script) as upstream, rig.client() as client, rig.client() as idle:
            idle.send(get("/readyz", host="127.0.0.1"))
            assert (await idle.message()).startswith(b"HTTP/1.1 200 ")
            client.send(rig.call())
            await client.until(EVENT)
            os.kill(rig.base.pid, number)
            # Who is not being served is closed, who comes is turned away; the stream goes on.
            assert await idle.gone() == "eof"
            await refuses_connections(rig.base)
            upstream.go("signalled")
            assert await client.rest() == END
            assert client.end == "eof"
            await ended(rig.base)
        (span,) = recorded(rig.base)
    assert (span.status, span.response_bytes) == ("ok", 23)


async def test_a_request_that_is_being_sent_is_still_served(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    with stopping(tmp_path, http) as rig:
        async with rig.upstream([request(), send(reply(200, b"{}"))]), rig.client() as client, rig.client() as idle:
            whole = rig.call()
            client.send(whole[:-1])
            idle.send(get("/healthz", host="127.0.0.1"))
            await idle.message()
            os.kill(rig.base.pid, signal.SIGTERM)
            await idle.gone()
            client.send(whole[-1:])
            assert await client.message() == reply(200, b"{}").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            await ended(rig.base)
        assert [span.status for span in recorded(rig.base)] == ["ok"]


async def test_an_answer_that_had_not_begun_says_that_it_is_the_last(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    with stopping(tmp_path, http) as rig:
        script = [request(), wait("signalled"), send(reply(200, b"{}"))]
        async with rig.upstream(script) as upstream, rig.client() as client:
            client.send(rig.call())
            await (await upstream.connection(0)).when(lambda: bool(upstream.connections[0].requests))
            os.kill(rig.base.pid, signal.SIGTERM)
            await refuses_connections(rig.base)
            upstream.go("signalled")
            assert await client.message() == reply(200, b"{}").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            assert await client.gone() == "eof"
            await ended(rig.base)


async def test_what_is_queued_is_written(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    with stopping(tmp_path, http) as rig:
        script = [step for _ in range(200) for step in (request(), send(reply(200, b"{}")))]
        async with rig.upstream(script), rig.client() as client:
            for _ in range(200):
                client.send(rig.call())
                await client.message()
            os.kill(rig.base.pid, signal.SIGTERM)
            await ended(rig.base)
        assert len(recorded(rig.base)) == 200


async def test_a_follower_does_not_hold_it_up(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    with stopping(tmp_path, http) as rig:
        async with rig.client() as follower:
            follower.send(get("/api/changes", host="127.0.0.1"))
            await follower.until(b"penstock changes")
            os.kill(rig.base.pid, signal.SIGTERM)
            await follower.gone()
            await ended(rig.base)


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
            await ended(rig.base)
        spans = recorded(rig.base)
    assert [(span.status, span.error) for span in spans] == [("interrupted", "gateway_stopped")] * 2
    assert [span.response_bytes for span in spans] == [9, 0]
