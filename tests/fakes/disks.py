"""Disks that are soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size: int) -> Generator[Path]:
    """A disk of so many bytes; mounting one takes root."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no disk can be mounted here; tests with a limit on file sizes stand in for it")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
