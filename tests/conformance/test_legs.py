"""The harness itself: what passes directly, and what a proxy that hands bytes on makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance import byte_proxy, suite
from conformance.suite import CLIENT, REVISIONS, Check, Leg

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.asyncio(loop_scope="session"),
    # Side by side they would take each other's time, and one scenario measures it.
    pytest.mark.xdist_group("conformance"),
    pytest.mark.timeout(1800),
]
EXTENSION = "tasks-"
"""The SDK has no part for the extension of these scenarios, which no revision requires."""


def plain(checks: list[Check]) -> list[Check]:
    """Those of scenarios without authorization."""
    return [check for check in checks if not check.scenario.startswith("auth/")]


@pytest.mark.parametrize("revision", REVISIONS)
async def test_the_server_passes(revision: str, direct_server: Leg) -> None:
    checks = await direct_server(revision)
    assert [check for check in suite.failed(checks) if not check.scenario.startswith(EXTENSION)] == []
    assert len(checks) > 80


@pytest.mark.parametrize("revision", REVISIONS)
async def test_the_client_passes(revision: str, direct_clients: Leg) -> None:
    checks = await direct_clients(revision)
    assert suite.failed(checks) == []
    assert len(checks) > 300


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_server_behind_a_byte_proxy_is_the_same(
    revision: str, server: str, direct_server: Leg, tmp_path: Path
) -> None:
    async with byte_proxy.prefixed(server) as url:
        through = await suite.server_leg(url, revision, tmp_path)
    assert suite.differences(await direct_server(revision), through) == []


@pytest.mark.parametrize("revision", REVISIONS)
async def test_behind_a_byte_proxy_only_authorization_differs(
    revision: str, direct_clients: Leg, tmp_path: Path
) -> None:
    command = (*CLIENT, "--through", "conformance.byte_proxy:prefixed")
    through = await suite.client_leg(revision, tmp_path, command)
    direct = await direct_clients(revision)
    assert suite.differences(plain(direct), plain(through)) == []
    # The server's metadata names the server, and clients refuse what names another than the one they call.
    assert suite.failed(through) != []
