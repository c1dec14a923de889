"""Heavy reads of the control API: few run at once, and nothing else waits for them."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import AsyncExitStack
from io import BytesIO
from typing import Final

import aiohttp
from fakes.local import Local
from fakes.memory_tape import MemoryTape, Serving, call, chat_exchange, serving
from fakes.process import PATIENCE, Gateway, forget_peak, memory_of
from fakes.raw import connect, get
from fakes.tape import Tape
from fakes.waiting import until

from penstock.gateway.api.pagination import AT_ONCE, HeavyReads
from penstock.gateway.api.rollouts import SHORT
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Exchange

COUNT, SIZE = 12, 2 << 20
CHEAP: Final = (
    "/healthz",
    "/readyz",
    "/metrics",
    "/api/queue",
    "/api/rollouts",
    "/api/rollouts/r0",
    "/api/rollouts/r0/spans",
    "/api/spans?filter=status:ok",
    "/api/changes?follow=false",
    "/api/rollouts/short/attempts/a1/spans/1",
    "/api/rollouts/short/attempts/a1/spans/1/request",
    "/api/rollouts/short/attempts/a1/transcript",
)
SPAN: Final = "/attempts/a1/spans/1"
HEAVY: Final = (
    f"/api/rollouts/r0{SPAN}",
    f"/api/rollouts/r1{SPAN}/request",
    f"/api/rollouts/r2{SPAN}/response",
    "/api/rollouts/r3/attempts/a1/transcript",
    "/api/rollouts/r4/exchanges",
    "/api/whole?ids=r5",
    "/api/rollouts/r6/diagnosis",
    "/api/rollouts/r7/attempts/a1/tools",
    "/api/rollouts?ids=r8&filter=text~hello",
    "/api/rollouts/r9/spans?filter=raw~hello",
)
"""Each of them reads the bytes of a rollout of its own."""


class SlowTape(MemoryTape):
    """One whose large calls are read only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.asked = list[str]()
        """Rollouts whose bytes were asked for."""
        for number in range(len(HEAVY)):
            self._say(f"r{number}", SHORT + 1)
        self._say("short", SHORT - 1000)

    def _say(self, rollout: str, size: int) -> None:
        said = chat_exchange([{"role": "user", "content": "hello"}], {"content": "hi"})
        self.add(call(1, rollout=rollout, request_bytes=size, response_bytes=10), said)

    def exchange(self, span: Span) -> Exchange | None:
        if span.rollout != "short":
            self.asked.append(span.rollout)
            assert self.open.wait(60)
        return super().exchange(span)


async def status_of(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(url) as response:
        await response.read()
        return response.status


def connected(served: Serving) -> int:
    assert served.runner.server is not None
    return len(served.runner.server.connections)


async def all_asked(tape: SlowTape, served: Serving, http: aiohttp.ClientSession) -> list[asyncio.Task[int]]:
    """One heavy read of each kind, once as many as may run are at work and the others wait."""
    reads = [asyncio.ensure_future(status_of(http, served.url + path)) for path in HEAVY]

    async def all_came() -> bool:
        return len(tape.asked) >= AT_ONCE and connected(served) == len(HEAVY)

    await until(all_came)
    return reads


async def test_few_run_at_once_and_no_cheap_read_waits(http: aiohttp.ClientSession) -> None:
    tape = SlowTape()
    async with serving(tape) as served:
        reads = await all_asked(tape, served, http)
        for path in CHEAP:
            assert await status_of(http, served.url + path) == 200, path
        assert len(tape.asked) == AT_ONCE
        assert not any(read.done() for read in reads)
        tape.open.set()
        assert await asyncio.gather(*reads) == [200] * len(HEAVY)
        assert set(tape.asked) == {f"r{number}" for number in range(len(HEAVY))}


async def test_nothing_is_read_for_a_client_that_has_left(http: aiohttp.ClientSession) -> None:
    tape = SlowTape()
    async with serving(tape) as served:
        reads = await all_asked(tape, served, http)
        working = set(tape.asked)
        for number, read in enumerate(reads):
            if f"r{number}" not in working:
                read.cancel()

        async def all_left() -> bool:
            return connected(served) == AT_ONCE

        await until(all_left)
        tape.open.set()
        done = await asyncio.gather(*reads, return_exceptions=True)
        assert done.count(200) == AT_ONCE
        assert await status_of(http, f"{served.url}/api/rollouts/r0{SPAN}") == 200
        assert set(tape.asked) == working | {"r0"}


async def test_those_who_wait_are_served_in_their_order() -> None:
    heavy, lock, begun = HeavyReads(), threading.Lock(), list[int]()

    def read(number: int) -> int:
        with lock:
            begun.append(number)
        return number

    assert await asyncio.gather(*(heavy.run(read, number) for number in range(200))) == list(range(200))
    # A thread may stand still before it begins, for however long, and holds one of the places meanwhile.
    for at, number in enumerate(begun):
        assert sum(later < number for later in begun[at + 1 :]) < AT_ONCE


# --- a gateway ---


def large(size: int, seed: int) -> bytes:
    """A request that has so many bytes; none of them is like another's."""
    said = [
        {"role": "user", "content": f"{seed} asks {number}: " + f"{seed * number:x} " * 600}
        for number in range(1, size // 4000)
    ]
    return json.dumps({"model": "m", "messages": said}).encode()


async def record(gateway: Gateway, http: aiohttp.ClientSession, *sizes: int) -> None:
    """Puts calls of these sizes on the tape: `r0`, `r1` ..."""
    for number, size in enumerate(sizes):
        body = BytesIO(large(size, number + 1))
        async with http.post(f"{gateway.openai(f'r{number}')}/chat/completions", data=body) as response:
            assert response.status == 200
    await Tape(gateway.url, http).written()


async def test_memory_does_not_grow_with_the_number_of_those_who_read(
    gateway: Gateway, http: aiohttp.ClientSession
) -> None:
    await record(gateway, http, *[SIZE] * COUNT)
    before = memory_of(gateway.pid)
    forget_peak(gateway.pid)
    paths = [
        f"/api/rollouts/r{number}{what}"
        for what in (SPAN, f"{SPAN}/request", "/attempts/a1/transcript", "/exchanges")
        for number in range(COUNT)
    ]
    reads = [asyncio.ensure_future(status_of(http, gateway.url + path)) for path in paths]
    small = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    async with http.post(f"{gateway.openai('small')}/chat/completions", json=small) as response:
        assert response.status == 200
    assert await asyncio.gather(*reads) == [200] * len(paths)
    assert memory_of(gateway.pid, "VmHWM") - before < 30 * AT_ONCE * SIZE


async def test_clients_that_take_nothing_keep_nobody_waiting(local: Local, http: aiohttp.ClientSession) -> None:
    await record(local, http, 24 << 20, SIZE)
    async with AsyncExitStack() as stack:
        for path in (f"{SPAN}/request", SPAN, "/exchanges"):
            for _ in range(2 * AT_ONCE):
                wire = await stack.enter_async_context(connect(local.url))
                wire.send(get(f"/api/rollouts/r0{path}", host="127.0.0.1"))
                await wire.when(lambda wire=wire: b"HTTP/1.1 200" in wire.received, PATIENCE)
                wire.transport.pause_reading()  # it takes no more than the beginning
            assert await status_of(http, f"{local.url}/api/rollouts/r1{path}") == 200
