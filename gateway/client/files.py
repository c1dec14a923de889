"""Files that are whole or not there."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: Path | None) -> Generator[IO[bytes]]:
    """A file that appears under its name when all is written, and not at all if that fails; None is stdout."""
    if path is None:
        yield sys.stdout.buffer
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
