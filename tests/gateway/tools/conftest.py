"""A scripted server of tools behind a gateway."""

from __future__ import annotations

import tomllib
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes.mcp_wire import Client, McpServer, config, mcp_server
from fakes.process import Gateway
from fakes.rig import inside
from fakes.tape import Tape


@pytest.fixture
async def server() -> AsyncGenerator[McpServer]:
    """A scripted server with sessions, on a free port."""
    async with mcp_server() as made:
        yield made


@pytest.fixture
def more() -> str:
    """What else is configured; modules have their own."""
    return ""


@pytest.fixture
async def gateway(tmp_path: Path, http: aiohttp.ClientSession, server: McpServer, more: str) -> AsyncGenerator[Gateway]:
    """A gateway in front of it, in this process."""
    async with inside(tmp_path, http, **tomllib.loads(config(server) + more)) as made:
        yield Gateway(tmp_path / "none.toml", made.base.data, made.base.log_path, url=made.base.url)


@pytest.fixture
async def apart(start_gateway: StartGateway, server: McpServer, more: str) -> Gateway:
    """One in a process of its own, for tests that stop it or ask what it costs."""
    return await start_gateway(config(server) + more)


@pytest.fixture
def client(gateway: Gateway, http: aiohttp.ClientSession) -> Client:
    """A client whose calls belong to rollout r1."""
    return Client(f"{gateway.address('r1')}/mcp/tools", http, {})


@pytest.fixture
def tape(gateway: Gateway, http: aiohttp.ClientSession) -> Tape:
    """What that gateway has recorded."""
    return Tape(gateway.url, http)
