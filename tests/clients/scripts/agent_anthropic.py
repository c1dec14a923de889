"""An agent on the official Anthropic SDK: messages as streams."""

from __future__ import annotations

from typing import Any

import anthropic

TOOL: Any = {"name": "look", "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}}}
client = anthropic.Anthropic()
said: list[Any] = [{"role": "user", "content": "Look at both."}]
for _ in range(3):
    with client.messages.stream(model="claude-sonnet-4-5", max_tokens=99, messages=said, tools=[TOOL]) as stream:
        answer = stream.get_final_message()
    said.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
    calls = [block for block in answer.content if block.type == "tool_use"]
    said.append(
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "there"} for call in calls],
        }
    )
    print([block.text for block in answer.content if block.type == "text"])
