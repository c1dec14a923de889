"""What is damaged on the tape, for those who go on without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.gateway.store.codec import TORN
from penstock.gateway.store.directory import Damaged, TapeError

T = TypeVar("T")


def is_damage(error: TapeError) -> bool:
    """Whether it would fail again whenever it is tried: a record makes no sense, while the tape can be read."""
    return isinstance(error, Damaged) or isinstance(error.__cause__, TORN)


def unless_damaged(read: Callable[[], T]) -> T | None:
    """What is read; None where it is damaged."""
    try:
        return read()
    except TapeError as error:
        if not is_damage(error):
            raise
        return None
