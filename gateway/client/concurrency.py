"""Several requests at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

PARALLEL = 8
"""Number of parallel requests."""
LARGE = 1 << 20
"""Bytes of an answer above which the gateway gets one request at a time: it needs about ten times as much memory
meanwhile."""


async def map_concurrently(ask: Callable[[A], Awaitable[B]], about: Sequence[A], at_once: int = PARALLEL) -> list[B]:
    """The answers of `ask` for each item of `about`, in order, `concurrency_for` requests at a time."""
    answers: list[B] = []
    for at in range(0, len(about), at_once):
        answers += await asyncio.gather(*map(ask, about[at : at + at_once]))
    return answers


def concurrency_for(sizes: Iterable[int]) -> int:
    """The number of parallel requests for answers of these sizes in bytes."""
    return 1 if max(sizes, default=0) > LARGE else PARALLEL
