"""Files that are whole or not there."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from penstock.gateway.client.console import Failure
from penstock.gateway.client.sinks import Format


@contextmanager
def whole_file(path: Path | None) -> Generator[IO[bytes]]:
    """A file that appears under its name when all is written, and not at all if that fails; None is stdout. Raises
    `Failure` when it cannot be written."""
    if path is None:
        yield sys.stdout.buffer
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            yield file
        part.replace(path)
    except OSError as e:
        raise Failure(f"{path}: {e.strerror}") from None
    finally:
        with suppress(OSError):
            part.unlink()


def check_format(format: Format, output: Path | None) -> None:
    """Raises `Failure` where Parquet cannot be written."""
    if format == "parquet" and output is None:
        raise Failure("Parquet goes to a file: say which, as --output FILE", 2)
    if format == "parquet" and find_spec("pyarrow") is None:
        raise Failure("Parquet needs pyarrow: pip install 'penstock-gateway[parquet]'")
