"""A vLLM that outlives the gateway: adapters are loaded into it, and it knows which of them has answered each call."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from aiohttp import web
from fakes.engine import FakeEngine

from examples.demo.model import DemoAnswer, Json
from penstock.gateway.model.resource import NewVersion

RESOURCE = "policy"
"""The model that agents ask for."""
UPSTREAM = "vllm"
"""Its name at the gateway."""


def adapter(number: int, version: str) -> NewVersion:
    """A version."""
    content: dict[str, Any] = {"upstream": UPSTREAM, "base": "base", "adapter": f"/adapters/{number}"}
    return NewVersion(kind="model", content=content, version=version)


class Weights(FakeEngine):
    """The server. An answer has the id that its call wants (`e2e.chaos.provider`)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, str] = {}
        """System texts of the calls that have come, by the call's name."""
        self.served: dict[str, str] = {}
        """The model that has answered each, by the call's name."""
        self._transports: set[asyncio.BaseTransport] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers one request."""
        if request.transport is not None:
            self._transports.add(request.transport)
        made = await super().handle(request)
        self.asked.clear()
        return made

    def answer(self, body: Json) -> DemoAnswer:
        """Says who it is."""
        made = super().answer(body)
        if "user" not in body:
            return made
        self.seen[body["user"]], self.served[body["user"]] = body["messages"][0]["content"], body["model"]
        return replace(made, extra={"id": f"chatcmpl-{body['user']}"})

    def start_again(self) -> None:
        """It has died and is back, without its adapters."""
        self.restart()
        for transport in self._transports:
            if isinstance(transport, asyncio.Transport):
                transport.abort()
        self._transports.clear()
