"""Fixtures that every test may ask for: a real gateway process, a scripted provider, an HTTP session.

What a gateway wrote to stderr is printed when its test is over; pytest shows it for tests that failed.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

import aiohttp
import pytest
from fakes.engine import FakeEngine, engine
from fakes.process import Gateway, running, upstreams
from fakes.provider import Provider, serving
from fakes.tape import Tape
from hypothesis import settings

# Time never decides a test. CI runs the same examples every time, so few are enough: what is new is found on
# developers' machines.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("ci" if os.environ.get("CI") else "here")

StartGateway = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def provider() -> AsyncGenerator[Provider]:
    """A scripted provider on a free port."""
    async with serving() as made:
        yield made


@pytest.fixture
async def http() -> AsyncGenerator[aiohttp.ClientSession]:
    """A session for what a test asks itself."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def start_gateway(tmp_path: Path) -> AsyncGenerator[StartGateway]:
    """Starts gateways: `await start_gateway(config_text, *flags, env={...})`. All are stopped when the test ends."""
    numbers = count()
    async with AsyncExitStack() as stack:

        async def start(config: str, *flags: str, env: dict[str, str] | None = None) -> Gateway:
            home = tmp_path / f"gateway-{next(numbers)}"
            return await stack.enter_async_context(running(home, config, *flags, env=env))

        yield start


@pytest.fixture
async def gateway(start_gateway: StartGateway, provider: Provider) -> Gateway:
    """A gateway in front of the provider."""
    return await start_gateway(upstreams(openai=provider.openai_url, anthropic=provider.url))


@pytest.fixture
async def vllm() -> AsyncGenerator[FakeEngine]:
    """A scripted model server that loads adapters, on a free port."""
    async with engine() as made:
        yield made


@pytest.fixture
async def served(start_gateway: StartGateway, vllm: FakeEngine) -> Gateway:
    """A gateway in front of it."""
    return await start_gateway(upstreams(openai=vllm.openai_url))


@pytest.fixture
def tape(gateway: Gateway, http: aiohttp.ClientSession) -> Tape:
    """What that gateway has recorded."""
    return Tape(gateway.url, http)
