"""Messages between the workers of a gateway, over a Unix socket: msgpack, each with its length in front.

Both ends ask and answer. An answer may take its time, others go on meanwhile. Messages arrive in the order in which
they were sent, so an end that asks knows that its earlier messages were handled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from inspect import isawaitable
from itertools import count
from typing import Any, Final, TypeAlias

import msgspec

_LENGTH: Final = 4
_log = logging.getLogger("penstock.workers")

Handler: TypeAlias = "Callable[..., Any]"
"""Takes the arguments of a message; returns the answer, or a future of it."""
_NOTHING: Final[Mapping[str, Handler]] = {}


class LinkLostError(ConnectionError):
    """The other end has died, or has closed the link."""


class WorkerLink(asyncio.Protocol):
    """One end of a link. For the event loop."""

    def __init__(
        self,
        made: Callable[[WorkerLink], None],
        lost: Callable[[WorkerLink], None],
        handlers: Mapping[str, Handler] = _NOTHING,
    ) -> None:
        """`made`, `lost`: called when the link is made, and when it is lost."""
        self.handlers = handlers
        """Handlers of the other end's messages, by name."""
        self._made, self._lost = made, lost
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering = set[asyncio.Future[None]]()
        self.name = ""
        """Name of the other process (`store.processes`), once it has sent it."""
        self.pid = 0
        """Process id of the other process, for people, once it has sent it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment] # asyncio's signature is wider than what it gives
        self._made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the questions that wait for an answer."""
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(LinkLostError("the other worker has died or has left"))
        self._asked.clear()
        for one in self._answering:
            one.cancel()
        self._lost(self)

    def close(self) -> None:
        self._transport.close()

    def notify(self, name: str, *said: Any) -> None:
        """Send a message that needs no answer."""
        self._send(0, name, said)

    def request(self, name: str, *said: Any) -> asyncio.Future[Any]:
        """Send a question; the future fails with `LinkLostError`, or with `RuntimeError` where the other end cannot
        answer."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            answer.set_exception(LinkLostError("the other worker has died or has left"))
        else:
            self._asked[number] = answer
            self._send(number, name, said)
        return answer

    def data_received(self, data: bytes) -> None:
        """Handle the messages that are complete."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH:
            end = _LENGTH + int.from_bytes(self._buffer[:_LENGTH])
            if len(self._buffer) < end:
                return
            number, name, said = msgspec.msgpack.decode(memoryview(self._buffer)[_LENGTH:end])
            del self._buffer[:end]
            if name is None:
                self._is_answered(number, *said)
            else:
                self._is_asked(number, name, said)

    def _send(self, number: int, name: str | None, said: Any) -> None:
        if not self._transport.is_closing():
            made = msgspec.msgpack.encode((number, name, said))
            self._transport.write(len(made).to_bytes(_LENGTH) + made)

    def _is_answered(self, number: int, answer: Any, failure: str | None) -> None:
        waiting = self._asked.pop(number, None)
        if waiting is None or waiting.done():
            return
        if failure is None:
            waiting.set_result(answer)
        else:
            waiting.set_exception(RuntimeError(failure))

    def _is_asked(self, number: int, name: str, said: list[Any]) -> None:
        try:
            made = self.handlers[name](*said)
        except Exception as error:
            self._fails(number, name, error)
            return
        if isawaitable(made):
            answering = asyncio.ensure_future(made)
            self._answering.add(answering)
            answering.add_done_callback(partial(self._answer, number, name))
        elif number:
            self._send(number, None, (made, None))

    def _answer(self, number: int, name: str, done: asyncio.Future[Any]) -> None:
        self._answering.discard(done)
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            self._fails(number, name, error)
        elif number:
            self._send(number, None, (done.result(), None))

    def _fails(self, number: int, name: str, error: BaseException) -> None:
        _log.error("another worker has asked for %r, which failed", name, exc_info=error)
        if number:
            self._send(number, None, (None, f"{name!r} failed in another worker: its log says why"))
