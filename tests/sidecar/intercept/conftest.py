"""A model host with TLS and a gateway in front of it: once a module, in whose event loop its tests run."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import aiohttp
import pytest
import pytest_asyncio
from fakes.process import Gateway, running
from fakes.tape import Tape
from fakes.tls_host import TlsHost, tls_host


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_host(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[TlsHost]:
    async with tls_host(tmp_path_factory.mktemp("host")) as made:
        yield made


@pytest.fixture
def host(shared_host: TlsHost) -> TlsHost:
    """It was asked nothing yet."""
    shared_host.asked = []
    return shared_host


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(shared_host: TlsHost, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway]:
    base = f'base_url = "https://{shared_host.name}/v1"\nca_file = "{shared_host.trust}"\n'
    async with running(tmp_path_factory.mktemp("gateway"), f'[[upstream]]\nname = "host"\n{base}') as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def tape(gateway: Gateway) -> AsyncGenerator[Tape]:
    async with aiohttp.ClientSession() as session:
        yield Tape(gateway.url, session)
