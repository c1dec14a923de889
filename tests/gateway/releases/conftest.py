"""A gateway that knows two versions of a prompt, a client of it, and agents that send the first."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
from fakes.engine import FakeEngine
from fakes.experiment import CANDIDATE, STABLE, Traffic, prompt
from fakes.local import locally
from fakes.process import Gateway, running, upstreams
from fakes.provider import Provider

from penstock.gateway.client.client import Client


@pytest.fixture
async def gateway(request: pytest.FixtureRequest, tmp_path: Path, provider: Provider) -> AsyncGenerator[Gateway]:
    """A gateway in front of the provider: here, or a process where a test wants one (`KILLED`)."""
    start = running if getattr(request, "param", None) == "process" else locally
    async with start(tmp_path / "gateway", upstreams(openai=provider.openai_url, anthropic=provider.url)) as made:
        yield made


@pytest.fixture
async def served(tmp_path: Path, vllm: FakeEngine) -> AsyncGenerator[Gateway]:
    """A gateway in front of a model server."""
    async with locally(tmp_path / "gateway", upstreams(openai=vllm.openai_url)) as made:
        yield made


@pytest.fixture
async def client(gateway: Gateway) -> AsyncGenerator[Client]:
    """A client of the test's gateway."""
    async with Client(gateway.url) as made:
        yield made


@pytest.fixture
async def traffic(gateway: Gateway, http: aiohttp.ClientSession, client: Client) -> Traffic:
    """Traffic to a gateway that knows two versions of the agents' prompt."""
    await client.add_version("travel", prompt(STABLE, sent=True))
    await client.add_version("travel", prompt(CANDIDATE))
    return Traffic(gateway.url, http, client)
