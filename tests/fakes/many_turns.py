"""Agents on the official OpenAI SDK: one that calls tools and sends back what it was told, over many turns; and one
that says hello.

agent = Agent(gateway.openai("r1"), stream=True)
choice = await agent.turn("Go.")   # as of a plain answer, however it was sent
"""

from __future__ import annotations

from typing import Any

import openai
from fakes.process import Gateway

from examples.demo.model import Json
from penstock.gateway.wire.dialects.chat import ChatDialect
from penstock.gateway.wire.dialects.loose_json import objs

TOOL: Json = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}


class Agent:
    """Its conversation, and what it asks for with every call."""

    def __init__(self, base_url: str, stream: bool = False, **asks: Any) -> None:
        self.base_url, self.stream = base_url, stream
        self.asks: Json = {"model": "policy", "tools": [TOOL]} | asks
        self.messages: list[Json] = []

    def client(self) -> openai.AsyncOpenAI:
        """Gateways of tests have no TLS: to read the system's certificates takes longer than a call."""
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        return openai.AsyncOpenAI(base_url=self.base_url, api_key="k", max_retries=0, http_client=plain)

    async def choices(self, **more: Any) -> list[Json]:
        """All that is answered to the conversation. `more`: fields that the SDK does not know."""
        async with self.client() as client:
            create: Any = client.chat.completions.create
            made = await create(messages=self.messages, stream=self.stream, extra_body=more, **self.asks)
            if not self.stream:
                return [choice.model_dump() for choice in made.choices]
            pieces = [choice.model_dump() async for chunk in made for choice in chunk.choices]
        indices = sorted({piece["index"] for piece in pieces})
        return [ChatDialect().fold(index, [piece for piece in pieces if piece["index"] == index]) for index in indices]

    async def turn(self, text: str, **more: Any) -> Json:
        """Says something, and takes in the answer."""
        self.messages.append({"role": "user", "content": text})
        return await self.go_on(**more)

    async def go_on(self, **more: Any) -> Json:
        """Takes in an answer, with the results of its tool calls."""
        choice = (await self.choices(**more))[0]
        message: Json = choice["message"]
        calls: list[Json] = [
            {"id": call["id"], "type": "function", "function": call["function"]}
            for call in objs(message.get("tool_calls"))
        ]
        said: Json = {"role": "assistant", "content": message.get("content")}
        said |= {name: message[name] for name in ("reasoning",) if message.get(name)}
        self.messages.append(said | ({"tool_calls": calls} if calls else {}))
        self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in calls]
        return choice

    @property
    def called(self) -> bool:
        """Whether it waits for the answer to a tool's result."""
        return bool(self.messages) and self.messages[-1]["role"] == "tool"


def told(choice: Json) -> tuple[str | None, list[tuple[str, str]]]:
    """What an answer says: its text, and the tools that it calls."""
    message: Json = choice["message"]
    calls: list[Json] = [call["function"] for call in objs(message.get("tool_calls"))]
    return message.get("content") or None, [(call["name"], call["arguments"]) for call in calls]


async def hello(gateway: Gateway, rollout: str) -> None:
    """A model call of an unmodified agent."""
    async with openai.AsyncOpenAI(base_url=gateway.openai(rollout), api_key="sk-mine") as agent:
        answer = await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello."}])
    assert answer.choices[0].message.content
