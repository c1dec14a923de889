"""Streams that only listen: nothing ends them but their two ends, and very many cost little."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic

import aiohttp
from conftest import StartGateway
from fakes.mcp_wire import Client, McpServer, call, config
from fakes.rig import inside

from bench.procfs import memory
from penstock.gateway.mcp.call import McpCall

DAY, LATE = 86_400.0, 3600.0
"""Seconds; nothing is late by itself while the test runs."""
STREAMS = 250
MOST = 32 << 10
"""Bytes of memory that a stream may cost here. 10,000 of them cost 12 KB each: python -m bench.mcp_streams."""


async def test_no_clock_ends_a_stream_that_listens(
    tmp_path: Path, http: aiohttp.ClientSession, server: McpServer
) -> None:
    """Not the sweep for calls, nor those for sessions, for clients and for connections, a day later."""
    servers = {"tools": {"url": server.url, "first_byte_timeout": LATE, "total_timeout": LATE}}
    async with inside(tmp_path, http, mcp={"servers": servers}, limits={"client_timeout": LATE}) as made:
        client = Client(f"{made.base.url}/rollout/r1/attempt/a1/mcp/tools", http, {})
        await client.open()
        async with client.listen() as stream:
            await server.listening.wait()
            hanging = asyncio.ensure_future(client.say(call("hang")))
            _ = await made.tape.open_span("r1", name="tools/call hang")
            (listening, _) = made.gateway.proxy.running
            assert isinstance(listening, McpCall)
            later = monotonic() + DAY
            made.gateway.proxy.sweep(later)
            made.gateway.mcp.sessions.sweep(later)
            made.gateway.mcp.servers.expire(later)
            assert (await hanging)[0] == 504, "any other call is late by then"
            assert list(made.gateway.proxy.running) == [listening]
            assert not listening.client.overdue(later, LATE)
            server.tell({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
            assert b"list_changed" in await stream.content.readuntil(b"\n\n")


async def test_a_stream_that_listens_costs_little(
    start_gateway: StartGateway, server: McpServer, http: aiohttp.ClientSession
) -> None:
    gateway = await start_gateway(config(server))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as many, AsyncExitStack() as open_streams:
        clients = [Client(f"{gateway.address(f'r{number}')}/mcp/tools", many, {}) for number in range(STREAMS)]

        async def listen(some: list[Client]) -> None:
            await asyncio.gather(*[one.open() for one in some])
            for one in some:
                stream = await open_streams.enter_async_context(one.listen())
                assert stream.status == 200

        # The first ones bring along what is needed once.
        await listen(clients[:100])
        before = memory(gateway.pid).anonymous
        await listen(clients[100:])
        each = (memory(gateway.pid).anonymous - before) * (1 << 20) / (STREAMS - 100)
    assert each < MOST, f"{each / 1024:.1f} KB a stream"
