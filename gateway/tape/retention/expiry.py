"""Rollouts whose time is over, read in bounded steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

LOOKED: Final = 512
"""Rollouts that are examined without a pause."""


class ExpiredRollout(NamedTuple):
    """A rollout whose time is over."""

    rollout: str
    why: str
    """The rule by which its time is over."""


def take_expired(found: Iterator[ExpiredRollout | None], most: int) -> tuple[list[ExpiredRollout], bool]:
    """Return at most `most` due rollouts, and whether there may be more."""
    some: list[ExpiredRollout] = []
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
