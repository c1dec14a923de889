"""Disks that are soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

_BLOCK = bytes(1 << 16)


@dataclass(slots=True)
class Disk:
    """One that is mounted."""

    path: Path

    def fill(self) -> None:
        """Takes all the room that is left."""
        fd = os.open(self._ballast, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        try:
            for block in (_BLOCK, _BLOCK[:4096]):
                with suppress(OSError):
                    while os.write(fd, block):
                        pass
        finally:
            os.close(fd)

    def free(self) -> None:
        """Gives the room back."""
        self._ballast.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"


@contextmanager
def disk_or_none(path: Path, size: int) -> Generator[Disk | None]:
    """A disk of so many bytes; None where none can be mounted, which takes root."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        yield None
        return
    try:
        yield Disk(path)
    finally:
        # Whoever has not ended yet keeps it for himself.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def small_disk(path: Path, size: int) -> Generator[Path]:
    """The same for a test, which is skipped where there is none."""
    with disk_or_none(path, size) as made:
        if made is None:
            pytest.skip("no disk can be mounted here; tests with a limit on file sizes stand in for it")
        yield made.path
