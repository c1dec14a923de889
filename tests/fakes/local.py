"""A gateway in the test's own process, for tests of what it says and not of its being a process.

It is there in a twentieth of the time of `fakes.process`, so that each test has one of its own. Whoever kills one or
waits for it without the loop needs a process.
"""

from __future__ import annotations

import tomllib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientSession

from penstock.gateway.app import Gateway
from penstock.gateway.config import Config


@dataclass(slots=True)
class Local:
    """One that runs."""

    url: str
    data: Path
    gateway: Gateway

    def address(self, rollout: str, attempt: str = "a1") -> str:
        """The base URL of an Anthropic client."""
        return f"{self.url}/rollout/{rollout}/attempt/{attempt}"

    def openai(self, rollout: str, attempt: str = "a1") -> str:
        """The base URL of an OpenAI client."""
        return self.address(rollout, attempt) + "/v1"

    async def ask(self, http: ClientSession, rollout: str, attempt: str = "a1", said: str = "hi") -> Any:
        """A chat call, and what it was answered."""
        body = {"model": "m", "messages": [{"role": "user", "content": said}]}
        async with http.post(self.openai(rollout, attempt) + "/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()


@asynccontextmanager
async def locally(home: Path, config: str = "") -> AsyncGenerator[Local]:
    """A gateway that keeps everything below `home`. `config`: as in a file; keys it takes from the environment."""
    made = Gateway(Config.model_validate(tomllib.loads(config) | {"data": home / "data", "port": 0}))
    host, port = await made.start()
    try:
        yield Local(f"http://{host}:{port}", home / "data", made)
    finally:
        await made.stop()
