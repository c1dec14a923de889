"""What tests of the tape have in common."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext

import pytest
from fakes.forkserver import forking


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Starts processes."""
    return forking("fakes.crashing", "fakes.forked", "fakes.second_writer")
