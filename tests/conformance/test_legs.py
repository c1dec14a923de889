"""The official suite: what passes directly, and what passes through a gateway that records it."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance import behind, suite
from conformance.suite import CLIENT, REVISIONS, Check, Leg

pytestmark = [
    pytest.mark.slow,
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


NAMED = frozenset({"metadata-default", "metadata-var1", "metadata-var2", "metadata-var3", "token-endpoint-auth-basic",
                   "token-endpoint-auth-post", "token-endpoint-auth-none", "enterprise-managed-authorization", "dpop",
                   "dpop-nonce"})  # fmt: skip
"""Scenarios of `auth/` in which the authorization server, or a proof of the client, names the URL that is called.
It is the gateway's there; nothing between the two can change that (docs/mcp.md)."""


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_server_behind_a_gateway_is_the_same(
    revision: str, server: str, direct_server: Leg, tmp_path: Path
) -> None:
    async with behind.penstock(server) as url:
        through = await suite.server_leg(url, revision, tmp_path)
    assert suite.differences(await direct_server(revision), through) == []


@pytest.mark.parametrize("revision", REVISIONS)
async def test_behind_a_gateway_only_what_names_the_url_differs(
    revision: str, direct_clients: Leg, tmp_path: Path
) -> None:
    through = await suite.client_leg(revision, tmp_path, (*CLIENT, "--through", "conformance.behind:penstock"))
    direct = await direct_clients(revision)
    assert suite.differences(plain(direct), plain(through)) == []
    assert {line.partition(": ")[0] for line in suite.differences(direct, through)} == {
        f"auth/{name}" for name in NAMED
    }
