"""An agent on the official openai SDK, streaming: looks a flight up with its own tool, then sums up. Its tool leaves a
trace: a line in the file TOOL_TRACE."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

SYSTEM = "You are a travel agent of Acme Air. Today is Tuesday. Never refund a basic fare."
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "fare",
            "description": "What a flight costs.",
            "parameters": {"type": "object", "properties": {"flight": {"type": "string"}}},
        },
    }
]


def fare(flight: str) -> str:
    """The tool."""
    with Path(os.environ["TOOL_TRACE"]).open("a") as trace:
        trace.write(f"{flight}\n")
    return f"{sum(map(ord, flight))} EUR"


def ask(client: OpenAI, messages: list[Any]) -> str:
    """One turn: as many steps as the model wants tools."""
    while True:
        text, calls = "", dict[int, dict[str, Any]]()
        for chunk in client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for piece in choice.delta.tool_calls or []:
                    call = calls.setdefault(piece.index, {"id": piece.id, "name": "", "arguments": ""})
                    if piece.function is not None:
                        call["name"] += piece.function.name or ""
                        call["arguments"] += piece.function.arguments or ""
        if not calls:
            messages.append({"role": "assistant", "content": text})
            return text
        made = [
            {"id": it["id"], "type": "function", "function": {"name": it["name"], "arguments": it["arguments"]}}
            for it in calls.values()
        ]
        messages.append({"role": "assistant", "content": text or None, "tool_calls": made})
        for call in calls.values():
            result = fare(**json.loads(call["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def main() -> None:
    """Two questions about the task's flight."""
    task = json.load(sys.stdin)
    client, messages = OpenAI(), [{"role": "system", "content": SYSTEM}]
    for question in (f"What does {task['flight']} cost?", "Sum up."):
        messages.append({"role": "user", "content": question})
        print(ask(client, messages), flush=True)


main()
