"""python -m bench.handover --streams 500 --restarts 20: does an upgrade break anything?

So many clients read streams through one gateway, one after the other, over connections that are kept, while SIGHUP has
it start anew so many times. Each stream is checked to its end. At the end: answers that broke off or were refused, the
longest time to a first byte while processes changed and between, and what the tape has of all calls.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Final

import aiohttp
from aiohttp import web

from penstock.console.commands.check import examine
from penstock.gateway.model.span import SpanStatus
from penstock.gateway.tape.store import Store

PIECES: Final = 10
"""Events of a stream."""
BETWEEN_S: Final = 0.5
"""Seconds between two events."""


@dataclass(slots=True)
class Seen:
    """The results that clients have seen."""

    whole: int = 0
    broken: list[str] = field(default_factory=list[str])
    first_bytes: list[float] = field(default_factory=list[float])
    """Seconds to the first byte of each answer."""


async def stream(request: web.Request) -> web.StreamResponse:
    """Answer a call as the provider: events at an even pace."""
    _ = await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number in range(PIECES):
        await response.write(b'data: {"choices":[{"index":0,"delta":{"content":"%d "}}]}\n\n' % number)
        await asyncio.sleep(BETWEEN_S)
    await response.write(b"data: [DONE]\n\n")
    return response


async def client(session: aiohttp.ClientSession, url: str, name: str, over: asyncio.Event, seen: Seen) -> None:
    """Read streams until `over` is set."""
    turn = 0
    while not over.is_set():
        turn += 1
        began = monotonic()
        try:
            body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": name}]}
            path = f"{url}/rollout/{name}/attempt/a{turn}/v1/chat/completions"
            async with session.post(path, json=body) as answer:
                pieces = [piece async for piece in answer.content.iter_any()]
                seen.first_bytes.append(monotonic() - began)
                told = b"".join(pieces)
                if answer.status != 200 or not told.endswith(b"data: [DONE]\n\n"):
                    raise aiohttp.ClientError(f"{answer.status} {told[-80:]!r}")
            seen.whole += 1
        except aiohttp.ClientError as error:
            seen.broken.append(f"{type(error).__name__}: {error}")


async def serve(home: Path, upstream: str) -> tuple[asyncio.subprocess.Process, str]:
    """Start a gateway; return its process and URL."""
    config = home / "penstock.toml"
    up = f'[[upstream]]\nname = "up"\nbase_url = "{upstream}/v1"\ndialect = "openai"\n'
    config.write_text(f"port = 0\n[limits]\ndrain_seconds = 120\n{up}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "serve", "--config", config, "--data", home / "data"),
        stdout=asyncio.subprocess.PIPE,
    )
    return process, await address(process)


async def address(process: asyncio.subprocess.Process) -> str:
    """Return the URL that the next serving process prints."""
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().split()[-1]


async def measure(streams: int, restarts: int, home: Path) -> Seen:
    """Run the provider, the gateway, the clients and the restarts; return what clients have seen."""
    application = web.Application()
    application.router.add_post("/v1/chat/completions", stream)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    process, url = await serve(home, f"http://127.0.0.1:{runner.addresses[0][1]}")
    seen, over = Seen(), asyncio.Event()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        clients = [asyncio.ensure_future(client(session, url, f"c{n}", over, seen)) for n in range(streams)]
        for number in range(restarts):
            began = monotonic()
            os.kill(process.pid, signal.SIGHUP)
            await address(process)
            print(f"restart {number + 1}: {monotonic() - began:.1f} s, {seen.whole} whole, {len(seen.broken)} broken")
        over.set()
        await asyncio.gather(*clients)
    process.terminate()
    await process.communicate()
    await runner.cleanup()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=__doc__)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--restarts", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        seen = asyncio.run(measure(asked.streams, asked.restarts, Path(folder)))
        _, problems = examine(Path(folder) / "data")
        with Store(Path(folder) / "data", readonly=True) as store:
            ends = [span.status for _, rollout in store.rollouts() for span in store.spans(rollout.id)]
    print(f"{seen.whole} answers whole, {len(seen.broken)} broken: {sorted(set(seen.broken))[:5]}")
    print(f"the tape: {ends.count(SpanStatus.OK)} ok of {len(ends)} calls, {len(problems)} problems")
    took = sorted(seen.first_bytes)
    print(f"a whole answer took {took[len(took) // 2]:.2f} s at the median, {took[-1]:.2f} s at most")


if __name__ == "__main__":
    main()
