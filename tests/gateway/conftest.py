"""The rig of the data plane's tests: one gateway process a module, one rollout a test."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest
from fakes.rig import Base, Rig, Within, based, inside
from fakes.tape import Tape
from fakes.two_upstreams import Two, pair


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
def within(tmp_path: Path, http: aiohttp.ClientSession) -> Within:
    """Gateways in the test's own process."""
    return partial(inside, tmp_path, http)


@pytest.fixture
def two(tmp_path: Path, http: aiohttp.ClientSession) -> Two:
    """Such ones before two upstreams that share the model `m`."""
    return partial(pair, tmp_path, http)
