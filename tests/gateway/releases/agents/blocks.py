"""An agent on the official anthropic SDK: the same as `streaming.py`, with two calls of its tool at once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from anthropic import Anthropic

SYSTEM = "You are a travel agent of Acme Air. Today is Tuesday. Never refund a basic fare."
SCHEMA = {"type": "object", "properties": {"flight": {"type": "string"}}}
TOOLS: Any = [{"name": "fare", "description": "What a flight costs.", "input_schema": SCHEMA}]


def fare(flight: str) -> str:
    """The tool."""
    with Path(os.environ["TOOL_TRACE"]).open("a") as trace:
        trace.write(f"{flight}\n")
    return f"{sum(map(ord, flight))} EUR"


def main() -> None:
    """One question about the task's flight."""
    task, client = json.load(sys.stdin), Anthropic()
    messages: list[Any] = [{"role": "user", "content": f"What does {task['flight']} cost?"}]
    while True:
        answer = client.messages.create(model="claude-x", max_tokens=99, system=SYSTEM, messages=messages, tools=TOOLS)
        messages.append({"role": "assistant", "content": answer.content})
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": block.id, "content": fare(**dict[str, Any](block.input))}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if not results:
            print(json.dumps({"said": "".join(block.text for block in answer.content if block.type == "text")}))
            return
        messages.append({"role": "user", "content": results})


main()
