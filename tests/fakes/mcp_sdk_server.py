"""A server of tools on the official SDK: `python mcp_sdk_server.py PORT [streamable-http|sse|stdio]`.

Or in the test's own process: `serving`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal, cast

import mcp_types as types
from mcp.server.mcpserver import Context, MCPServer


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def count(to: int, ctx: Context) -> str:
    """Counts, and reports how far it is."""
    for number in range(to):
        await ctx.report_progress(number + 1, to)
    return "counted"


def broken() -> str:
    """Fails."""
    raise ValueError("it is broken")


async def ask(question: str, ctx: Context) -> str:
    """Asks the client's model."""
    message = types.SamplingMessage(role="user", content=types.TextContent(type="text", text=question))
    told = await ctx.session.create_message([message], max_tokens=10)  # pyright: ignore[reportDeprecated]
    return told.content.text if isinstance(told.content, types.TextContent) else "no text"


def greeting(name: str) -> str:
    """Greets somebody."""
    return f"Say hello to {name}."


def today() -> str:
    """What is to be done."""
    return "nothing"


def calculator(says: str | None = None) -> MCPServer:
    """The server. `says`: of itself and of the tool `add`."""
    app = MCPServer("calculator", instructions=says or "It adds.")
    app.add_tool(add, description=says)
    for tool in (count, broken, ask):
        app.add_tool(tool)
    _ = app.prompt()(greeting)
    _ = app.resource("note://today")(today)
    return app


@asynccontextmanager
async def serving(listener: socket.socket, says: str | None = None) -> AsyncGenerator[None]:
    """Streamable HTTP at `/mcp` and HTTP with SSE at `/sse`, on a socket that goes on listening when it is over."""
    import uvicorn

    made = calculator(says)
    app = made.streamable_http_app()
    app.router.routes.extend(made.sse_app().routes)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    serving = asyncio.ensure_future(server.serve([listener.dup()]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


if __name__ == "__main__":
    app = calculator()
    if sys.argv[2:] == ["stdio"]:
        app.run("stdio")
    else:
        transport = cast(Literal["streamable-http", "sse"], sys.argv[2] if len(sys.argv) > 2 else "streamable-http")
        app.run(transport, host="127.0.0.1", port=int(sys.argv[1]))
