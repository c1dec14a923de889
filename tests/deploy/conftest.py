"""Containers and manifests. What makes images needs root and Debian's packages: only `make test-deploy` runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

IMAGES = Path(__file__).parent / "test_images.py"
_said: list[str] = []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Images only where they, or this folder, are asked for by name."""
    asked = {(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args}
    return True if collection_path == IMAGES and not {IMAGES, IMAGES.parent} & asked else None


@pytest.fixture(scope="session")
def say() -> Callable[[str], None]:
    """Prints a line at the end."""
    return _said.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How large images are."""
    if _said:
        terminalreporter.section("images")
    for line in _said:
        terminalreporter.write_line(line)
