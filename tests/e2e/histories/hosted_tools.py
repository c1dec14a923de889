"""A server of tools on stdin and stdout, which the gateway hosts: `python hosted_tools.py`.

echo, fails   as in `tool_server`
slow          the same as echo, later
dies          its process ends before it answers
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Until its input ends."""
    for line in sys.stdin:
        sent: dict[str, Any] = json.loads(line)
        if sent.get("method") == "initialize":
            about: dict[str, Any] = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
            say(sent, about | {"serverInfo": {"name": "hosted", "version": "1"}})
        elif sent.get("method") == "tools/call":
            use(sent, sent["params"]["name"], sent["params"]["arguments"]["call"])


def use(sent: dict[str, Any], tool: str, call: str) -> None:
    """Answers a call, in its way."""
    if tool == "dies":
        os._exit(7)
    if tool == "slow":
        time.sleep(0.4)
    result: dict[str, Any] = {"content": [{"type": "text", "text": f"{call} is done"}]}
    say(sent, result | ({"isError": True} if tool == "fails" else {}))


def say(sent: dict[str, Any], result: dict[str, Any]) -> None:
    """Answers a request."""
    print(json.dumps({"jsonrpc": "2.0", "id": sent["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
