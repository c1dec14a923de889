"""Drives an asynchronous iterator by hand: it advances when a chunk has arrived, in the callback that brought it.

litellm's stream wrappers pull chunks out of an iterator and wait for it. Here that iterator is a `PushIterator`, which
only waits by giving control back to the code that drives the wrapper (`IteratorDriver`). So no task and no thread runs
per stream. A wrapper that waited for anything else would be noticed, because it would give control back with something
other than `None`.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any


class PushIterator:
    """An asynchronous iterator over items that are put into it."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
        self._over = False

    def put(self, item: Any) -> None:
        self._waiting.append(item)

    def close(self) -> None:
        """End the iterator after the items so far."""
        self._over = True

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while not self._waiting:
            if self._over:
                raise StopAsyncIteration
            await _suspended()
        return self._waiting.popleft()


class IteratorDriver:
    """Drives an iterator that is fed by a `PushIterator`."""

    def __init__(self, make: Callable[[PushIterator], AsyncIterator[Any]]) -> None:
        """`make`: makes the iterator over a feed."""
        self._feed = PushIterator()
        self._iterator = make(self._feed)
        self._step: Coroutine[Any, Any, Any] | None = None

    def put(self, item: Any) -> list[Any]:
        """Feed an item and return the items that the iterator yields for it."""
        self._feed.put(item)
        return self._run()

    def close(self) -> list[Any]:
        """End the feed and return the last items of the iterator."""
        self._feed.close()
        return self._run()

    def _run(self) -> list[Any]:
        made: list[Any] = []
        while True:
            step = self._step or _once(self._iterator)
            try:
                waits_for = step.send(None)
            except StopIteration as done:
                self._step = None
                made.append(done.value)
            except StopAsyncIteration:
                self._step = None
                return made
            else:
                if waits_for is not None:
                    raise RuntimeError(f"a stream wrapper waits for {waits_for!r}, which never comes")
                self._step = step
                return made


async def _once(iterator: AsyncIterator[Any]) -> Any:
    return await iterator.__anext__()


@types.coroutine
def _suspended() -> Generator[None, None, None]:
    yield
