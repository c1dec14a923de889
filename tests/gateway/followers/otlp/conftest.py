"""Fixtures for spans that come in and go out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from fakes.collector import Collector, collecting
from fakes.otlp import Inlet, inlet_at


@pytest.fixture
async def inlet(tmp_path: Path) -> AsyncGenerator[Inlet]:
    """An inlet of the test's own."""
    async with inlet_at(tmp_path) as made:
        yield made


@pytest.fixture
async def collector() -> AsyncGenerator[Collector]:
    """A collector that takes everything."""
    async with collecting() as made:
        yield made
