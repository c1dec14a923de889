"""The showcase's second agent: it answers over Anthropic messages, plain and streamed, with the same tools."""

from __future__ import annotations

import json
from typing import Final

import aiohttp

from examples.demo.model import Json
from examples.demo.order_desk import DeskAgent

MESSAGES_MODEL: Final = "desk-claude"
TURNS: Final = 6


class MessagesAgent:
    """An agent that speaks Anthropic messages; it uses the tools of an `DeskAgent`."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str, tools: DeskAgent, prompt: str) -> None:
        self._http, self._url, self._tools, self._prompt = http, f"{base_url}/v1/messages", tools, prompt

    async def answer(self, question: str, stream: bool) -> str:
        """The final answer, once the model calls no more tools; empty when the model could not be reached."""
        names = {"inputSchema": "input_schema"}
        tools = [{names.get(key, key): value for key, value in one.items()} for one in await self._tools.list_tools()]
        talk: list[Json] = [{"role": "user", "content": question}]
        asked: Json = {"model": MESSAGES_MODEL, "max_tokens": 400, "system": self._prompt, "tools": tools}
        for _ in range(TURNS):
            async with self._http.post(self._url, json=asked | {"messages": talk, "stream": stream}) as response:
                if response.status != 200:
                    return ""
                body = await response.read()
            blocks: list[Json] = _streamed(body) if stream else json.loads(body)["content"]
            talk.append({"role": "assistant", "content": blocks})
            results = [await self._run(block) for block in blocks if block["type"] == "tool_use"]
            if not results:
                return " ".join(block["text"] for block in blocks if block["type"] == "text")
            talk.append({"role": "user", "content": results})
        return ""

    async def _run(self, block: Json) -> Json:
        found = await self._tools.call_tool(block["name"], block["input"])
        text = found["content"][0]["text"] if "content" in found else f"refused: {found.get('message')}"
        return {"type": "tool_result", "tool_use_id": block["id"], "content": text}


def _streamed(body: bytes) -> list[Json]:
    """The blocks of a streamed message, put together from their pieces."""
    blocks: list[Json] = []
    arguments: dict[int, str] = {}
    for line in body.decode().splitlines():
        event: Json = json.loads(line[6:]) if line.startswith("data: {") else {}
        match event.get("type"):
            case "content_block_start":
                blocks.append(event["content_block"])
            case "content_block_delta":
                delta: Json = event["delta"]
                if "text" in delta:
                    blocks[event["index"]]["text"] += delta["text"]
                arguments[event["index"]] = arguments.get(event["index"], "") + delta.get("partial_json", "")
            case _:
                pass
    for index, block in enumerate(blocks):
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments.get(index) or "{}")
    return blocks
