"""Replays real agent trajectories through a running gateway: the whole cost of the tape.

A scripted upstream answers as a provider does, headers and ids included; the gateway is a process of its own with its
default settings; agents send what the official SDK sends. *Raw* is what crossed the wire between upstream and gateway:
bodies and headers of both sides. *On disk* is the used part of the tape's file. Answers come at once (large commits) or
after a while (a call or few to a commit).
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from bench.trajectories import Agent, response_id, wire_answer

AGENTS = 10
"""Number of agents at work at the same time."""
HEADERS = {
    "Accept": "application/json",
    "User-Agent": "AsyncOpenAI/Python 3.52.0",
    "X-Stainless-Lang": "python",
    "X-Stainless-Package-Version": "3.52.0",
    "X-Stainless-OS": "Linux",
    "X-Stainless-Arch": "x64",
    "X-Stainless-Runtime": "CPython",
    "X-Stainless-Runtime-Version": "3.11.9",
    "Authorization": "Bearer sk-local-benchmark",
    "X-Stainless-Async": "async:asyncio",
    "x-stainless-retry-count": "0",
    "x-stainless-read-timeout": "600",
}


class Answering(Protocol):
    """A provider of chat completions."""

    async def answer(self, request: web.Request, /) -> web.StreamResponse: ...


class Upstream:
    """Gives each trajectory's request its answer, and counts the bytes on the wire."""

    def __init__(self, agents: list[Agent], delay: float) -> None:
        self._answers: defaultdict[bytes, list[Any]] = defaultdict(list)
        for agent in agents:
            for request, message in agent:
                self._answers[request].append(message)
        self._delay = delay
        self._rng = random.Random(5)
        self.raw = 0

    async def answer(self, request: web.Request) -> web.Response:
        asked, rng = await request.read(), self._rng
        took = self._delay * rng.uniform(0.5, 1.5)
        await asyncio.sleep(took)
        body = wire_answer(asked, self._answers[asked].pop(0), response_id(rng), rng)
        headers = {
            "openai-organization": "org-bench",
            "openai-processing-ms": str(int(took * 1000) + rng.randrange(9)),
            "openai-version": "2020-10-01",
            "x-ratelimit-limit-tokens": "30000000",
            "x-ratelimit-remaining-tokens": str(rng.randrange(29_900_000, 30_000_000)),
            "x-request-id": f"req_{rng.randbytes(16).hex()}",
        }
        response = web.Response(body=body, headers=headers, content_type="application/json")
        await response.prepare(request)
        sent = [*request.raw_headers, *((k.encode(), v.encode()) for k, v in response.headers.items())]
        self.raw += len(asked) + len(body) + sum(len(name) + len(value) + 4 for name, value in sent)
        return response


async def replay(agents: list[Agent], delay: float) -> tuple[int, int]:
    """Return (raw bytes, used bytes of the tape) of all calls of all agents."""
    upstream = Upstream(agents, delay)
    async with serving(upstream) as base_url, gateway(base_url) as url, aiohttp.ClientSession() as session:
        turns = asyncio.Semaphore(AGENTS)

        async def run(number: int, agent: Agent) -> None:
            async with turns:
                for request, _ in agent:
                    address = f"{url}/rollout/tau-{number}/attempt/a1/v1/chat/completions"
                    headers = HEADERS | {"Content-Type": "application/json"}
                    async with session.post(address, data=request, headers=headers) as response:
                        response.raise_for_status()
                        await response.read()

        await asyncio.gather(*(run(number, agent) for number, agent in enumerate(agents)))
        return upstream.raw, await used_bytes(session, url, sum(map(len, agents)))


async def used_bytes(session: aiohttp.ClientSession, url: str, calls: int) -> int:
    """Wait until every call is on the tape; return its bytes."""
    while True:
        async with session.get(f"{url}/api/stats", params={"spans": calls}) as response:
            stats = await response.json()
        if stats["totals"]["calls"] == calls:
            return stats["tape"]["used_bytes"]


@asynccontextmanager
async def serving(upstream: Answering) -> AsyncGenerator[str]:
    """Run the upstream on a free port; yield its base URL."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", upstream.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def gateway(base_url: str) -> AsyncGenerator[str]:
    """Run a gateway in front of the upstream; yield its URL."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "penstock.toml"
        config.write_text(f'[[upstream]]\nname = "openai"\nbase_url = "{base_url}"\ndialect = "openai"\n')
        command = [sys.executable, "-m", "penstock", "serve", "--config", str(config), "--data", folder, "--port", "0"]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout
        try:
            yield (await process.stdout.readline()).decode().split()[-1]
        finally:
            process.terminate()
            await process.wait()
