"""A place to optimise prompts in: gateway, models, agents."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes.optimising import Optimising
from fakes.process import upstreams
from fakes.provider import Provider


@pytest.fixture
async def bare(
    tmp_path: Path, start_gateway: StartGateway, provider: Provider, http: aiohttp.ClientSession
) -> AsyncGenerator[Optimising]:
    """A gateway in front of the models of a shop."""
    gateway = await start_gateway(upstreams(openai=provider.openai_url))
    async with Optimising(tmp_path, gateway, provider, http) as made:
        yield made


@pytest.fixture
async def here(bare: Optimising) -> Optimising:
    """The prompt of the shop is registered, too."""
    await bare.register()
    return bare
