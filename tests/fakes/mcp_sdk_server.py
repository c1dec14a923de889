"""A server of tools on the official SDK: `python mcp_sdk_server.py PORT [streamable-http|sse|stdio]`.

`SAYS` in the environment stands for what it says of itself and of the tool `add`.
"""

from __future__ import annotations

import os
import sys
from typing import Literal, cast

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


if __name__ == "__main__":
    if sys.argv[2:] == ["stdio"]:
        app.run("stdio")
    else:
        transport = cast(Literal["streamable-http", "sse"], sys.argv[2] if len(sys.argv) > 2 else "streamable-http")
        app.run(transport, host="127.0.0.1", port=int(sys.argv[1]))
