"""Runs a blocking library beside the event loop: it runs in a thread, and the loop does the work that it requests.

The thread sends one request after the other and waits for each. Between `yield` and the next step it waits too. So the
thread stands still while nobody iterates, and its course follows from the answers alone. When the iteration is
cancelled, or a request has failed, the thread ends at its next request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

T = TypeVar("T")


class BridgeExit(BaseException):
    """The iteration has ended. No `Exception`, because libraries go on after those."""


@dataclass(slots=True)
class _ThreadMessage:
    """A message of the thread: work to do, news, or its end."""

    work: Callable[[], Awaitable[Any]] | None = None
    news: Any = None
    ended: bool = False
    error: BaseException | None = None
    answer: Future[Any] = field(default_factory=Future[Any])


class LoopPortal:
    """The thread's connection to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.requests: asyncio.Queue[_ThreadMessage] = asyncio.Queue()
        self._open: _ThreadMessage | None = None
        self._over = False
        self._lock = threading.Lock()

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Let the event loop do `work`, and return the result. Raises `BridgeExit`."""
        return cast(T, self._send(_ThreadMessage(work)))

    def emit(self, news: Any) -> None:
        """Yield news to the iteration, and wait for its next step. Raises `BridgeExit`."""
        self._send(_ThreadMessage(news=news))

    def run(self, function: Callable[[LoopPortal], None]) -> None:
        """Run the function, then report the end of the thread."""
        last = _ThreadMessage(ended=True)
        try:
            function(self)
        except BaseException as error:  # handed to the listener
            last.error = error
        self._post(last)

    def close(self) -> None:
        """End the connection because the iteration has ended; called in the event loop."""
        with self._lock:
            self._over = True
            if self._open is not None and not self._open.answer.done():
                self._open.answer.set_exception(BridgeExit())

    def _send(self, request: _ThreadMessage) -> Any:
        if not self._post(request):
            raise BridgeExit
        return request.answer.result()

    def _post(self, request: _ThreadMessage) -> bool:
        """Send a request; return True if the iteration has not ended."""
        with self._lock:
            if not self._over:
                self._open = request
                self._loop.call_soon_threadsafe(self.requests.put_nowait, request)
            return not self._over


async def iterate_in_thread(function: Callable[[LoopPortal], None]) -> AsyncGenerator[Any]:
    """Run a function in a thread and do the work that it requests; yield its news. Raises the error of either."""
    line = LoopPortal()
    threading.Thread(target=line.run, args=(function,), daemon=True).start()
    try:
        while not (request := await line.requests.get()).ended:
            if request.work is None:
                yield request.news
            request.answer.set_result(None if request.work is None else await request.work())
        if request.error is not None:
            raise request.error
    finally:
        line.close()
