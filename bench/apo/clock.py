"""A clock that is set forward instead of waited for: what takes hours in a world takes milliseconds here."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Skipping(selectors.DefaultSelector):
    """Waits for no timer; says by how much the clock goes forward."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors`. Without a timer it waits: a thread is thinking."""
        found = super().select(0 if timeout is not None else None)
        if not found and timeout is not None and timeout > 0:
            self.now += timeout
        return found


class Loop(asyncio.SelectorEventLoop):
    """Its time is the world's."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Seconds of the world."""
        return self._skipping.now


def timed(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """What came of it, and how many seconds of the world it took."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(work), runner.get_loop().time()
