"""Spans and bytes of an agent with tools: what answers asked for, what servers ran, what was carried back."""

from __future__ import annotations

import json
from typing import Any

from fakes.memory_tape import call, chat_exchange, exchange

from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Exchange

Json = dict[str, Any]
Recorded = tuple[Span, Exchange]
TASK: Json = {"role": "user", "content": "Find it."}
PAGE = "The harbour was closed for repairs until the autumn of that year."


def wanted(*asked: tuple[str, str, Json]) -> Json:
    """A message of the assistant that asks for tools: (id, name, arguments) of each."""
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for id, name, arguments in asked
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def carried(id: str, words: str) -> Json:
    """A result as a later request carries it."""
    return {"role": "tool", "tool_call_id": id, "content": words}


def model(sequence: int, said: list[Json], answer: Json, **about: Any) -> Recorded:
    """A model call; `answer` is a message of the assistant."""
    asks = len(answer.get("tool_calls", ()))
    return call(sequence, model="m", tool_calls=asks, ms=100, **about), chat_exchange(said, answer)


def ran(sequence: int, tool: str, arguments: Json, words: str | None = PAGE, **about: Any) -> Recorded:
    """A run of a tool on the server `web`; without `words` it brought no result."""
    params = {"name": tool, "arguments": arguments}
    sent = {"jsonrpc": "2.0", "id": sequence, "method": "tools/call", "params": params}
    told = {"jsonrpc": "2.0", "id": sequence, "result": {"content": [{"type": "text", "text": words}]}}
    usual: Json = {"upstream": "web", "name": f"tools/call {tool}", "attributes": {"gen_ai.tool.name": tool}}
    head = call(sequence, kind="tool", dialect="mcp", model=None, usage=None, ms=100, **(usual | about))
    return head, exchange(json.dumps(sent).encode(), b"" if words is None else json.dumps(told).encode())
