"""A gateway of several workers before a provider, and what tests ask of a certain one of them."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from fakes.gateway_workers import workers
from fakes.process import Gateway, running, upstream, upstreams
from fakes.provider import Provider, serving
from fakes.raw import Wire, body_of, get, post
from fakes.tape import Tape

from penstock.console.commands.check import examine
from penstock.gateway.client.client import Client

ODD = '[[route]]\nmodel = "odd"\nupstream = "odd"\n\n'


@dataclass(frozen=True, slots=True)
class Team:
    """Calls of the model `odd` go where a test listens, all others to the provider."""

    gateway: Gateway
    provider: Provider
    odd: socket.socket
    http: aiohttp.ClientSession
    client: Client
    tape: Tape

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers, by their numbers."""
        return workers(self.gateway.pid)

    async def figure(self, line: str) -> float:
        """A figure of the metrics; 0 where there is none."""
        async with self.http.get(f"{self.gateway.url}/metrics") as answer:
            found = [it for it in (await answer.text()).splitlines() if it.startswith(line + " ")]
        return float(found[0].rpartition(" ")[2]) if found else 0.0

    async def rollouts(self) -> dict[str, dict[str, Any]]:
        """All that the tape has, by their ids."""
        await self.tape.written()
        return {one["id"]: one for one in (await self.tape.get("/api/rollouts?limit=1000"))["rollouts"]}


@asynccontextmanager
async def team(home: Path, *flags: str, config: str = "", env: dict[str, str] | None = None) -> AsyncGenerator[Team]:
    """One that is stopped at the end, and whose tape is whole then. `http` keeps no connection: workers may die."""
    key = (env or {}).get("PENSTOCK_ADMIN_KEY")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with socket.create_server(("127.0.0.1", 0)) as odd:
        own = upstream("odd", f"http://127.0.0.1:{odd.getsockname()[1]}/v1", "openai")
        async with (
            serving() as provider,
            aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(force_close=True)) as http,
            running(home, config + ODD + upstreams(openai=provider.openai_url) + own, *flags, env=env) as gateway,
            Client(gateway.url, key) as client,
        ):
            yield Team(gateway, provider, odd, http, client, Tape(gateway.url, http))
            assert await gateway.terminate() == 0
    assert examine(gateway.data)[1] == []


async def chat(wire: Wire, path: str, *messages: tuple[str, str]) -> str:
    """A call on a connection; what the model says."""
    said = [{"role": role, "content": content} for role, content in messages]
    wire.send(post(path, json.dumps({"model": "m", "messages": said}).encode(), host="127.0.0.1"))
    answer = await wire.message()
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return json.loads(body_of(answer))["choices"][0]["message"]["content"]


async def asked(wire: Wire, path: str) -> Any:
    """What the control API says on a connection."""
    wire.send(get(path, host="127.0.0.1"))
    return json.loads(body_of(await wire.message()))
