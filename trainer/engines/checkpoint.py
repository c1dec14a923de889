"""Directories that are complete or absent, and a run's checkpoints, which are such directories.

A directory is written beside its place under a name that begins with a dot, every file is synced to disk, and one
rename makes it visible. If the process dies or the disk is full, the earlier directories stay; the unfinished one is
removed, at once or by the next write.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.gateway.model.run import RunKind
from penstock.trainer.engines import CheckpointError

State = dict[str, Any]
"""Tensors, numbers, text, lists, tuples and dicts of these."""

_NAME = re.compile(r"step-(\d{8})")


def write_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Make `target`, filled by `fill(directory)`. Raises `CheckpointError` when it exists or cannot be written."""
    if target.exists():
        raise CheckpointError(f"{target} exists; what was published never changes, choose another name")
    beside = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        fill(beside)
        for path in [*beside.rglob("*"), beside]:
            _sync(path)
        os.rename(beside, target)
        _sync(target.parent)
    # Writers fail in their own ways: OSError, RuntimeError of torch, SafetensorError.
    except Exception as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(f"{target} could not be written: {error}") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


KEEP = 2
"""Number of checkpoints kept: the newest to go on from, and one in case that it is damaged."""


class Checkpoints:
    """The checkpoints below a directory, by the step after which they were made. `kind`: the kind of their runs;
    checkpoints of another kind are refused."""

    def __init__(self, directory: Path, keep: int = KEEP, kind: RunKind = "grpo") -> None:
        self.directory = directory
        self.keep = keep
        self.kind: RunKind = kind

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        found = self.directory.iterdir() if self.directory.is_dir() else ()
        return sorted(int(match[1]) for path in found if (match := _NAME.fullmatch(path.name)))

    def save(self, step: int, state: State) -> Path:
        """Write a checkpoint and remove the oldest beyond `keep`. Raises `CheckpointError`; the others are then
        untouched."""
        target = self._path(step)
        try:
            write_directory(target, lambda beside: _write(beside / "state.pt", {"kind": self.kind, **state}))
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self._last()}") from error
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self._path(old))
        return target

    def latest(self) -> tuple[int, State] | None:
        """Return the step and state of the newest checkpoint; None without one. Raises `CheckpointError` when it cannot
        be read, or is of another kind of run."""
        steps = self.steps()
        if not steps:
            return None
        path = self._path(steps[-1]) / "state.pt"
        try:
            # `weights_only` refuses code: a foreign checkpoint cannot run anything here.
            state: State = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            # Torch's own message fills a page, and advises to run the code in the file.
            why = f"{path} cannot be read ({type(error).__name__}): it was changed after it was written"
            raise CheckpointError(f"{why}; remove {path.parent} to go on from the one before") from error
        kind = state.pop("kind", "grpo")
        if kind != self.kind:
            raise CheckpointError(f"{self.directory} is of a run of {kind}; give this one a run.directory of its own")
        return steps[-1], state

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def _last(self) -> str:
        steps = self.steps()
        return f"the last good checkpoint is {self._path(steps[-1])}" if steps else "there is no earlier checkpoint"


def _write(path: Path, state: State) -> None:
    # Through a Python file: torch's own writer reports errors with a C++ trace instead of the reason.
    with path.open("wb") as file:
        torch.save(state, file)
