"""The official SDK on both sides, unmodified: in both eras of the protocol, and over the older transport."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes.ports import steady_ports
from fakes.process import PATIENCE
from fakes.tape import Tape
from mcp import Client
from mcp.client.sse import sse_client

from penstock.gateway.model.span import Span

SERVER = Path(__file__).parents[2] / "fakes" / "mcp_sdk_server.py"


@pytest.fixture
async def servers() -> AsyncGenerator[list[str]]:
    """Base URLs of a server of streamable HTTP and of one of HTTP with SSE."""
    ports = steady_ports(2)
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, SERVER, str(port), transport, stderr=asyncio.subprocess.DEVNULL
        )
        for port, transport in zip(ports, ("streamable-http", "sse"), strict=True)
    ]
    try:
        async with asyncio.timeout(PATIENCE):
            for port in ports:
                await listening(port)
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for process in processes:
            process.kill()
            _ = await process.wait()


async def listening(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return


async def used(client: Client) -> None:
    """An agent that uses each tool."""
    assert {tool.name for tool in (await client.list_tools()).tools} == {"add", "count", "broken", "ask"}
    assert (await client.call_tool("add", {"a": 1, "b": 2})).structured_content == {"result": 3}
    seen: list[float] = []

    async def noted(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)

    counted = await client.call_tool("count", {"to": 3}, progress_callback=noted)
    assert (counted.is_error, seen) == (False, [1, 2, 3])
    assert (await client.call_tool("broken", {})).is_error


def tools(spans: list[Span]) -> list[Span]:
    """Tool calls that are over."""
    return [span for span in spans if span.kind == "tool" and span.end_ns is not None]


TOOLS = [("tools/call add", None), ("tools/call count", None), ("tools/call broken", "tool_error")]


async def test_both_eras_and_both_transports(
    start_gateway: StartGateway, servers: list[str], http: aiohttp.ClientSession
) -> None:
    new, old = servers
    gateway = await start_gateway(f'[mcp.servers.new]\nurl = "{new}/mcp"\n[mcp.servers.old]\nurl = "{old}/sse"\n')
    tape = Tape(gateway.url, http)
    for mode in ("auto", "legacy"):
        async with Client(f"{gateway.address(mode)}/mcp/new", mode=mode) as client:
            await used(client)
    async with Client(sse_client(f"{gateway.address('sse')}/mcp/old"), mode="legacy") as client:
        await used(client)
    for rollout in ("auto", "legacy", "sse"):
        spans = await tape.when(rollout, "a1", lambda spans: len(tools(spans)) == 3)
        assert [(span.name, span.error) for span in tools(spans)] == TOOLS
    sessions = {str((span.attributes or {}).get("mcp.session.id")) for span in await tape.when("auto", "a1", bool)}
    assert sessions == {"None"}, "no session is invented where the protocol has none"
