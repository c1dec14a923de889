"""A library that blocks, beside the event loop: it runs in a thread, and what it needs is done by whoever awaits it.

The thread asks for one thing after the other and waits for each. Between `yield` and the next step it waits too. So
nothing of it goes on while nobody listens, and what it does follows from the answers alone. When the listener is
cancelled, or what was asked for has failed, the thread ends at its next question.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Ended(BaseException):
    """Nobody listens any more. No `Exception`, because libraries go on after those."""


@dataclass(slots=True)
class _Request:
    """What the thread says: a question, news, or that it has ended."""

    work: Callable[[], Awaitable[Any]] | None = None
    news: Any = None
    ended: bool = False
    error: BaseException | None = None
    answer: Future[Any] = field(default_factory=Future[Any])


class Line:
    """The thread's end of the line."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._open: _Request | None = None
        self._over = False
        self._lock = threading.Lock()

    def ask(self, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` comes to in the event loop. Raises `Ended`."""
        return cast(T, self._send(_Request(work)))

    def tell(self, news: Any) -> None:
        """Gives the listener something, and waits until it wants more. Raises `Ended`."""
        self._send(_Request(news=news))

    def run(self, function: Callable[[Line], None]) -> None:
        """The life of the thread."""
        last = _Request(ended=True)
        try:
            function(self)
        except BaseException as error:  # handed to the listener
            last.error = error
        self._post(last)

    def hang_up(self) -> None:
        """Nobody listens any more; called in the event loop."""
        with self._lock:
            self._over = True
            if self._open is not None and not self._open.answer.done():
                self._open.answer.set_exception(Ended())

    def _send(self, request: _Request) -> Any:
        if not self._post(request):
            raise Ended
        return request.answer.result()

    def _post(self, request: _Request) -> bool:
        """Whether somebody listens."""
        with self._lock:
            if not self._over:
                self._open = request
                self._loop.call_soon_threadsafe(self.requests.put_nowait, request)
            return not self._over


async def beside(function: Callable[[Line], None]) -> AsyncGenerator[Any]:
    """Runs a function in a thread and does what it asks for; gives what it tells. Raises what either has raised."""
    line = Line()
    threading.Thread(target=line.run, args=(function,), daemon=True).start()
    try:
        while not (request := await line.requests.get()).ended:
            if request.work is None:
                yield request.news
            request.answer.set_result(None if request.work is None else await request.work())
        if request.error is not None:
            raise request.error
    finally:
        line.hang_up()
