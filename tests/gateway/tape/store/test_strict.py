"""record = "strict": a call that an upstream has seen is on the tape, and so is an answer that a client has had
completely, whenever the gateway dies."""

from __future__ import annotations

import asyncio
import random
import threading
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.forked import forked
from fakes.odd import Script, close, odd, request, send
from fakes.raw import body_of, chunk, connect, events_head, post, reply
from fakes.rig import CHAT, Inside, inside
from fakes.some import some

from penstock.console.commands.check import examine, problems
from penstock.gateway.app import open_store
from penstock.gateway.model.span import Span
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import TapeError

KILLS = 5
AGENTS = 8
STREAM = events_head() + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + chunk(b"")
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\nuntil the end"


@pytest.mark.timeout(300)
async def test_what_was_received_is_on_the_tape(tmp_path: Path, processes: ForkServerContext) -> None:
    rng = random.Random(7)
    received: list[str] = []
    answers = [reply(200, b'{"x":1}'), STREAM]
    script: Script = [step for number in range(2000) for step in (request(), send(answers[number % 2]))]
    # The first call is never answered.
    async with odd([request()], script) as upstream:
        config: dict[str, Any] = {
            "upstream": [{"name": "up", "base_url": upstream.url + "/v1"}],
            "tape": {"record": "strict"},
        }
        for life in range(KILLS):
            with forked(processes, tmp_path, **config) as (url, process):
                enough = len(received) + rng.randrange(1, 60)
                done = asyncio.Event()

                def note(name: str, enough: int = enough, done: asyncio.Event = done) -> None:
                    received.append(name)
                    if len(received) >= enough:
                        done.set()

                agents = [asyncio.ensure_future(agent(url, f"{life}-{number}", note)) for number in range(AGENTS)]
                await done.wait()
                await (await upstream.connection(0)).finished.wait()
                process.kill()
                await asyncio.gather(*agents)
        asked = {body_of(call).decode() for connection in upstream.connections for call in connection.requests}
    assert examine(tmp_path)[1] == []
    with open_store(tmp_path) as store:
        assert list(problems(store)) == []
        kept = {request_of(store, span): span.status for _, span in store.recent()}
    lost = {name for name in received if kept.get(name) != "ok"}
    print(f"{len(received)} answers received over {KILLS} kills, {len(lost)} lost; {len(asked)} calls asked upstream")
    assert len(received) == len(set(received)) >= KILLS
    assert lost == set()
    assert asked - kept.keys() == set()
    assert {kept[name] for name in asked} == {"ok", "interrupted"}


def request_of(store: Store, span: Span) -> str:
    exchange = some(store.exchange(span))
    return exchange.request_body.decode()


async def agent(url: str, name: str, note: Any) -> None:
    """Calls until the gateway is gone; notes the calls whose answer it has had to the last byte."""
    try:
        async with connect(url) as client:
            for number in range(1000):
                client.send(post(f"/rollout/{name}/attempt/a1{CHAT}", f"{name}-{number}".encode()))
                await client.message()
                note(f"{name}-{number}")
    except (AssertionError, OSError):
        return


# -- what is held back -------------------------------------------------------------------------------------------------


class Held:
    """A store whose commits of calls that are over wait for the test."""

    def __init__(self, rig: Inside, announcements: bool = False) -> None:
        """`announcements`: those wait too."""
        self._announcements = announcements
        self.waits = threading.Event()
        self._write = rig.gateway.store.write
        self._loop = asyncio.get_running_loop()
        self.go = asyncio.Event()
        self.error: TapeError | None = None
        rig.gateway.store.write = self.write  # type: ignore[method-assign]

    def write(self, entries: Any, between: Any) -> int:
        if not self._announcements and all(entry.status == "open" for entry in entries):
            return self._write(entries, between)
        self.waits.set()
        asyncio.run_coroutine_threadsafe(self.go.wait(), self._loop).result()
        if self.error is not None:
            raise self.error
        return self._write(entries, between)


@pytest.mark.parametrize("answer", [reply(200, b"{}"), STREAM, UNTIL_CLOSE, reply(204, b"")], ids=range(4))
async def test_only_the_last_byte_waits(http: aiohttp.ClientSession, tmp_path: Path, answer: bytes) -> None:
    async with inside(tmp_path, http, tape={"record": "strict"}) as rig:
        held = Held(rig)
        async with rig.upstream([request(), send(answer), close()]), rig.client() as client:
            client.send(rig.call())
            if answer is UNTIL_CLOSE:
                await client.until(b"until the end")
            else:
                assert await client.exactly(len(answer) - 1) == answer[:-1]
            while rig.gateway.proxy.running:
                await rig.tape.get("/healthz")
            before = client.end, bytes(client.received)
            held.go.set()
            assert before[0] == "open"
            assert answer is UNTIL_CLOSE or before[1] == answer[:-1]
            assert await client.rest() == b"" if answer is UNTIL_CLOSE else await client.exactly(1) == answer[-1:]


async def test_so_does_an_answer_of_the_gateways_own(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with inside(tmp_path, http, tape={"record": "strict"}) as rig:
        held = Held(rig)
        async with rig.upstream([request(), close()]), rig.client() as client:
            client.send(rig.call())
            await client.until(b"closed the connection")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.message()
            held.go.set()
            await client.when(lambda: client.received.endswith(b"}"))
        assert (await rig.tape.spans("inside", 1))[0].http_status == 502


@pytest.mark.parametrize(("mode", "arrives"), [("online", True), ("train", False)])
async def test_when_it_cannot_be_recorded_the_mode_decides(
    http: aiohttp.ClientSession, tmp_path: Path, mode: str, arrives: bool
) -> None:
    async with inside(tmp_path, http, tape={"record": "strict"}) as rig:
        held = Held(rig)
        held.go.set()
        held.error = TapeError("disk full")
        answer = reply(200, b"{}")
        async with rig.upstream([request(), send(answer)]), rig.client() as client:
            client.send(post(f"/proxy/rollout/inside/attempt/a1/mode/{mode}/openai{CHAT}", b"{}"))
            if arrives:
                assert await client.message() == answer
            else:
                assert await client.rest() == answer[:-1]
        held.error = None
        assert (await rig.tape.get("/api/stats"))["gaps"] == 1


@pytest.mark.parametrize("mode", ["online", "train"])
async def test_nothing_is_sent_that_the_tape_cannot_announce(
    http: aiohttp.ClientSession, tmp_path: Path, mode: str
) -> None:
    """Where the mode refuses gaps; otherwise it is sent, as without `strict`."""
    async with inside(tmp_path, http, tape={"record": "strict"}) as rig:

        def fail(*_: object) -> int:
            raise TapeError("disk full")

        rig.gateway.store.write = fail  # type: ignore[method-assign]
        answer = reply(200, b"{}")
        async with rig.upstream([request(), send(answer)]) as upstream, rig.client() as client:
            client.send(post(f"/proxy/rollout/inside/attempt/a1/mode/{mode}/openai{CHAT}", b"{}"))
            if mode == "online":
                assert await client.message() == answer
            else:
                refusal = await client.message()
                assert refusal.startswith(b"HTTP/1.1 503 ")
                assert b"mode 'train' refuses calls that are not: disk full" in refusal
                assert upstream.connections == []


async def test_a_client_that_leaves_while_its_call_is_announced(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with inside(tmp_path, http, tape={"record": "strict"}) as rig:
        held = Held(rig, announcements=True)
        async with rig.upstream([request()]) as upstream, rig.client() as client:
            client.send(rig.call())
            await asyncio.to_thread(held.waits.wait)
            client.abort()
            while rig.gateway.proxy.running:
                await rig.tape.get("/healthz")
            held.go.set()
            (span,) = await rig.tape.spans("inside", 1)
            assert span.status == "cancelled"
            assert upstream.connections == []


async def test_a_client_that_leaves_before_its_last_byte(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with inside(tmp_path, http, tape={"record": "strict"}) as rig:
        held = Held(rig)
        answer = reply(200, b"{}")
        async with rig.upstream([request(), send(answer)]), rig.client() as client:
            client.send(rig.call())
            await client.exactly(len(answer) - 1)
            client.abort()
            held.go.set()
            (span,) = await rig.tape.spans("inside", 1)
        assert span.status == "ok"
