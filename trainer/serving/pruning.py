"""Removes directories of old versions: those beyond the newest that no release and no rollout can need any more.

The gateway says which versions are needed, for every model, because an adapter may have been registered under another
name too. A directory is renamed before it is emptied, so that half a version is never taken for a whole one. A version
without a directory stays registered; a release of it fails its check, and no agent gets it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from penstock.gateway.client.client import Client

GONE: Final = ".gone"
"""Ending of a directory's name before its removal."""


def step_of(run: str, version: str) -> int | None:
    """Return the step of a version by its name RUN.STEP; None if it is not of this run."""
    name, _, step = version.rpartition(".")
    return int(step) if name == run and step.isdecimal() else None


async def prune(client: Client, directory: Path, run: str, keep: int, steps: frozenset[int] = frozenset()) -> list[str]:
    """Remove directories of a run's versions; return their names. `keep`: number of newest versions that stay; `steps`:
    steps whose versions stay too. Raises OSError."""
    every = await asyncio.to_thread(_versions, directory, run)
    old = [name for name in every[:-keep] if step_of(run, name) not in steps]
    if not old:
        return []
    needed = await _needed(client, directory)
    gone = [name for name in old if name not in needed]
    await asyncio.to_thread(_remove, directory, gone)
    return gone


def _versions(directory: Path, run: str) -> list[str]:
    """Return the names of the run's versions, oldest first."""
    paths = directory.iterdir() if directory.is_dir() else ()
    found = {path.name: step for path in paths if (step := step_of(run, path.name)) is not None}
    return sorted(found, key=lambda name: found[name])


def _remove(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        (directory / name).rename(directory / f".{name}{GONE}")
    # Also the directories that an earlier process began to remove.
    for left in directory.glob(f".*{GONE}"):
        shutil.rmtree(left)


async def _needed(client: Client, directory: Path) -> set[str]:
    """Return the names of the directories of needed versions."""
    found: set[str] = set()
    for resource in await client.resources():
        if resource.kind == "model":
            contents = {one.version: one.content for one in resource.versions}
            for need in await client.needed_versions(resource.name):
                adapter = Path(contents.get(need.version, {}).get("adapter") or directory / need.version)
                found |= {adapter.name} if adapter.parent == directory else set()
    return found
