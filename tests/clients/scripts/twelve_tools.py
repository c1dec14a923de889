"""A server of twelve tools on stdin and stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

SCHEMA = {"type": "object", "properties": {"what": {"type": "string", "description": "What is wanted"}}}
TOOLS = [{"name": f"tool_{at}", "description": f"Does task {at}.", "inputSchema": SCHEMA} for at in range(12)]


def answered(asked: dict[str, Any]) -> dict[str, Any]:
    """The result of a request."""
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
    return {"tools": TOOLS} if asked["method"] == "tools/list" else {}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answered(asked)}), flush=True)
