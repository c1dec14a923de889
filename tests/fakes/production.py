"""What a trainer meets in production: agents that nobody queues, rewards that come when they come, and a vLLM whose
tokens a tiny model knows.

    with tokens_of(300): ...                                # fakes.engine answers with token ids below 300
    shop = Shop(gateway, http, client)
    await shop.serve("r1"); await shop.reward("r1", 0.5)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from fakes import engine, vllm_wire
from fakes.process import Gateway

from examples.demo.model import DemoAnswer, Json
from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import Change
from penstock.gateway.model.rollout import Judgement

PATIENCE = 90.0


@contextmanager
def tokens_of(vocabulary: int) -> Generator[None]:
    """The scripted vLLM answers chats with token ids and log-probabilities, where it is asked for them."""

    def small(request: Json, answer: DemoAnswer) -> Json:
        made = vllm_wire.chat(request, answer)
        for part in (made, *made["choices"]):
            for key in ("prompt_token_ids", "token_ids"):
                part[key] = part.get(key) and [token % vocabulary for token in part[key]]
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engine.FORMATS, engine.CHAT, (small, vllm_wire.chat_events))
        yield


@dataclass(frozen=True, slots=True)
class Shop:
    """Agents in production, and the application that knows how they did."""

    gateway: Gateway
    http: aiohttp.ClientSession
    client: Client
    model: str = "policy"

    async def serve(self, *rollouts: str, mode: str = "") -> None:
        """A call of each."""
        for name in rollouts:
            body = {"model": self.model, "messages": [{"role": "user", "content": f"this is {name}"}]}
            url = f"{self.gateway.address(name)}{mode and f'/mode/{mode}'}/v1/chat/completions"
            async with self.http.post(url, json=body) as answer:
                assert answer.status == 200, await answer.text()

    async def reward(self, rollout: str, value: float) -> None:
        """What the user thought of it."""
        await self.client.reward(rollout, "a1", Judgement(value=value, source="user"))

    async def busy(self, *rollouts: str, rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
        """All of it, rewards in turn."""
        await self.serve(*rollouts)
        for number, name in enumerate(rollouts):
            await self.reward(name, rewards[number % len(rewards)])

    async def when(self, condition: Callable[[], Any], kind: str) -> Any:
        """What a question about the gateway answers, as soon as that is true; asked when a thing of a kind changes."""
        cursor = (await self.client.stats(spans=0)).cursor
        async with asyncio.timeout(PATIENCE), aclosing(self._changes(cursor, kind)) as changes:
            while not (found := await condition()):
                await anext(changes)
            return found

    async def _changes(self, cursor: int, kind: str) -> AsyncGenerator[Change]:
        async with aclosing(self.client.changes(cursor)) as changes:
            async for change in changes:
                if change.kind == kind:
                    yield change
