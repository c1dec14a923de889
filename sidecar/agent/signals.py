"""What a runner does when it is asked to end: the first SIGINT or SIGTERM lets agents finish, the second kills them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from penstock.sidecar.progress import Progress

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stoppable(Protocol):
    """Something that can be asked to end in two ways."""

    def stop(self) -> None:
        """Take no more work; the agents that run may finish."""
        ...

    def abandon(self) -> None:
        """Kill the agents and give their attempts back."""
        ...


@contextmanager
def heeding(runner: Stoppable, progress: Progress) -> Generator[None]:
    """Passes signals on to the runner while this lasts."""
    loop, asked = asyncio.get_running_loop(), False

    def heed() -> None:
        nonlocal asked
        if asked:
            progress.say("killing the agents and giving their attempts back")
            runner.abandon()
        else:
            progress.say("taking no more work; once more kills the agents that run")
            runner.stop()
        asked = True

    for number in SIGNALS:
        loop.add_signal_handler(number, heed)
    try:
        yield
    finally:
        for number in SIGNALS:
            _ = loop.remove_signal_handler(number)
