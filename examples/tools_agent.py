"""An agent on the official OpenAI SDK whose tools are on an MCP server: it asks the server what there is, offers that
to the model, and calls what the model wants.

It knows nothing of any gateway: OPENAI_BASE_URL and OPENAI_API_KEY say where the model is, MCP_URL where the tools are.
What it says to the server is MCP as it is on the wire, in a few lines of the standard library.
"""

import json
import os
from itertools import count
from typing import Any
from urllib.request import Request, urlopen

from openai import OpenAI

MODEL = "gpt-5-mini"
REVISION = "2025-11-25"
WHO = {"name": "tools_agent", "version": "1"}


class Tools:
    """A client of an MCP server that answers in JSON and has no sessions."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ids = count(1)
        self.ask("initialize", {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": WHO})
        self.post({"method": "notifications/initialized"})

    def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """The result of a request."""
        answer = json.loads(self.post({"id": next(self.ids), "method": method, "params": params}))
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def post(self, message: dict[str, Any]) -> bytes:
        """What the server answers to a message."""
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": REVISION,
        }
        with urlopen(Request(self.url, json.dumps({"jsonrpc": "2.0"} | message).encode(), headers)) as response:
            return response.read()

    def offered(self) -> list[Any]:
        """The server's tools as a model is told of them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool["description"],
                    "parameters": tool["inputSchema"],
                },
            }
            for tool in self.ask("tools/list", {})["tools"]
        ]

    def call(self, name: str, arguments: str) -> str:
        """The text of a tool's result."""
        result = self.ask("tools/call", {"name": name, "arguments": json.loads(arguments)})
        return "".join(block["text"] for block in result["content"])


def main() -> None:
    client, tools = OpenAI(), Tools(os.environ["MCP_URL"])
    offered = tools.offered()
    messages: list[Any] = [{"role": "user", "content": "How much is 19 times 23?"}]
    while True:
        reply = client.chat.completions.create(model=MODEL, messages=messages, tools=offered).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            print(reply.content)
            return
        for call in reply.tool_calls:
            assert call.type == "function"
            result = tools.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main()
