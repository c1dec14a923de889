"""Gateways that stop, die and hand over while a call streams: an upstream whose answers end when the test says so, and
what is said and left of processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
from fakes.gateway_workers import served_by, workers
from fakes.odd import Odd, Script, request, send, wait
from fakes.process import PATIENCE, Gateway, children, command, upstream
from fakes.raw import Wire, chunk, events_head, post
from fakes.rig import CHAT, odd_on
from fakes.waiting import until

EVENT = chunk(b"data: 1\n\n")
END = chunk(b"data: [DONE]\n\n") + chunk(b"")
STREAM: Script = [request(), send(events_head() + EVENT), wait("go"), send(END)]


@asynccontextmanager
async def streaming() -> AsyncGenerator[tuple[Odd, str]]:
    """An upstream whose answers end when the test says so, and its configuration."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with odd_on(listener, STREAM) as odd:
            yield odd, upstream("up", f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "openai")


async def begin(wire: Wire, rollout: str, model: str = "m") -> None:
    """A call that streams from here on."""
    body = b'{"model":"%b","stream":true}' % model.encode()
    wire.send(post(f"/rollout/{rollout}/attempt/a1{CHAT}", body))
    await wire.until(EVENT)


def successors(pid: int) -> list[int]:
    """Processes that this one has started to take over, and that have not ended."""
    return [one for one in children(pid) if b"--take-over" in command(one)]


async def reload(gateway: Gateway) -> int:
    """Has it start another process; the id of that one, once it serves."""
    await gateway.reload()
    return successors(gateway.pid)[-1]


async def is_parent(gateway: Gateway) -> None:
    """Returns when it has served its last call, and is no more than the parent of the next process."""

    await until(lambda: b"penstock.gateway.process.parent" in command(gateway.pid))


async def next_line(gateway: Gateway) -> str:
    """What it, or the process that has taken over, prints next."""
    assert gateway.process is not None
    assert gateway.process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        return (await gateway.process.stdout.readline()).decode().strip()


async def exit_code(gateway: Gateway) -> int:
    """Of one that ends by itself, or was told to."""
    assert gateway.process is not None
    async with asyncio.timeout(PATIENCE):
        return await gateway.process.wait()


async def logged(gateway: Gateway, words: str) -> None:
    """Returns when it has logged these words."""
    await until(lambda: words in gateway.log)


async def turns_away(gateway: Gateway) -> None:
    """Returns when nobody can connect any more."""

    async def refuses() -> bool:
        async with aiohttp.ClientSession() as fresh:
            try:
                async with fresh.get(f"{gateway.url}/readyz", timeout=aiohttp.ClientTimeout(1)):
                    return False
            except aiohttp.ClientConnectorError:
                return True
            except (TimeoutError, aiohttp.ClientConnectionError):
                return False

    await until(refuses)


async def kill_worker(gateway: Gateway, number: int, wire: Wire | None = None) -> None:
    """Kills it; returns when another one has been started in its place. `wire`: a connection of it, which ends."""
    killed = workers(gateway.pid)[number]
    os.kill(killed, signal.SIGKILL)
    if wire is not None:
        assert await wire.gone() in ("eof", "reset")
    await is_there_again(gateway, number, killed)


async def is_there_again(gateway: Gateway, number: int, killed: int) -> None:
    """Returns when another worker has been started in the place of one that was killed."""
    await until(lambda: workers(gateway.pid).get(number) not in (None, killed))


async def answers_again(gateway: Gateway, number: int, call: bytes) -> None:
    """Returns when this worker, which could not be started for a while, has answered a call."""

    async def answers() -> bool:
        try:
            async with served_by(gateway, workers(gateway.pid).get(number, 0), tries=5) as wire:
                wire.send(call)
                return (await wire.message()).startswith(b"HTTP/1.1 200")
        except AssertionError:
            return False

    await until(answers)
