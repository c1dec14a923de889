"""Keeps a lake in step until it is stopped, and reports each round in one line."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Final

from penstock.console.views.table import size
from penstock.gateway.followers.lake.lake import ChunkResult, Lake
from penstock.gateway.followers.lake.location import LakeUnreachableError
from penstock.gateway.tape.store.directory import TapeError

LEAST_S: Final = 1.0
"""Shortest time between two rounds, in seconds."""
Say = Callable[[str], None]


def write(lake: Lake, say: Say, stop: Event) -> None:
    """Writes all new rows. Raises `LakeUnusableError`, `LakeUnreachableError`, `TapeError`."""
    found = None
    while not stop.is_set() and (found := lake.step()) is not None:
        say(line(found))
        if not found.behind:
            return
    if found is None and not stop.is_set():
        say(f"nothing new since change {lake.cursor:,}" if lake.cursor else "nothing to write: the tape is empty")


def follow(lake: Lake, every: float, say: Say, warn: Say, stop: Event) -> None:
    """Writes new rows every `every` seconds until it is stopped. A store that cannot be reached, or a tape that cannot
    be read, is reported once and tried again in the next round. Raises `LakeUnusableError`."""
    said = ""
    while not stop.is_set():
        try:
            write(lake, say, stop)
            said = ""
        except (LakeUnreachableError, TapeError) as error:
            if str(error) != said:
                said = str(error)
                warn(f"{said}; tried again every {every:g} s")
        stop.wait(every)


def line(found: ChunkResult) -> str:
    """The result of a round in one line."""
    parts = [f"{name} +{one.rows:,} ({size(one.bytes)})" for name, one in found.written.items() if one.rows]
    erased = sum(one.erased for one in found.written.values())
    if found.forgotten:
        parts.append(f"{erased:,} rows erased of {found.forgotten:,} forgotten rollouts")
    behind = f"{found.behind:,} changes behind" if found.behind else "up to date"
    return f"{', '.join(parts) or 'no rows'}; at change {found.cursor:,}, {behind}"
