"""Servers of tools that an agent behind a sidecar calls by their own URLs."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes.mcp_wire import Asked, McpServer, mcp_server
from fakes.process import Gateway
from fakes.shell import PENSTOCK, Shell
from fakes.tape import Tape

from penstock.gateway.model.span import Span

SESSION = "mcp-session-id"
HTTP = """
import json, urllib.error, urllib.request
headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
def ask(url, message):
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, json.dumps(message).encode(), headers))
        headers["Mcp-Session-Id"] = answer.headers.get("Mcp-Session-Id") or headers.get("Mcp-Session-Id", "")
        return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("WWW-Authenticate")
start = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
ask("URL", {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": start})
call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo", "arguments": {"a": 1}}}
print(ask("URL", call))
print(ask("URL", call | {"params": {"name": "stream"}})[0])
print(ask("URL/other", call)[0])
"""
SSE = """
import json, urllib.request
stream = urllib.request.urlopen("URL")
named = [stream.readline() for _ in range(3)][1].decode().partition(": ")[2].strip()
print(named.partition("=")[0])
call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo", "arguments": {"a": 1}}}
from urllib.parse import urljoin
headers = {"Content-Type": "application/json"}
print(urllib.request.urlopen(urllib.request.Request(urljoin("URL", named), json.dumps(call).encode(), headers)).status)
print([stream.readline() for _ in range(2)])
"""


@dataclass
class Rig:
    server: McpServer
    gateway: Gateway
    folder: Path
    tape: Tape

    async def direct(self, script: str, url: str) -> bytes:
        """What an agent prints."""
        done = await Shell(self.gateway.url, self.folder, (sys.executable,)).run("-c", script.replace("URL", url))
        assert done.code == 0, done.err
        return done.out

    async def behind(self, script: str, url: str) -> bytes:
        """What it prints behind a sidecar."""
        host = url.split("/")[2]
        agent = ("--", sys.executable, "-c", script.replace("URL", url))
        shell = Shell(self.gateway.url, self.folder, PENSTOCK)
        done = await shell.run("sidecar", "--rollout", "r1", "--intercept", host, *agent)
        assert (done.code, done.err) == (0, "")
        return done.out


@pytest.fixture
async def rig(start_gateway: StartGateway, tmp_path: Path, http: aiohttp.ClientSession) -> AsyncGenerator[Rig]:
    async with mcp_server() as server:
        older = server.url.replace("/mcp", "/sse")
        text = f'[mcp.servers.tools]\nurl = "{server.url}"\nkey_env = "TOOLS_KEY"\n[mcp.servers.old]\nurl = "{older}"\n'
        gateway = await start_gateway(text, env={"TOOLS_KEY": "the-real-key"})
        yield Rig(server, gateway, tmp_path, Tape(gateway.url, http))


def steady(asked: list[Asked]) -> list[Asked]:
    """Without what differs from run to run, and without the key, which is the gateway's."""
    volatile = (SESSION, "authorization")
    return [
        (method, path.partition("?")[0], {name: value for name, value in headers.items() if name not in volatile}, body)
        for method, path, headers, body in asked
    ]


def rows(spans: list[Span]) -> list[tuple[str, str | None, str | None, int | None]]:
    return [(span.kind, span.name, span.upstream, span.http_status) for span in spans]


async def test_calls_of_a_server_are_those_of_its_name(rig: Rig) -> None:
    direct = await rig.direct(HTTP, rig.server.url)
    first, rig.server.asked = rig.server.asked, []
    assert await rig.behind(HTTP, rig.server.url) == direct
    assert steady(rig.server.asked) == steady(first) != []
    assert rows(await rig.tape.spans("r1", 4)) == [
        ("mcp", "initialize", "tools", 200),
        ("tool", "tools/call echo", "tools", 200),
        ("tool", "tools/call stream", "tools", 200),
        ("llm", None, "tools", 404),
    ]
    keys = [headers.get("authorization") for _, _, headers, _ in rig.server.asked]
    assert keys == ["Bearer the-real-key"] * 3 + [None]


async def test_the_path_that_an_older_server_names_is_its_own(rig: Rig) -> None:
    url = rig.server.url.replace("/mcp", "/sse")
    direct = await rig.direct(SSE, url)
    first, rig.server.asked = rig.server.asked, []
    assert await rig.behind(SSE, url) == direct
    assert b"/messages" in direct
    assert steady(rig.server.asked) == steady(first) != []
    found = {(span.kind, span.name, span.upstream) for span in await rig.tape.spans("r1", 2)}
    assert found == {("mcp", "listen", "old"), ("tool", "tools/call echo", "old")}


async def test_an_address_of_ours_is_nothing_on_another_host(rig: Rig) -> None:
    url = rig.server.url.replace("/mcp", "/mcp/tools")
    assert (await rig.behind(HTTP, url)).count(b"404") == 3
    assert {span.kind for span in await rig.tape.spans("r1", 4)} == {"llm"}
    assert not any("authorization" in json.dumps(headers) for _, _, headers, _ in rig.server.asked)
