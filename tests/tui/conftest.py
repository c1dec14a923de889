"""A gateway with work on it, for every test of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes.rig import based
from fakes.tui_world import World, fill


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Six tasks, five tries each: some have succeeded, some failed, one runs, the others wait."""
    with based(tmp_path_factory.mktemp("tui"), "", "") as base:
        yield fill(base)
