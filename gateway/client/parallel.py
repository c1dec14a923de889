"""Several requests at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

PARALLEL = 8
"""Requests at a time."""
LARGE = 1 << 20
"""Bytes of an answer above which the gateway makes one at a time: it takes about ten times as much meanwhile."""


async def each(ask: Callable[[A], Awaitable[B]], about: Sequence[A], at_once: int = PARALLEL) -> list[B]:
    """The answers to a question about each of them, a few requests at a time."""
    answers: list[B] = []
    for at in range(0, len(about), at_once):
        answers += await asyncio.gather(*map(ask, about[at : at + at_once]))
    return answers


def at_once(sizes: Iterable[int]) -> int:
    """How many requests there are at a time for answers of these sizes."""
    return 1 if max(sizes, default=0) > LARGE else PARALLEL
