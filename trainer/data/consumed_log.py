"""Writes down the production rollouts that each step takes, before anything is learnt from them.

Each step has a directory, complete or absent. So a rollout is learnt from once, whichever process dies when. A step
that is repeated, because the checkpoint is older, takes the same rollouts as they were then, and comes to the same
weights; no other step takes any of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from penstock.trainer.data.selection import TrainableRollout
from penstock.trainer.engines import CheckpointError
from penstock.trainer.engines.checkpoint import write_directory

AttemptSpans = Mapping[str, int]
"""Attempts of a rollout, each with its highest span."""
NAME: Final = re.compile(r"step-\d{8}")


class ConsumedLog:
    """The rollouts that the steps of one run have taken."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: set[str] = set()
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            if NAME.fullmatch(path.name):
                self._names |= _read(path).keys()

    def __contains__(self, rollout: str) -> bool:
        """True if a step has taken the rollout."""
        return rollout in self._names

    def rollouts_of(self, step: int) -> dict[str, AttemptSpans] | None:
        """Return the rollouts that a step has taken; None when it has taken none. Raises `CheckpointError` when the
        file cannot be read."""
        path = self._path(step)
        return _read(path) if path.exists() else None

    def take(self, step: int, chosen: Iterable[TrainableRollout]) -> dict[str, AttemptSpans]:
        """Note the rollouts that a step takes; on disk when this returns. Raises `CheckpointError`."""
        found = {one.rollout: dict(one.seen) for one in chosen}
        write_directory(self._path(step), lambda beside: _write(beside / "rollouts.json", found))
        self._names |= found.keys()
        return {**found}

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"


def _read(path: Path) -> dict[str, AttemptSpans]:
    try:
        return json.loads((path / "rollouts.json").read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; it says what a step of the run has learnt from"
        ) from None


def _write(path: Path, found: Mapping[str, AttemptSpans]) -> None:
    path.write_text(json.dumps(found), encoding="utf-8")
