"""A server of tools (MCP over streamable HTTP) that outlives the gateway. Every answer names the call that it is for.

echo      JSON
fails     JSON: a result that says that the tool has failed
stream    a stream: progress, then the result; a moment long, so that a kill comes in the middle of it
slow      the same, longer
later     a numbered stream that ends without the answer, which a resumed one brings
breaks    a stream that breaks off
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from uuid import uuid4

from aiohttp import web
from fakes.mcp_wire import Json, answer, event, said
from fakes.web_site import event_stream, site

TOOLS = ("echo", "echo", "echo", "fails", "stream", "stream", "slow", "later", "breaks")
PIECES, PIECE_S, SLOW_PIECE_S = 3, 0.01, 0.2
PROGRESS = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": 1, "progress": 1}}


def text_of(call: str) -> str:
    """What a call of this name is answered."""
    return f"{call} is done"


@dataclass(slots=True)
class ToolServer:
    """One that runs."""

    url: str = ""
    seen: dict[str, str] = field(default_factory=dict[str, str])
    """The tool of each call that has come, by the call's name."""
    late: dict[str, Json] = field(default_factory=dict[str, Json])
    """Answers that are told to whoever resumes, by the number of the last event that was told."""
    transports: set[asyncio.BaseTransport] = field(default_factory=set[asyncio.BaseTransport])

    def break_off(self) -> None:
        """Cuts every answer that is on its way, and every connection that is kept."""
        for transport in self.transports:
            if isinstance(transport, asyncio.Transport):
                transport.abort()
        self.transports.clear()

    async def post(self, request: web.Request) -> web.StreamResponse:
        """A message of a client."""
        if request.transport is not None:
            self.transports.add(request.transport)
        sent: Json = await request.json()
        if sent["method"] == "initialize":
            about: Json = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
            result = answer(sent, about | {"serverInfo": {"name": "histories", "version": "1"}})
            return web.json_response(result, headers={"Mcp-Session-Id": uuid4().hex})
        name, tool = sent["params"]["arguments"]["call"], sent["params"]["name"]
        self.seen[name] = tool
        told = answer(sent, said(text_of(name), tool == "fails"))
        return web.json_response(told) if tool in ("echo", "fails") else await self._stream(request, tool, told)

    async def _stream(self, request: web.Request, tool: str, told: Json) -> web.StreamResponse:
        stream = await event_stream(request)
        with suppress(ConnectionError):
            for _ in range(PIECES):
                await stream.write(event(PROGRESS))
                await asyncio.sleep(SLOW_PIECE_S if tool == "slow" else PIECE_S)
            if tool == "breaks" and request.transport is not None:
                request.transport.abort()
            elif tool == "later":
                number = len(self.late) + 1
                self.late[str(number)] = told
                await stream.write(event(PROGRESS, number))
            else:
                await stream.write(event(told))
        return stream

    async def end(self, request: web.Request) -> web.Response:
        """The end of a session."""
        return web.Response()

    async def resume(self, request: web.Request) -> web.StreamResponse:
        """The answer that an earlier stream did not bring."""
        stream = await event_stream(request)
        with suppress(ConnectionError):
            await stream.write(event(self.late[request.headers["Last-Event-ID"]]))
        return stream


@asynccontextmanager
async def serving() -> AsyncGenerator[ToolServer]:
    """A running one."""
    made, app = ToolServer(), web.Application()
    app.router.add_post("/mcp", made.post)
    app.router.add_get("/mcp", made.resume)
    app.router.add_delete("/mcp", made.end)
    async with site(app) as url:
        made.url = f"{url}/mcp"
        yield made
