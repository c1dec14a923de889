"""A place of its own for what waits on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.wrapping import Wrapping


@pytest.fixture
def wrapping(tmp_path: Path) -> Wrapping:
    """Wrappers whose gateway is away."""
    return Wrapping(tmp_path / "state")
