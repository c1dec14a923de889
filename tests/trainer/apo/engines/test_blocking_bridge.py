"""A thread beside the event loop: what it asks is done, what it tells is given, and it ends when nobody listens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing, suppress

import pytest

from penstock.trainer.apo.engines.gepa import BridgeExit, LoopPortal, iterate_in_thread

PATIENCE = 10.0


class Library:
    """Something that blocks, and goes on after exceptions."""

    def __init__(self, work: Callable[[LoopPortal], None]) -> None:
        self._work = work
        self.ended = threading.Event()
        self.how: BaseException | None = None

    def __call__(self, line: LoopPortal) -> None:
        try:
            self._work(line)
        except BaseException as error:
            self.how = error
            raise
        finally:
            self.ended.set()

    async def end(self) -> BaseException | None:
        """How it ended."""
        assert await asyncio.to_thread(self.ended.wait, PATIENCE)
        return self.how


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def three(line: LoopPortal) -> None:
    """Tells the doubles of three numbers."""
    for number in range(3):
        line.emit(line.call(lambda number=number: double(number)))


async def test_what_it_asks_is_done_and_what_it_tells_is_given_in_order() -> None:
    assert [news async for news in iterate_in_thread(three)] == [0, 2, 4]


async def test_it_waits_until_more_is_wanted() -> None:
    asked: list[int] = []

    async def note(number: int) -> None:
        asked.append(number)

    def work(line: LoopPortal) -> None:
        for number in range(3):
            line.call(lambda number=number: note(number))
            line.emit(number)

    async with aclosing(iterate_in_thread(work)) as news:
        assert await anext(news) == 0
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert asked == [0]
        assert await anext(news) == 1
        assert asked == [0, 1]


async def test_an_error_of_what_was_asked_for_reaches_the_listener_and_ends_the_thread() -> None:
    async def fails() -> None:
        raise RuntimeError("it is gone")

    def work(line: LoopPortal) -> None:
        while True:
            with suppress(Exception):  # as libraries do
                line.call(fails)

    library = Library(work)
    with pytest.raises(RuntimeError, match="it is gone"):
        _ = [news async for news in iterate_in_thread(library)]
    assert isinstance(await library.end(), BridgeExit)


async def test_an_error_of_the_library_reaches_the_listener() -> None:
    def work(line: LoopPortal) -> None:
        line.emit(1)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        _ = [news async for news in iterate_in_thread(work)]


@pytest.mark.parametrize("asks", [False, True])
async def test_a_listener_that_goes_away_ends_the_thread(asks: bool) -> None:
    waits = asyncio.Event()

    async def for_ever() -> None:
        waits.set()
        await asyncio.Event().wait()

    library = Library(lambda line: (line.call(for_ever) if asks else None, three(line))[1])

    async def listen() -> None:
        async with aclosing(iterate_in_thread(library)) as news:
            async for _ in news:
                waits.set()
                await asyncio.Event().wait()

    listener = asyncio.ensure_future(listen())
    await asyncio.wait_for(waits.wait(), PATIENCE)
    listener.cancel()
    await asyncio.gather(listener, return_exceptions=True)
    assert isinstance(await library.end(), BridgeExit)
