"""A server of tools on the official SDK: `python mcp_sdk_server.py PORT [streamable-http|sse|stdio]`.

Or in the test's own process: `serving`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
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
async def serving(listeners: Sequence[socket.socket], says: str | None = None) -> AsyncGenerator[None]:
    """Streamable HTTP at `/mcp` of the first, in this process, and HTTP with SSE at `/sse` of the second, in another,
    where an answer seldom comes before its question is taken. Both sockets go on listening when it is over."""
    import uvicorn

    first, second = listeners
    server = uvicorn.Server(uvicorn.Config(calculator(says).streamable_http_app(), log_level="error"))
    here = asyncio.ensure_future(server.serve([first.dup()]))
    command = (sys.executable, __file__, str(second.fileno()), "sse-here", says or "")
    there = await asyncio.create_subprocess_exec(*command, pass_fds=[second.fileno()])
    try:
        yield
    finally:
        server.should_exit = True
        there.kill()
        _ = await asyncio.gather(here, there.wait())


def main(place: str, transport: str = "streamable-http", says: str = "") -> None:
    """`place`: a port; of `sse-here`, the descriptor of a socket that listens."""
    app = calculator(says or None)
    if transport == "stdio":
        app.run("stdio")
    elif transport == "sse-here":
        import uvicorn

        uvicorn.run(app.sse_app(), fd=int(place), log_level="error")
    else:
        app.run(cast(Literal["streamable-http", "sse"], transport), host="127.0.0.1", port=int(place))


if __name__ == "__main__":
    main(*sys.argv[1:])
