"""A client on the older line of the official SDK (mcp 1.x), run by the environment that has it.

    .venv-mcp1/bin/python older.py http|sse URL

Uses everything that `fakes/mcp_sdk_server.py` offers and prints what it saw, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from mcp import ClientSession, types
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamablehttp_client


async def answer(context: Any, params: Any) -> Any:
    """The model of this client."""
    said = types.TextContent(type="text", text=f"the answer to {params.messages[0].content.text}")
    return types.CreateMessageResult(role="assistant", content=said, model="m")


async def main(transport: str, url: str) -> None:
    seen: list[Any] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        seen.append([done, total])

    opened = sse_client(url) if transport == "sse" else streamablehttp_client(url)
    async with opened as streams, ClientSession(*streams[:2], sampling_callback=answer) as session:
        begun = await session.initialize()
        found = {
            "version": begun.protocolVersion,
            "instructions": begun.instructions,
            "tools": (await session.list_tools()).model_dump(mode="json"),
            "add": (await session.call_tool("add", {"a": 1, "b": 2})).model_dump(mode="json"),
            "count": (await session.call_tool("count", {"to": 3}, progress_callback=progress)).model_dump(mode="json"),
            "broken": (await session.call_tool("broken", {})).model_dump(mode="json"),
            "ask": (await session.call_tool("ask", {"question": "why"})).model_dump(mode="json"),
            "prompts": (await session.list_prompts()).model_dump(mode="json"),
            "prompt": (await session.get_prompt("greeting", {"name": "Ada"})).model_dump(mode="json"),
            "resources": (await session.list_resources()).model_dump(mode="json"),
            "resource": (await session.read_resource(types.AnyUrl("note://today"))).model_dump(mode="json"),
        }
    print(json.dumps(found | {"progress": seen}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
