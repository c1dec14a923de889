"""Results of runs, found in directories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.report.result import RunResult

NAME: Final = "result.json"


def results(directories: Sequence[Path]) -> list[RunResult]:
    """Return the results of directories and their subdirectories, in the order of their names. Raises `ConfigError` if
    a directory has none, or one cannot be read."""
    found: dict[Path, RunResult] = {}
    for directory in directories:
        paths = list(_paths(directory))
        if not paths:
            raise ConfigError(f"{directory} has no {NAME}, nor has a directory in it: no run has ended there yet")
        found |= {path: read(path) for path in paths}
    return list(found.values())


def _paths(directory: Path) -> Iterator[Path]:
    """Yield the result of a directory, or those of its seeds and its placebo."""
    yield from (path.resolve() for path in sorted(directory.rglob(NAME)))


def read(path: Path) -> RunResult:
    """Read a result. Raises `ConfigError`."""
    try:
        return RunResult.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        said = str(error).splitlines()
        raise ConfigError(f"{path} is no result of a run that this penstock reads: {' '.join(said[:3])}") from None
