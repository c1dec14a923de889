"""What tests of calls share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import aiohttp
import pytest
from fakes.rig import Within, inside
from fakes.two_upstreams import Two, pair


@pytest.fixture
def within(tmp_path: Path, http: aiohttp.ClientSession) -> Within:
    """Gateways in the test's own process."""
    return partial(inside, tmp_path, http)


@pytest.fixture
def two(tmp_path: Path, http: aiohttp.ClientSession) -> Two:
    """Such ones before two upstreams that share the model `m`."""
    return partial(pair, tmp_path, http)
