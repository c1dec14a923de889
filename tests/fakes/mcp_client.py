"""The official SDK's client beside a `penstock mcp`: over stdio, or in the test's own process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, TextIO, cast

import mcp_types as types
from fakes.process import ROOT
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from penstock.gateway.client.client import Client as Control
from penstock.gateway.mcp_server.server import make_server


@asynccontextmanager
async def connected(
    url: str, *options: str, mode: str = "auto", errors: TextIO = sys.stderr, **env: str
) -> AsyncGenerator[Client]:
    """A client of a server that speaks to the gateway at `url`."""
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "penstock", "mcp", *options],
        env={"PENSTOCK_GATEWAY": url, "PYTHONPATH": str(ROOT), **env},
    )
    async with Client(stdio_client(server, errors), mode=mode) as client:
        yield client


@asynccontextmanager
async def beside(url: str, write: bool = False, key: str | None = None, mode: str = "auto") -> AsyncGenerator[Client]:
    """A client of the server of `penstock mcp` in this process. It lives in a task of its own: fixtures begin and end
    in different ones."""
    begun: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def live() -> None:
        async with Control(url, key) as control, Client(make_server(control, write), mode=mode) as client:
            begun.set_result(client)
            await over.wait()

    living = asyncio.ensure_future(live())
    await asyncio.wait([living, begun], return_when=asyncio.FIRST_COMPLETED)
    try:
        if living.done():
            await living
        yield begun.result()
    finally:
        over.set()
        await living


async def answered(client: Client, tool: str, **arguments: Any) -> tuple[dict[str, Any], str]:
    """(fields, text) of a good answer."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, text_of(result)
    fields: Any = result.structured_content
    assert isinstance(fields, dict)
    return cast("dict[str, Any]", fields), text_of(result)


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    """What is said of a call that cannot be answered."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error, text_of(result)
    assert result.structured_content is None
    return text_of(result)


def text_of(result: types.CallToolResult) -> str:
    """The text of an answer."""
    (content,) = result.content
    assert isinstance(content, types.TextContent)
    return content.text
