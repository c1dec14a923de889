"""A server of tools on the official SDK: `python mcp_sdk_server.py PORT [streamable-http|sse|stdio]`.

`SAYS` in the environment stands for what it says of itself and of the tool `add`.
"""

from __future__ import annotations

import os
import sys
from typing import Literal, cast

import mcp_types as types
from mcp.server.mcpserver import Context, MCPServer

SAYS = os.environ.get("SAYS")
app = MCPServer("calculator", instructions=SAYS or "It adds.")


@app.tool(description=SAYS)
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@app.tool()
async def count(to: int, ctx: Context) -> str:
    """Counts, and reports how far it is."""
    for number in range(to):
        await ctx.report_progress(number + 1, to)
    return "counted"


@app.tool()
def broken() -> str:
    """Fails."""
    raise ValueError("it is broken")


@app.tool()
async def ask(question: str, ctx: Context) -> str:
    """Asks the client's model."""
    message = types.SamplingMessage(role="user", content=types.TextContent(type="text", text=question))
    told = await ctx.session.create_message([message], max_tokens=10)  # pyright: ignore[reportDeprecated]
    return told.content.text if isinstance(told.content, types.TextContent) else "no text"


@app.prompt()
def greeting(name: str) -> str:
    """Greets somebody."""
    return f"Say hello to {name}."


@app.resource("note://today")
def today() -> str:
    """What is to be done."""
    return "nothing"


if __name__ == "__main__":
    if sys.argv[2:] == ["stdio"]:
        app.run("stdio")
    else:
        transport = cast(Literal["streamable-http", "sse"], sys.argv[2] if len(sys.argv) > 2 else "streamable-http")
        app.run(transport, host="127.0.0.1", port=int(sys.argv[1]))
