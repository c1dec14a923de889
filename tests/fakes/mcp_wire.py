"""A server of tools on the wire of MCP, scripted: what it says is decided by the name of the tool.

    echo      JSON: the arguments as text
    stream    a stream: a notification of progress, then the result
    ask       a stream: asks the client (sampling/createMessage) and ends with what the client said
    later     a stream that numbers its events and ends without the answer, which comes to whoever listens from there on
    never     the same, and nothing comes
    hang      nothing at all, until it is let go
    fails     a result that is an error
    refused   an error of JSON-RPC
    busy      HTTP 503
    breaks    closes the connection without a word
    rounds    asks for input first (revision 2026-07-28), and says then what it was given

What it answers to any other request is in `results`, and how in `how`.

It has sessions, as servers up to revision 2025-11-25 do, where `sessions` is set. `/sse` is the older HTTP with SSE.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

import aiohttp
from aiohttp import web
from fakes.web_site import event_stream, site

Json = dict[str, Any]
How = Literal["json", "gzip", "stream", "later"]
Asked = tuple[str, str, dict[str, str], bytes]


@dataclass
class McpServer:
    """What it was asked, and what it will say."""

    url: str = ""
    sessions: bool = True
    tools: list[str] = field(default_factory=lambda: ["echo"])
    """Those that it lists."""
    open: dict[str, asyncio.Queue[bytes]] = field(default_factory=dict[str, asyncio.Queue[bytes]])
    """What the listeners of a session are still to be told."""
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(
        default_factory=list[tuple[str, str, dict[str, str], bytes]]
    )
    """(method, path with query, headers in lower case, body) of every request."""
    answered: asyncio.Queue[Json] = field(default_factory=asyncio.Queue[Json])
    """Answers of clients to its own requests."""
    listening: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody listens."""
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """A client has left a stream."""
    results: dict[str, Callable[[Json], Json]] = field(default_factory=dict[str, Callable[[Json], Json]])
    """By method: the result of a request."""
    raw: bytes = b""
    """Said in place of any result."""
    elsewhere: str = ""
    """Where clients are sent."""
    how: How = "json"
    """How results are brought: in a document, which may be packed although nobody asked for that, in a stream, or in a
    later stream."""

    def tell(self, message: Json, number: int = 0) -> None:
        """Says something to all who listen, or will."""
        for queue in self.open.values():
            queue.put_nowait(event(message, number))

    async def post(self, request: web.Request) -> web.StreamResponse:
        """A message of a client."""
        body = await self._note(request)
        sent: Json = json.loads(body)
        if (refusal := self._refusal(request, sent)) is not None:
            return refusal
        if "method" not in sent:
            self.answered.put_nowait(sent)
            return web.Response(status=202)
        if "id" not in sent:
            return web.Response(status=202)
        headers = dict[str, str]()
        if sent["method"] == "initialize" and self.sessions:
            headers["Mcp-Session-Id"] = made = uuid4().hex
            self.open[made] = asyncio.Queue()
        if sent["method"] == "tools/call":
            return await self._call(request, sent)
        if self.elsewhere:
            return web.Response(status=307, headers={"Location": self.elsewhere})
        if self.raw and self.how != "stream":
            return web.Response(body=self.raw, content_type="application/json")
        if self.how == "json" or (sent["method"] not in self.results and not self.raw):
            return web.json_response(answer(sent, self._plain(sent)), headers=headers)
        return await self._answer(request, answer(sent, self._plain(sent)))

    async def _answer(self, request: web.Request, told: Json) -> web.StreamResponse:
        if self.how == "gzip":
            packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            return web.Response(body=gzip.compress(json.dumps(told).encode()), headers=packed)
        stream = await event_stream(request)
        await stream.write(event({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}, 1))
        if self.how == "later":
            self.tell(told, 2)
        else:
            await stream.write(b"data: %b\n\n" % self.raw if self.raw else event(told))
        return stream

    def _refusal(self, request: web.Request, sent: Json) -> web.Response | None:
        if not self.sessions or sent.get("method") in ("initialize", "server/discover"):
            return None
        return None if request.headers.get("Mcp-Session-Id") in self.open else web.Response(status=404)

    def _plain(self, sent: Json) -> Json:
        if sent["method"] in self.results:
            return self.results[sent["method"]](sent)
        if sent["method"] == "initialize":
            return {
                "protocolVersion": "2025-11-25",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "f", "version": "1"},
            }
        if sent["method"] == "tools/list":
            about = {"description": "Says it again.", "inputSchema": {"type": "object"}}
            return {"tools": [{"name": name, **about} for name in self.tools]}
        return {}

    async def _call(self, request: web.Request, sent: Json) -> web.StreamResponse:
        name = sent["params"]["name"]
        if name == "refused":
            error = {"code": -32602, "message": "Unknown tool: refused"}
            return web.json_response({"jsonrpc": "2.0", "id": sent["id"], "error": error})
        if name in ("echo", "fails"):
            return web.json_response(answer(sent, said(sent["params"].get("arguments"), name == "fails")))
        if name == "rounds":
            return web.json_response(answer(sent, _round(sent["params"])))
        if name == "busy":
            return web.Response(status=503)
        if name == "breaks" and request.transport is not None:
            request.transport.abort()
        if name == "hang":
            await self.let_go.wait()
            return web.json_response(answer(sent, said("let go")))
        return await self._stream(request, sent, name)

    async def _stream(self, request: web.Request, sent: Json, name: str) -> web.StreamResponse:
        stream = await event_stream(request)
        if name == "stream":
            progress = {"progressToken": sent["id"], "progress": 1}
            await stream.write(event({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress}))
            await stream.write(event(answer(sent, said("done"))))
        elif name == "ask":
            asking = {"jsonrpc": "2.0", "id": "s-1", "method": "sampling/createMessage", "params": {"maxTokens": 5}}
            await stream.write(event(asking))
            told = await self.answered.get()
            await stream.write(event(answer(sent, said(told["result"]["content"]["text"]))))
        else:
            await stream.write(event({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}, 1))
            if name == "later":
                self.tell(answer(sent, said("at last")), 2)
        return stream

    async def listen(self, request: web.Request) -> web.StreamResponse:
        """A stream of what it has to say."""
        await self._note(request)
        session = request.headers.get("Mcp-Session-Id", "")
        if session not in self.open:
            return web.Response(status=404 if self.sessions else 405)
        stream = await event_stream(request)
        return await self._tell_all(stream, self.open[session])

    async def _tell_all(self, stream: web.StreamResponse, queue: asyncio.Queue[bytes]) -> web.StreamResponse:
        self.listening.set()
        try:
            while data := await queue.get():
                await stream.write(data)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        return stream

    async def delete(self, request: web.Request) -> web.Response:
        """The end of a session."""
        await self._note(request)
        found = self.open.pop(request.headers.get("Mcp-Session-Id", ""), None)
        return web.Response(status=404 if found is None else 200)

    async def sse(self, request: web.Request) -> web.StreamResponse:
        """HTTP with SSE: the first event names the path for messages."""
        await self._note(request)
        made = uuid4().hex
        self.open[made] = queue = asyncio.Queue[bytes]()
        stream = await event_stream(request)
        await stream.write(b"event: endpoint\ndata: /messages?sessionId=%b\n\n" % made.encode())
        return await self._tell_all(stream, queue)

    async def message(self, request: web.Request) -> web.Response:
        """A message of HTTP with SSE: its answer comes in the stream."""
        sent: Json = json.loads(await self._note(request))
        queue = self.open.get(request.query.get("sessionId", ""))
        if queue is None:
            return web.Response(status=404)
        if "id" in sent:
            result = said(sent["params"]["arguments"]) if sent["method"] == "tools/call" else self._plain(sent)
            queue.put_nowait(b"event: message\n" + event(answer(sent, result)))
        return web.Response(status=202)

    async def nothing(self, request: web.Request) -> web.Response:
        """Any other path."""
        await self._note(request)
        return web.Response(status=404)

    async def _note(self, request: web.Request) -> bytes:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.method, request.path_qs, headers, body))
        return body


def _round(params: Json) -> Json:
    """The next round of a request in several."""
    if "requestState" in params:
        return {**said(params["inputResponses"]), "resultType": "complete"}
    asking = {"method": "elicitation/create", "params": {"message": "Which?"}}
    return {"resultType": "input_required", "requestState": "state-1", "inputRequests": {"q": asking}}


def event(message: Json, number: int | None = None) -> bytes:
    """A message as an event, with its number where it has one."""
    return (b"" if number is None else b"id: %d\n" % number) + b"data: %b\n\n" % json.dumps(message).encode()


def answer(sent: Json, result: Json) -> Json:
    """The answer to a request."""
    return {"jsonrpc": "2.0", "id": sent["id"], "result": result}


def said(value: Any, error: bool = False) -> Json:
    """The result of a tool."""
    text = value if isinstance(value, str) else json.dumps(value)
    return {"content": [{"type": "text", "text": text}], **({"isError": True} if error else {})}


def call(tool: str, arguments: Any = None, id: Any = 1) -> Json:
    """The request to run a tool."""
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": tool, "arguments": arguments or {}}}


@asynccontextmanager
async def mcp_server(sessions: bool = True) -> AsyncGenerator[McpServer]:
    """A server on a free port."""
    made = McpServer(sessions=sessions)
    app = web.Application()
    app.router.add_post("/mcp", made.post)
    app.router.add_get("/mcp", made.listen)
    app.router.add_delete("/mcp", made.delete)
    app.router.add_get("/sse", made.sse)
    app.router.add_post("/messages", made.message)
    app.router.add_route("*", "/{rest:.*}", made.nothing)
    async with site(app) as url:
        made.url = f"{url}/mcp"
        try:
            yield made
        finally:
            made.let_go.set()
            for queue in made.open.values():
                queue.put_nowait(b"")


ACCEPT = {"Accept": "application/json, text/event-stream"}
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}


def config(server: McpServer, more: str = "") -> str:
    """A gateway in front of one server, which is called `tools`, and by its older transport `old`."""
    old = server.url.replace("/mcp", "/sse")
    return f'[mcp.servers.tools]\nurl = "{server.url}"\n{more}\n[mcp.servers.old]\nurl = "{old}"\n'


@dataclass
class Client:
    """A client that writes the wire format itself."""

    url: str
    http: aiohttp.ClientSession
    headers: dict[str, str]

    def post(self, message: Any, **headers: str) -> Any:
        """A POST, as a context manager."""
        return self.http.post(self.url, json=message, headers=ACCEPT | self.headers | headers)

    async def say(self, message: Any) -> tuple[int, bytes]:
        """A POST: (status, whole body)."""
        async with self.post(message) as answer:
            return answer.status, await answer.read()

    def listen(self, **headers: str) -> Any:
        """A GET, as a context manager."""
        return self.http.get(self.url, headers={"Accept": "text/event-stream"} | self.headers | headers)

    async def open(self) -> None:
        """Begins a session."""
        async with self.post(INITIALIZE) as answer:
            assert answer.status == 200
            self.headers["Mcp-Session-Id"] = answer.headers["Mcp-Session-Id"]
