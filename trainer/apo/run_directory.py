"""The files of a run's directory: the split of each task, whether the test was opened, the result and the report.

Everything else is on the tape. The splits are sealed: a run goes on only with the tasks that it began with. Once the
test was opened, the run's settings are fixed too, because a new search would know the test's result. A run with a
result is over: the same command does not search again, not even after its winner was promoted and a search would begin
from other texts.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.report.files import NAME, read
from penstock.trainer.apo.report.result import RunResult
from penstock.trainer.apo.splits import Splits

SEARCHES: Final = ("run", "texts", "tasks", "reward", "engine", "budget", "reflection")
"""Sections that decide the result of a search."""


class RunDirectory:
    """The directory of one run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def seal_splits(self, splits: Splits, config: ApoConfig) -> None:
        """Write the splits, or compare them with those of an earlier process. Raises `ConfigError` if they differ."""
        known = self._read("splits.json", "seal")
        if known is None:
            names = {"train": splits.train, "validation": splits.validation, "test": splits.test}
            places = {name: [task.id for task in tasks] for name, tasks in names.items()}
            self._write("splits.json", {"seal": splits.seal, "seed": config.run.seed, "tasks": places})
        elif known != splits.seal:
            raise ConfigError(
                f"tasks: they, their key or the seed are not what the run {config.run.name!r} began with, see "
                f"{self._path / 'splits.json'}; take those again, or another run.name and run.directory"
            )
        opened = self._read("test.json", "settings")
        if opened is not None and opened != digest(config):
            raise ConfigError(
                f"run.name: the test of {config.run.name!r} was opened with other settings, see "
                f"{self._path / 'test.json'}; a search with new ones would know its result: take another run.name, "
                "run.directory and other tasks"
            )

    def open_test(self, config: ApoConfig, winner: str) -> None:
        """Note that the test is opened now, and for which candidate."""
        if self._read("test.json", "settings") is None:
            self._write("test.json", {"settings": digest(config), "winner": winner})

    def find_result(self, config: ApoConfig) -> RunResult | None:
        """Return the result of a run with these settings; None while it has none. Raises `ConfigError`."""
        path = self._path / NAME
        found = read(path) if path.exists() else None
        return found if found is not None and found.settings == digest(config) else None

    def write_result(self, result: RunResult) -> None:
        """Write the result, after which the run is over."""
        self.write(NAME, result.model_dump_json(indent=1) + "\n")

    def write(self, name: str, text: str) -> Path:
        """Write a file, complete or not at all. Raises `ConfigError`."""
        path, beside = self._path / name, self._path / f".{name}"
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            with beside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError as error:
            raise ConfigError(
                f"run.directory: {path} cannot be written: {error.strerror}; the same command goes on once it can"
            ) from None
        return path

    def _write(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, indent=2) + "\n")

    def _read(self, name: str, key: str) -> str | None:
        """Return a file's value of a key; None if there is no file."""
        try:
            return str(json.loads((self._path / name).read_bytes())[key])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"run.directory: {self._path / name} cannot be read: {error.strerror}") from None
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"run.directory: {self._path / name} cannot be read: it is not what a run has written; take another "
                "run.name and run.directory"
            ) from None


def digest(config: ApoConfig) -> str:
    """Return a digest of the settings that decide the result of a search."""
    kept = config.model_dump(mode="json", include=set(SEARCHES))
    kept["run"].pop("directory")
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
