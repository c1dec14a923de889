"""Further clients, unmodified: the inspector, and the older line of the official SDK. They see the same as directly."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from conformance import suite
from fakes import environments
from fakes.ports import steady_ports
from fakes.process import PATIENCE, ROOT, running
from fakes.tape import Tape
from fakes.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.conformance,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.xdist_group("conformance"),
    pytest.mark.timeout(600),
]
SERVER = ROOT / "tests" / "fakes" / "mcp_sdk_server.py"
OLDER = environments.python("mcp1")
INSPECTOR = suite.MODULES / "@modelcontextprotocol" / "inspector" / "clients" / "launcher" / "build" / "index.js"
TRANSPORTS = {"http": "streamable-http", "sse": "sse"}
ASKED: dict[str, list[str]] = {
    "tools": ["--method", "tools/list"],
    "add": ["--method", "tools/call", "--tool-name", "add", "--tool-arg", "a=1", "--tool-arg", "b=2"],
    "broken": ["--method", "tools/call", "--tool-name", "broken"],
    "prompts": ["--method", "prompts/list"],
    "prompt": ["--method", "prompts/get", "--prompt-name", "greeting", "--prompt-args", "name=Ada"],
    "resources": ["--method", "resources/list"],
    "resource": ["--method", "resources/read", "--uri", "note://today"],
}
"""What the inspector is asked, each in a process of its own."""
SERVERS = dict[str, str]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers() -> AsyncGenerator[SERVERS]:
    """URLs of a server of each transport."""
    ports = steady_ports(2)
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, SERVER, str(port), kind, stderr=asyncio.subprocess.DEVNULL)
        for port, kind in zip(ports, TRANSPORTS.values(), strict=True)
    ]
    try:
        for port in ports:
            await until(lambda port=port: listening(port))
        yield {"http": f"http://127.0.0.1:{ports[0]}/mcp", "sse": f"http://127.0.0.1:{ports[1]}/sse"}
    finally:
        for process in processes:
            process.kill()
            _ = await process.wait()


async def listening(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def output(*command: str | Path) -> tuple[int | None, Any]:
    """Exit status and what was printed, as JSON where it is."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    async with asyncio.timeout(PATIENCE):
        told, errors = await process.communicate()
    try:
        return process.returncode, json.loads(told)
    except ValueError:
        return process.returncode, (told + errors).decode()


def through(url: str, name: str) -> str:
    return f"{url}/rollout/{name}/attempt/a1/mcp/{name}"


def config(servers: SERVERS) -> str:
    return "".join(f'[mcp.servers.{name}]\nurl = "{url}"\n' for name, url in servers.items())


async def test_the_older_sdk_sees_the_same(servers: SERVERS, tmp_path: Path) -> None:
    if not environments.installed("mcp1"):
        pytest.skip("`make install-mcp` installs it")
    script = Path(__file__).parent / "older.py"
    async with running(tmp_path, config(servers)) as gateway, aiohttp.ClientSession() as http:
        for transport, url in servers.items():
            status, direct = await output(OLDER, script, transport, url)
            assert (status, direct["add"]["structuredContent"]) == (0, {"result": 3}), direct
            assert direct["progress"] == [[1.0, 3.0], [2.0, 3.0], [3.0, 3.0]]
            assert "the answer to why" in str(direct["ask"])
            assert (0, direct) == await output(OLDER, script, transport, through(gateway.url, transport))
            spans = await Tape(gateway.url, http).when(transport, "a1", lambda spans: len(ended(spans)) == 4)
            assert {span.name: span.error for span in ended(spans)} == {
                "tools/call add": None,
                "tools/call count": None,
                "tools/call broken": "tool_error",
                "tools/call ask": None,
            }
            asked = [span for span in spans if span.name == "sampling/createMessage"]
            assert [str(span.status) for span in asked] == ["ok"]


def ended(spans: list[Any]) -> list[Any]:
    return [span for span in spans if span.kind == "tool" and span.end_ns is not None]


async def test_the_inspector_sees_the_same(servers: SERVERS, tmp_path: Path) -> None:
    node = suite.node()
    if node is None or not environments.installed("mcp"):
        pytest.skip("`make install-mcp` installs it")
    async with running(tmp_path, config(servers)) as gateway:
        for transport, url in servers.items():
            for what, asked in ASKED.items():
                direct, other = [
                    await output(node, INSPECTOR, "--cli", place, "--transport", transport, *asked)
                    for place in (url, through(gateway.url, transport))
                ]
                assert isinstance(direct[1], dict), (transport, what, direct)
                assert other == direct, (transport, what)
