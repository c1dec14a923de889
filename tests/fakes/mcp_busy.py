"""A server of tools and its clients under load: every way in which a call may end, decided by the name of the tool.

    echo, fails, refused   JSON: a result, a result that is an error, an error
    stream                 a stream: progress, then the result
    ask                    a stream: asks the client (sampling/createMessage), then the result
    later                  a numbered stream that ends without the answer, which a resumed one brings
    drop                   a stream that the client cancels; it ends without the answer
    hang                   no answer; the client leaves
    dies, half             the server's connection breaks: before the answer, in the middle of it

`play` makes the calls of one session and says what must be on the tape for them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
from aiohttp import web
from fakes.mcp_wire import ACCEPT, INITIALIZE, Json, answer, call, event, said
from fakes.web_site import event_stream, site

TOOLS = ("echo", "fails", "refused", "stream", "ask", "later", "drop", "hang", "dies", "half")
Told = tuple[str, str, str | None]
"""Of a span: name, status, error."""
ENDS: dict[str, tuple[str, str | None]] = {
    "fails": ("error", "tool_error"),
    "refused": ("error", "rpc_error"),
    "drop": ("cancelled", "client_cancelled"),
    "hang": ("cancelled", "client_gone"),
    "dies": ("error", "upstream_closed"),
    "half": ("error", "upstream_closed"),
}


@dataclass
class Events:
    """What a session's listeners are told. All is kept: who comes after a listener that just left misses nothing."""

    told: list[bytes] = field(default_factory=list[bytes])
    """The event of number N at N - 1."""
    more: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, message: Json) -> None:
        """One more event."""
        self.told.append(event(message, len(self.told) + 1))
        self.more.set()
        self.more = asyncio.Event()

    async def after(self, number: int) -> AsyncGenerator[bytes]:
        """The events behind this one, as they come, without an end."""
        while True:
            more = self.more
            for data in self.told[number:]:
                yield data
                number += 1
            await more.wait()


@dataclass
class Busy:
    """The server. Its sessions are known by what their clients listen for."""

    url: str = ""
    sessions: dict[str, Events] = field(default_factory=dict[str, "Events"])
    reached: dict[tuple[str, Any], asyncio.Event] = field(default_factory=dict[tuple[str, Any], asyncio.Event])
    """Calls that hang, by session and id."""
    asked: dict[str, asyncio.Future[Json]] = field(default_factory=dict[str, asyncio.Future[Json]])
    """What it has asked clients."""
    made: int = 0

    def reach(self, session: str, id: Any) -> asyncio.Event:
        """Set when a call is here."""
        return self.reached.setdefault((session, id), asyncio.Event())

    async def post(self, request: web.Request) -> web.StreamResponse:
        """A message of a client."""
        sent: Json = await request.json()
        session = request.headers.get("Mcp-Session-Id", "")
        if sent.get("method") == "initialize":
            self.made += 1
            session = f"session-{self.made}"
            self.sessions[session] = Events()
            return web.json_response(answer(sent, {}), headers={"Mcp-Session-Id": session})
        if session not in self.sessions:
            return web.Response(status=404)
        if sent.get("method") == "notifications/cancelled":
            self.reach(session, (sent["params"]["requestId"], "unwanted")).set()
        if "result" in sent:
            self.asked.pop(sent["id"]).set_result(sent["result"])
        return (
            await self._call(request, sent, session) if "id" in sent and "method" in sent else web.Response(status=202)
        )

    async def _call(self, request: web.Request, sent: Json, session: str) -> web.StreamResponse:
        name = sent["params"]["name"]
        if name in ("echo", "fails"):
            return web.json_response(answer(sent, said("x", name == "fails")))
        if name == "refused":
            return web.json_response({"jsonrpc": "2.0", "id": sent["id"], "error": {"code": -32602, "message": "no"}})
        self.reach(session, sent["id"]).set()
        if name in ("hang", "dies"):
            if name == "dies" and request.transport is not None:
                request.transport.abort()
            await asyncio.Event().wait()
        stream = await event_stream(request)
        progress = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": 1, "progress": 1}}
        events = self.sessions[session]
        await stream.write(event(progress, len(events.told) if name == "later" else None))
        if name == "half" and request.transport is not None:
            request.transport.abort()
        elif name == "drop":
            await self.reach(session, (sent["id"], "unwanted")).wait()
        elif name == "later":
            events.tell(answer(sent, said("late")))
        else:
            if name == "ask":
                id = f"s-{session}-{sent['id']}"
                self.asked[id] = asyncio.get_running_loop().create_future()
                asking = {"jsonrpc": "2.0", "id": id, "method": "sampling/createMessage", "params": {"maxTokens": 5}}
                await stream.write(event(asking))
                _ = await self.asked[id]
            await stream.write(event(answer(sent, said("done"))))
        return stream

    async def listen(self, request: web.Request) -> web.StreamResponse:
        """A stream that brings what is still to be told."""
        events = self.sessions.get(request.headers.get("Mcp-Session-Id", ""))
        if events is None:
            return web.Response(status=404)
        stream = await event_stream(request)
        async for data in events.after(int(request.headers["Last-Event-ID"])):
            await stream.write(data)
        return stream

    async def delete(self, request: web.Request) -> web.Response:
        """The end of a session."""
        found = self.sessions.pop(request.headers.get("Mcp-Session-Id", ""), None)
        return web.Response(status=404 if found is None else 200)

    async def sse(self, request: web.Request) -> web.StreamResponse:
        """HTTP with SSE."""
        self.made += 1
        events = self.sessions[f"older-{self.made}"] = Events()
        stream = await event_stream(request)
        await stream.write(b"event: endpoint\ndata: /messages?sessionId=older-%d\n\n" % self.made)
        async for data in events.after(0):
            await stream.write(data)
        return stream

    async def message(self, request: web.Request) -> web.Response:
        """A message of HTTP with SSE; `hang` is never answered."""
        sent: Json = await request.json()
        if sent["params"]["name"] != "hang":
            self.sessions[request.query["sessionId"]].tell(answer(sent, said("x", sent["params"]["name"] == "fails")))
        return web.Response(status=202)


@asynccontextmanager
async def busy_server() -> AsyncGenerator[Busy]:
    """A server on a free port."""
    made, app = Busy(), web.Application()
    app.router.add_post("/mcp", made.post)
    app.router.add_get("/mcp", made.listen)
    app.router.add_delete("/mcp", made.delete)
    app.router.add_get("/sse", made.sse)
    app.router.add_post("/messages", made.message)
    async with site(app) as made.url:
        yield made


@dataclass
class Player:
    """The client of one session."""

    server: Busy
    http: aiohttp.ClientSession
    url: str
    told: dict[int, Told] = field(default_factory=dict[int, Told])
    """What must be on the tape of its calls, by id: those that came to the end that they were to have."""
    began: set[int] = field(default_factory=set[int])
    others: list[Told] = field(default_factory=list[Told])
    """What must be on the tape besides."""
    headers: dict[str, str] = field(default_factory=lambda: dict(ACCEPT))

    async def play(self, rng: Random, calls: int) -> None:
        """A session of streamable HTTP."""
        async with self.http.post(self.url, json=INITIALIZE, headers=self.headers) as reply:
            self.headers["Mcp-Session-Id"] = reply.headers["Mcp-Session-Id"]
        self.others.append(("initialize", "ok", None))
        for id in range(1, calls + 1):
            await self.one(rng.choice(TOOLS), id)
        async with self.http.delete(self.url, headers=self.headers) as reply:
            assert reply.status == 200
        self.others.append(("end session", "ok", None))

    async def one(self, tool: str, id: int) -> None:
        """One call to its end."""
        self.began.add(id)
        if tool == "hang":
            leaving = asyncio.ensure_future(self._say(call(tool, id=id)))
            here = asyncio.ensure_future(self.server.reach(self.headers["Mcp-Session-Id"], id).wait())
            await asyncio.wait([leaving, here], return_when=asyncio.FIRST_COMPLETED)
            if not here.done():  # The gateway is gone.
                here.cancel()
                await leaving
            leaving.cancel()
            await asyncio.wait([leaving])
        else:
            with suppress(*([aiohttp.ClientPayloadError] if tool == "half" else [])):
                await self._call(tool, id)
        status, error = ENDS.get(tool, ("ok", None))
        self.told[id] = f"tools/call {tool}", status, error

    async def _call(self, tool: str, id: int) -> None:
        last = b""
        async with self.http.post(self.url, json=call(tool, id=id), headers=self.headers) as reply:
            assert reply.status == (502 if tool == "dies" else 200), (tool, reply.status)
            async for line in reply.content:
                if b"sampling/createMessage" in line:
                    result = {"role": "assistant", "content": {"type": "text", "text": "yes"}}
                    await self._say(answer(json.loads(line[6:]), result))
                    self.others += [("sampling/createMessage", "ok", None), ("answer", "ok", None)]
                elif tool == "later" and line.startswith(b"id: "):
                    last = line[4:].strip()
                elif tool == "drop" and b"progress" in line:
                    unwanted = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}
                    await self._say(unwanted)
                    self.others.append(("notifications/cancelled", "ok", None))

        if tool == "later":
            await self._resume(last.decode())

    async def _resume(self, last: str) -> None:
        headers = self.headers | {"Last-Event-ID": last}
        async with self.http.get(self.url, headers=headers) as stream:
            assert b"late" in await stream.content.readuntil(b"\n\n")
        self.others.append(("listen", "ok", None))

    async def _say(self, message: Json) -> None:
        async with self.http.post(self.url, json=message, headers=self.headers) as reply:
            assert reply.status in (200, 202)
            await reply.read()

    async def play_older(self, rng: Random, calls: int) -> None:
        """A session of HTTP with SSE. Its last call is not answered when the client leaves."""
        base = self.url.partition("/rollout/")[0]
        async with self.http.get(self.url, headers={"Accept": "text/event-stream"}) as stream:
            path = (await stream.content.readuntil(b"\n\n")).split(b"data: ")[1].strip().decode()
            for id in range(1, calls + 1):
                tool = "hang" if id == calls else rng.choice(("echo", "fails"))
                self.began.add(id)
                async with self.http.post(base + path, json=call(tool, id=id)) as reply:
                    assert reply.status == 202
                if tool != "hang":
                    _ = await stream.content.readuntil(b"\n\n")
                ends = ENDS | {"hang": ("error", "ended_early")}
                status, error = ends.get(tool, ("ok", None))
                self.told[id] = f"tools/call {tool}", status, error
        self.others.append(("listen", "ok", None))
