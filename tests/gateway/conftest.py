"""The rig of the data plane's tests: one gateway process a module, one rollout a test; and gateways of one test."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest
from fakes.local import Local, locally
from fakes.process import PATIENCE, upstreams
from fakes.provider import Provider
from fakes.rig import Base, Rig, Within, based, inside
from fakes.tape import Tape
from fakes.two_upstreams import Two, pair

from penstock.gateway.client.client import Client
from penstock.gateway.followers.index.sql import runner


@pytest.fixture(scope="session", autouse=True)
def patient_sql() -> Iterator[None]:
    """In a gateway of this process no index and no query is late because the machine is busy."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("INDEX_S", "START_S"):
            patch.setattr(runner, name, PATIENCE)
        yield


@pytest.fixture(scope="module")
def gateway_config() -> str:
    """Configuration of the module's gateway; modules have their own."""
    return ""


@pytest.fixture(scope="module")
def upstream_config() -> str:
    """Configuration of each of its upstreams; modules have their own."""
    return ""


@pytest.fixture(scope="module")
def base(gateway_config: str, upstream_config: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    """The module's gateway."""
    with based(tmp_path_factory.mktemp("gateway"), gateway_config, upstream_config) as made:
        yield made


@pytest.fixture
def rig(base: Base, http: aiohttp.ClientSession) -> Rig:
    """The module's gateway, at a rollout of the test's own."""
    return Rig(base, Tape(base.url, http), f"r-{uuid4().hex[:12]}")


@pytest.fixture
async def local(tmp_path: Path, provider: Provider) -> AsyncGenerator[Local]:
    """A gateway of the test's own, in its process, in front of the provider."""
    async with locally(tmp_path / "local", upstreams(openai=provider.openai_url, anthropic=provider.url)) as made:
        yield made


@pytest.fixture
async def client(local: Local) -> AsyncGenerator[Client]:
    """A client of that gateway."""
    async with Client(local.url) as made:
        yield made


@pytest.fixture
def within(tmp_path: Path, http: aiohttp.ClientSession) -> Within:
    """Gateways in the test's own process."""
    return partial(inside, tmp_path, http)


@pytest.fixture
def two(tmp_path: Path, http: aiohttp.ClientSession) -> Two:
    """Such ones before two upstreams that share the model `m`."""
    return partial(pair, tmp_path, http)
