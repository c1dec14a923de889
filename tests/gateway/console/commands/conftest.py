"""A shell beside the test's own gateway."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.local import Local
from fakes.shell import Shell


@pytest.fixture
def shell(local: Local, tmp_path: Path) -> Shell:
    return Shell(local.url, tmp_path)
