"""A server of tools that needs no SDK: one tool over MCP, streamable HTTP, without sessions.

It answers only the requests that revision 2025-11-25 requires: who it is, which tools it has, and a tool's result.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

Json = dict[str, Any]
PATH = "/mcp"
REVISION = "2025-11-25"
UNKNOWN_METHOD, BAD_PARAMS = -32601, -32602
"""Codes of JSON-RPC errors."""
NUMBER: Json = {"type": "integer"}
MULTIPLY: Json = {
    "name": "multiply",
    "description": "Multiply two whole numbers.",
    "inputSchema": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
}


def answer(sent: Json) -> Json | None:
    """The answer to a message; None for a notification."""
    if "id" not in sent:
        return None
    head: Json = {"jsonrpc": "2.0", "id": sent["id"]}
    match sent.get("method"):
        case "initialize":
            named = {"name": "demo-calculator", "version": "1"}
            return head | {"result": {"protocolVersion": REVISION, "capabilities": {"tools": {}}, "serverInfo": named}}
        case "tools/list":
            return head | {"result": {"tools": [MULTIPLY]}}
        case "tools/call":
            return head | call_result(sent.get("params") or {})
        case method:
            return head | {"error": {"code": UNKNOWN_METHOD, "message": f"there is no method {method!r}"}}


def call_result(params: Json) -> Json:
    """The result of a tool, or the error why it was not run."""
    if params.get("name") != MULTIPLY["name"]:
        return {"error": {"code": BAD_PARAMS, "message": f"there is no tool {params.get('name')!r}"}}
    given: Json = params.get("arguments") or {}
    product = given["a"] * given["b"]
    return {"result": {"content": [{"type": "text", "text": str(product)}]}}


async def reply(request: web.Request) -> web.Response:
    """Answers a message of a client."""
    said = answer(await request.json())
    return web.Response(status=202) if said is None else web.json_response(said)
