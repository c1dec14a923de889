"""Heavy reads: those that take the bytes of calls off the tape, or look through much of it.

Few of them run at once, the others wait in order. Each holds several times the size of a call in memory, and computing
in a thread takes the interpreter from the event loop, which serves all calls. So more threads would answer nobody
sooner. They have threads of their own, so that nothing else ever waits behind them.

A read has a place until the client has taken the answer, but only for a limited time. A client that takes its answer
slowly keeps it in memory, and lets others go on. If a client leaves while it waits, nothing is read for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, ParamSpec, Protocol, TypeVar

from aiohttp import web
from pydantic import BaseModel

from penstock.gateway.api import compression

AT_ONCE: Final = 2
"""Most heavy reads that run at the same time."""
BLOCK: Final = 1 << 20
"""Bytes of calls, about, that are read before they are sent."""
TURN_S: Final = 1.0
"""Seconds for which a client keeps its place while it takes its answer."""

P = ParamSpec("P")
T = TypeVar("T")


class ReadRunner(Protocol):
    """Runs a read: `HeavyReads.run`, or `asyncio.to_thread` for a cheap one."""

    async def __call__(self, do: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


@dataclass(frozen=True, slots=True)
class DeferredAnswer:
    """The answer of an operation that is a heavy read, not made yet."""

    make: Callable[[], BaseModel]


class HeavyReads:
    """The heavy reads of one gateway. On the loop only."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(AT_ONCE)
        self._threads = ThreadPoolExecutor(AT_ONCE, "penstock-reads")

    async def run(self, do: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function as soon as there is a place; return its result."""
        async with self._places:
            return await self._done(partial(do, *args, **kwargs))

    async def answer(
        self, request: web.Request, make: Callable[[], bytes], headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Send the body that a function makes, with gzip if due."""
        response = web.StreamResponse(headers=headers)

        def made() -> bytes:
            body, headers = compression.compress_body(request.headers, make())
            response.headers.update(headers)
            return body

        async def send(body: bytes) -> None:
            response.content_length = len(body)
            await response.prepare(request)
            await response.write(body)

        await self.send_result(made, send)
        return response

    async def send_result(self, make: Callable[[], T], send: Callable[[T], Awaitable[None]]) -> None:
        """Send the result of a function."""
        async with self._places:
            sending = asyncio.ensure_future(send(await self._done(make)))
            await _taken(sending, asyncio.get_running_loop().time() + TURN_S)
        await sending

    async def stream(self, response: web.StreamResponse, records: Iterator[bytes]) -> None:
        """Send records, about a megabyte at a time. After each turn another read gets the place."""
        while True:
            async with self._places:
                sending = await self._turn(response, records)
            if sending is None:
                return
            await sending

    async def _turn(self, response: web.StreamResponse, records: Iterator[bytes]) -> asyncio.Future[None] | None:
        """Send for `TURN_S`; return the write that is then under way, or None if all is sent."""
        until = asyncio.get_running_loop().time() + TURN_S
        while block := await self._done(partial(_block, records)):
            sending = asyncio.ensure_future(response.write(block))
            del block
            if not await _taken(sending, until):
                return sending
        return None

    async def _done(self, do: Callable[[], T]) -> T:
        # A place is free again when its client has left, though its thread may still be busy: with as many threads as
        # places, a read that waits for a thread is not begun if its client leaves as well.
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)


def _block(records: Iterator[bytes]) -> bytes:
    """The next records, about a megabyte; empty at the end."""
    block, size = list[bytes](), 0
    while size < BLOCK and (record := next(records, b"")):
        block.append(record)
        size += len(record)
    # A single large record is not copied.
    return b"".join(block)


async def _taken(sending: asyncio.Future[None], until: float) -> bool:
    """Wait until an answer is taken; False if it is late. If the client leaves, sending is cancelled."""
    try:
        await asyncio.wait({sending}, timeout=max(0.0, until - asyncio.get_running_loop().time()))
    except asyncio.CancelledError:
        if not sending.cancel():
            sending.exception()  # no client waits for the error
        raise
    if not sending.done():
        return False
    sending.result()
    return asyncio.get_running_loop().time() < until
