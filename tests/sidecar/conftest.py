"""Fixtures of the runner's tests: runners of the test's gateway, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from fakes.process import Gateway
from fakes.runs import StartRun, runs

from penstock.gateway.client.client import Client


@pytest.fixture
async def start_run(gateway: Gateway, tmp_path: Path) -> AsyncGenerator[StartRun]:
    """Starts runners of the test's gateway; those that still run at the end are killed."""
    async with runs(gateway.url, tmp_path) as start:
        yield start


@pytest.fixture
async def client(gateway: Gateway) -> AsyncGenerator[Client]:
    """A client of the test's gateway."""
    async with Client(gateway.url) as made:
        yield made
