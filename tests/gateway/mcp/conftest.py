"""A scripted server of tools behind a gateway."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import aiohttp
import pytest
from conftest import StartGateway
from fakes.mcp_wire import Client, McpServer, config, mcp_server
from fakes.process import Gateway
from fakes.tape import Tape


@pytest.fixture
async def server() -> AsyncGenerator[McpServer]:
    """A scripted server with sessions, on a free port."""
    async with mcp_server() as made:
        yield made


@pytest.fixture
async def gateway(start_gateway: StartGateway, server: McpServer) -> Gateway:
    """A gateway in front of it."""
    return await start_gateway(config(server))


@pytest.fixture
def client(gateway: Gateway, http: aiohttp.ClientSession) -> Client:
    """A client whose calls belong to rollout r1."""
    return Client(f"{gateway.address('r1')}/mcp/tools", http, {})


@pytest.fixture
def tape(gateway: Gateway, http: aiohttp.ClientSession) -> Tape:
    """What that gateway has recorded."""
    return Tape(gateway.url, http)
