"""A server of tools on the official SDK: `python mcp_sdk_server.py PORT [streamable-http|sse|stdio]`."""

from __future__ import annotations

import sys
from typing import Literal, cast

from mcp.server.mcpserver import Context, MCPServer

app = MCPServer("calculator", instructions="It adds.")


@app.tool()
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


if __name__ == "__main__":
    if sys.argv[2:] == ["stdio"]:
        app.run("stdio")
    else:
        transport = cast(Literal["streamable-http", "sse"], sys.argv[2] if len(sys.argv) > 2 else "streamable-http")
        app.run(transport, host="127.0.0.1", port=int(sys.argv[1]))
