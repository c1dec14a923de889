"""What the suite finds without anything between: once for all tests, each leg takes a while."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from conformance import suite
from conformance.suite import Check, Leg


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "conformance: needs `make install-mcp`")


@pytest.fixture(scope="session")
def installed() -> None:
    if not suite.installed():
        pytest.skip(suite.NOWHERE)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(installed: None) -> AsyncGenerator[str]:
    """The URL of a server that offers everything the suite asks for."""
    async with suite.everything() as url:
        yield url


@pytest.fixture(scope="session")
def direct_server(server: str, tmp_path_factory: pytest.TempPathFactory) -> Leg:
    """What the suite finds at the server itself."""
    return _once(lambda revision: suite.server_leg(server, revision, tmp_path_factory.mktemp("server")))


@pytest.fixture(scope="session")
def direct_clients(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Leg:
    """What the suite sees of clients that call it themselves."""
    return _once(lambda revision: suite.client_leg(revision, tmp_path_factory.mktemp("clients")))


def _once(leg: Leg) -> Leg:
    found: dict[str, list[Check]] = {}

    async def run(revision: str) -> list[Check]:
        if revision not in found:
            found[revision] = await leg(revision)
        return found[revision]

    return run
