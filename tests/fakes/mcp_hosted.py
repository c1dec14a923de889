"""A server of tools that the gateway hosts, and its processes."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from fakes.mcp_wire import Client, call
from fakes.process import PATIENCE, Gateway

SCRIPT = Path(__file__).parent / "mcp_stdio_server.py"
MODERN = "2026-07-28"


@dataclass(frozen=True)
class Hosted:
    """A server that is called `evil`."""

    gateway: Gateway
    http: aiohttp.ClientSession
    mark: str

    def client(self, rollout: str = "r1", server: str = "evil") -> Client:
        """A client whose calls belong to this rollout."""
        return Client(f"{self.gateway.address(rollout)}/mcp/{server}", self.http, {})

    async def opened(self, rollout: str = "r1", server: str = "evil") -> Client:
        """One that has begun a session."""
        made = self.client(rollout, server)
        await made.open()
        return made

    def modern(self, rollout: str = "r1") -> Client:
        """A client of the revision without sessions."""
        made = self.client(rollout)
        made.headers["MCP-Protocol-Version"] = MODERN
        return made

    async def gone(self) -> None:
        """Comes back when no process of a server is left."""
        await until_left(self.mark, 0)


async def until_left(mark: str, count: int) -> None:
    """Comes back when so many processes with the mark in their command are left."""
    try:
        async with asyncio.timeout(PATIENCE):
            while len(await asyncio.to_thread(processes, mark)) != count:
                pass
    except TimeoutError:
        raise AssertionError(f"not {count} are left but {processes(mark)}") from None


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


def config(mark: str, more: str = "", *habits: str, name: str = "evil") -> str:
    """A gateway that hosts the server. `more`: further settings of it."""
    command = json.dumps([sys.executable, str(SCRIPT), mark, *habits])
    return f"[mcp.servers.{name}]\ncommand = {command}\n{more}\n"


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
