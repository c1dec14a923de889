"""Output files that appear only when they are complete."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from penstock.gateway.client.console import CommandError
from penstock.gateway.client.sinks import Format


@contextmanager
def whole_file(path: Path | None) -> Generator[IO[bytes]]:
    """A file that appears under its name when all is written, and not at all if that fails; None is stdout. A pipe or a
    device is written to directly, and a link is followed. Raises `CommandError` when it cannot be written."""
    if path is None:
        yield sys.stdout.buffer
        return
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        end = path.resolve()
        part = end.with_name(f".{end.name}.{os.getpid()}.part")
        try:
            with part.open("xb") as file:
                yield file
            part.replace(end)
        finally:
            with suppress(OSError):
                part.unlink()
    except OSError as e:
        raise CommandError(f"{path}: {e.strerror}") from None


def check_format(format: Format, output: Path | None) -> None:
    """Raises `CommandError` where Parquet cannot be written."""
    if format == "parquet" and output is None:
        raise CommandError("Parquet goes to a file: say which, as --output FILE", 2)
    if format == "parquet" and find_spec("pyarrow") is None:
        raise CommandError("Parquet needs pyarrow: pip install 'penstock-gateway[parquet]'")
