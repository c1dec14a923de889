"""What the agents need, which are installed apart from everything else."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "clients: needs `make install-clients` for most of its agents")
