"""Several requests at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

PARALLEL = 8
"""Requests at a time."""


async def each(ask: Callable[[A], Awaitable[B]], about: Sequence[A]) -> list[B]:
    """The answers to a question about each of them, a few requests at a time."""
    answers: list[B] = []
    for at in range(0, len(about), PARALLEL):
        answers += await asyncio.gather(*map(ask, about[at : at + PARALLEL]))
    return answers
