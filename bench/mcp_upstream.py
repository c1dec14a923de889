"""An MCP server that costs next to nothing: `python -m bench.mcp_upstream` prints its port and serves until killed.

One tool, `echo`, answers with its own text, as JSON. It speaks both lifecycles, with sessions and without. GET /
answers {"answered": N}, the calls of the tool that were answered, as the mock of the other benches does.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
import orjson
import uvloop

HANDSHAKE, STATELESS = "2025-11-25", "2026-07-28"
SESSION = "Mcp-Session-Id: 5f0e1c52b7a94d3f8c6a2e9d10b7f4aa\r\n"
INFO = {"name": "echo", "version": "1"}
CAN: dict[str, dict[str, bool]] = {"tools": {}}
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOL = {"name": "echo", "description": "Says what it is told.", "inputSchema": SCHEMA}
CACHED = {"resultType": "complete", "ttlMs": 60_000, "cacheScope": "public"}
"""Further fields of a result in the newer lifecycle; clients of the older one ignore them."""
RESULTS: dict[str, dict[str, Any]] = {
    "initialize": {"protocolVersion": HANDSHAKE, "capabilities": CAN, "serverInfo": INFO},
    "server/discover": {**CACHED, "supportedVersions": [STATELESS], "capabilities": CAN, "serverInfo": INFO},
    "tools/list": {**CACHED, "tools": [TOOL]},
    "ping": {},
}


class Served:
    """The number of answered calls of the tool."""

    calls = 0


class Connection(asyncio.Protocol):
    """A client's connection, with its parser."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._path = self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        method = self._parser.get_method()
        if method == b"POST":
            self._post(orjson.loads(self._body))
        elif method == b"GET" and self._path == b"/":
            self._answer("200 OK", orjson.dumps({"answered": Served.calls}))
        else:
            self._answer("200 OK" if method == b"DELETE" else "405 Method Not Allowed", b"")

    def _post(self, message: dict[str, Any]) -> None:
        key, method = message.get("id"), message.get("method", "")
        if key is None or not method:
            return self._answer("202 Accepted", b"")
        headers = SESSION if method == "initialize" else ""
        if method == "tools/call":
            Served.calls += 1
            content = [{"type": "text", "text": message["params"]["arguments"]["text"]}]
            outcome: dict[str, Any] = {"result": {"content": content, "resultType": "complete"}}
        elif method in RESULTS:
            outcome = {"result": RESULTS[method]}
        else:
            outcome = {"error": {"code": -32601, "message": "Method not found"}}
        self._answer("200 OK", orjson.dumps({"jsonrpc": "2.0", "id": key, **outcome}), headers)

    def _answer(self, status: str, body: bytes, headers: str = "") -> None:
        kind = "Content-Type: application/json\r\n" if body else ""
        head = f"HTTP/1.1 {status}\r\n{kind}{headers}Content-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


async def main() -> None:
    """Listen on a free port of loopback."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
