"""A clock that is set forward instead of waited for: hours of a world take milliseconds here."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Skipping(selectors.DefaultSelector):
    """A selector that waits for no timer, and sets its clock forward instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Without a timer it waits: a thread is thinking."""
        found = super().select(0 if timeout is not None else None)
        if not found and timeout is not None and timeout > 0:
            self.now += timeout
        return found


class Loop(asyncio.SelectorEventLoop):
    """An event loop with the world's clock."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Return the seconds of the world."""
        return self._skipping.now


def timed(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run the work; return its result and the seconds of the world that it took."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(work), runner.get_loop().time()
