"""What the workers of a gateway ask each other, over a Unix socket: messages of msgpack, each with its length in front.

Both ends ask and answer. An answer may take its time, others go on meanwhile. What one end tells or asks comes to the
other in this order, so whoever asks knows that what it told before is done.
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
"""Takes what was said; returns the answer, or what will give it."""
_NOTHING: Final[Mapping[str, Handler]] = {}


class LinkLost(ConnectionError):
    """The other end has died, or has left."""


class Link(asyncio.Protocol):
    """One end. For the event loop."""

    def __init__(
        self, made: Callable[[Link], None], lost: Callable[[Link], None], handlers: Mapping[str, Handler] = _NOTHING
    ) -> None:
        """`made`, `lost`: told when it is there, and no more."""
        self.handlers = handlers
        """What the other end may ask, by name."""
        self._made, self._lost = made, lost
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering = set[asyncio.Future[None]]()
        self.name = ""
        """Of the other process (`store.processes`), once it has said so."""
        self.pid = 0
        """The system's id of it, for people; the same."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The other end is there."""
        self._transport = transport  # type: ignore[assignment] # asyncio's signature is wider than what it gives
        self._made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits for an answer gets none."""
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(LinkLost("the other worker has died or has left"))
        self._asked.clear()
        for one in self._answering:
            one.cancel()
        self._lost(self)

    def close(self) -> None:
        """Leaves."""
        self._transport.close()

    def tell(self, name: str, *said: Any) -> None:
        """Says something that needs no answer."""
        self._send(0, name, said)

    def ask(self, name: str, *said: Any) -> asyncio.Future[Any]:
        """Asks something; fails with `LinkLost`, or with `RuntimeError` where the other end cannot answer."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            answer.set_exception(LinkLost("the other worker has died or has left"))
        else:
            self._asked[number] = answer
            self._send(number, name, said)
        return answer

    def data_received(self, data: bytes) -> None:
        """Takes what is whole."""
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
