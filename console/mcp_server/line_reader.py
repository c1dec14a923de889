"""Lines of stdin for the SDK, read by a thread that the process does not wait for at its end.

The SDK's own reader holds Ctrl-C back until the next line arrives. This one reads the descriptor itself, without a lock
of the interpreter, so that the process can end while it waits.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from threading import Thread

PIECE = 1 << 16


class LineReader:
    """Lines of a descriptor, read from its creation on."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        Thread(target=self._read, name="stdin", daemon=True).start()

    async def __aiter__(self) -> AsyncIterator[str]:
        while (line := await self._lines.get()) is not None:
            yield line

    def _read(self) -> None:
        waiting = bytearray()
        # The loop is closed if the server has ended first.
        with suppress(RuntimeError):
            while piece := self._piece():
                waiting += piece
                *whole, rest = waiting.split(b"\n") if b"\n" in piece else [waiting]
                waiting = rest
                for line in whole:
                    self._put(line.decode(errors="replace"))
            if waiting:
                self._put(waiting.decode(errors="replace"))
            self._put(None)

    def _piece(self) -> bytes:
        """The next bytes; empty at the end and after an error."""
        try:
            return os.read(self._descriptor, PIECE)
        except OSError:
            return b""

    def _put(self, line: str | None) -> None:
        self._loop.call_soon_threadsafe(self._lines.put_nowait, line)
