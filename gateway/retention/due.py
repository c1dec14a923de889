"""Rollouts whose time is over, read in bounded steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

LOOKED: Final = 512
"""Rollouts that are examined without a pause."""


class Due(NamedTuple):
    """A rollout whose time is over."""

    rollout: str
    why: str
    """The rule by which its time is over."""


def some_of(found: Iterator[Due | None], most: int) -> tuple[list[Due], bool]:
    """Return at most `most` due rollouts, and whether there may be more."""
    some: list[Due] = []
    for _ in range(LOOKED):
        try:
            one = next(found)
        except StopIteration:
            return some, False
        if one is not None:
            some.append(one)
            if len(some) == most:
                break
    return some, True
