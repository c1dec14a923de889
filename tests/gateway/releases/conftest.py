"""A gateway that knows two versions of a prompt, a client of it, and agents that send the first."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import aiohttp
import pytest
from fakes.experiment import CANDIDATE, STABLE, Traffic, prompt
from fakes.process import Gateway

from penstock.gateway.client.client import Client


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
