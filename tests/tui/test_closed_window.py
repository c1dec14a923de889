"""A window that is closed: what the driver then writes goes nowhere, and nothing waits for it."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, cast

import pytest
from fakes.process import PATIENCE
from textual.app import App
from textual.drivers._writer_thread import MAX_QUEUED_WRITES, WriterThread

from penstock.tui.app import TerminalDriver, TerminalOutput

WRITES = 4 * MAX_QUEUED_WRITES
"""As many as would fill the queue of a thread that has ended."""


@pytest.fixture
def closed() -> Iterator[IO[str]]:
    """A terminal whose window is closed."""
    ours, theirs = pty.openpty()
    file = open(theirs, "w")  # noqa: SIM115
    os.close(ours)
    yield file
    with suppress(OSError):  # what was written to nobody
        file.close()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts back the handlers of signals that a driver sets."""
    found = {number: signal.getsignal(number) for number in (signal.SIGTSTP, signal.SIGCONT)}
    yield
    for number, handler in found.items():
        signal.signal(number, handler)


async def test_what_nobody_can_see_is_thrown_away(closed: IO[str]) -> None:
    thread = WriterThread(cast("IO[str]", TerminalOutput(closed)))
    thread.start()

    def write() -> None:
        for _ in range(WRITES):
            thread.write("seen by nobody\n")
        thread.stop()

    await asyncio.wait_for(asyncio.to_thread(write), PATIENCE)


@pytest.mark.usefixtures("handlers")
async def test_the_signal_of_a_closed_window_is_no_return_from_the_background(closed: IO[str]) -> None:
    driver = TerminalDriver(App[None]())
    driver.fileno = closed.fileno()
    os.kill(os.getpid(), signal.SIGCONT)
    assert driver._writer_thread is None
    assert driver._key_thread is None


def test_a_terminal_that_is_there_is_written_to() -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w") as file:
        window = TerminalOutput(file)
        window.write("seen")
        window.flush()
        assert (window.isatty(), window.fileno()) == (True, theirs)
        assert os.read(ours, 100) == b"seen"
    os.close(ours)
