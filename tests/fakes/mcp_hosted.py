"""A server of tools that the gateway hosts, and its processes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
from fakes.mcp_wire import Client, call
from fakes.process import PATIENCE, Gateway
from fakes.rig import based
from fakes.tape import Tape
from fakes.waiting import until

SCRIPT = Path(__file__).parent / "mcp_stdio_server.py"
MODERN = "2026-07-28"


@dataclass(frozen=True)
class Hosted:
    """A server of this name, and what belongs to it: rollouts, and processes by the mark in their command."""

    gateway: Gateway
    http: aiohttp.ClientSession
    mark: str
    name: str = "evil"

    @property
    def tape(self) -> Tape:
        """What the gateway has recorded."""
        return Tape(self.gateway.url, self.http)

    def rollout(self, which: str = "r1") -> str:
        """One that no other server has."""
        return f"{which}-{self.name}"

    def client(self, which: str = "r1", attempt: str = "a1") -> Client:
        """A client whose calls belong to this rollout."""
        return Client(f"{self.gateway.address(self.rollout(which), attempt)}/mcp/{self.name}", self.http, {})

    def nobody(self) -> Client:
        """A client that names no rollout."""
        return Client(f"{self.gateway.url}/mcp/{self.name}", self.http, {})

    async def opened(self, which: str = "r1") -> Client:
        """One that has begun a session."""
        made = self.client(which)
        await made.open()
        return made

    def modern(self, which: str = "r1") -> Client:
        """A client of the revision without sessions."""
        made = self.client(which)
        made.headers["MCP-Protocol-Version"] = MODERN
        return made

    async def end(self, client: Client) -> int:
        """The status of the answer to the end of a session."""
        async with self.http.delete(client.url, headers=client.headers) as ended:
            return ended.status

    async def gone(self) -> None:
        """Comes back when no process of a server is left."""
        await until_left(self.mark, 0)


async def until_left(mark: str, count: int) -> None:
    """Comes back when so many processes with the mark in their command are left."""

    async def so_many_are_left() -> bool:
        return len(await asyncio.to_thread(processes, mark)) == count

    await until(so_many_are_left)


def processes(mark: str) -> dict[int, str]:
    """Processes with the mark in their command."""
    found = dict[int, str]()
    for path in Path("/proc").iterdir():
        try:
            command = (path / "cmdline").read_bytes() if path.name.isdigit() else b""
        except OSError:
            continue
        if mark.encode() in command:
            found[int(path.name)] = command.replace(b"\0", b" ").decode()
    return found


Habits = tuple[str, ...]
"""Settings of a server, and what it does that it should not."""


@contextmanager
def hosting(home: Path, servers: Mapping[str, Habits]) -> Generator[Callable[[str, aiohttp.ClientSession], Hosted]]:
    """A gateway process that hosts these servers; each is found by its name."""
    run = uuid4().hex
    text = "".join(config(f"{run}-{name}.", *habits, name=name) for name, habits in servers.items())
    with based(home, text) as base:
        gateway = Gateway(home / "penstock.toml", base.data, base.log_path, url=base.url)
        yield lambda name, http: Hosted(gateway, http, f"{run}-{name}.", name)


def config(mark: str, more: str = "", *habits: str, name: str = "evil") -> str:
    """A gateway that hosts the server. `more`: further settings of it."""
    command = f"command = {json.dumps([sys.executable, str(SCRIPT), mark, *habits])}\n" * ("command" not in more)
    return f"[mcp.servers.{name}]\n{command}{more}\n"


async def text(client: Client, tool: str, arguments: Any = None, id: Any = 1) -> str:
    """What a tool says, whose answer comes alone."""
    status, body = await client.say(call(tool, arguments, id))
    assert status == 200, body
    return json.loads(body)["result"]["content"][0]["text"]


async def error(client: Client, tool: str, id: Any = 1) -> dict[str, Any]:
    """The error of a tool, whose answer comes alone."""
    status, body = await client.say(call(tool, id=id))
    assert status == 200, body
    return json.loads(body)["error"]


async def events(response: aiohttp.ClientResponse, count: int) -> list[Any]:
    """The messages of so many events."""
    found = list[Any]()
    async with asyncio.timeout(PATIENCE):
        while len(found) < count:
            line = await response.content.readline()
            assert line, f"the stream ended after {found}"
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
    return found
