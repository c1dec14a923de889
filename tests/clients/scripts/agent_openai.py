"""An agent on the official OpenAI SDK: chat completions as streams."""

from __future__ import annotations

import json
from typing import Any

import openai

TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}},
}
client = openai.OpenAI()
said: list[Any] = [{"role": "user", "content": "Look at both."}]
for _ in range(3):
    with client.chat.completions.stream(model="gpt-5", messages=said, tools=[TOOL]) as stream:
        answer = stream.get_final_completion().choices[0].message
    said.append(json.loads(answer.model_dump_json(exclude_none=True, exclude={"parsed"})))
    for call in answer.tool_calls or []:
        said.append({"role": "tool", "tool_call_id": call.id, "content": "there"})
    print(answer.content)
