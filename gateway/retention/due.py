"""Rollouts whose time is over, and how many are looked at in one go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

LOOKED: Final = 512
"""Rollouts that are looked at without a pause."""


class Due(NamedTuple):
    """A rollout whose time is over."""

    rollout: str
    why: str
    """The rule."""


def some_of(found: Iterator[Due | None], most: int) -> tuple[list[Due], bool]:
    """At most so many of those that are found, and whether there may be more."""
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
