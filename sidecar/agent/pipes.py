"""Pipes between a runner and its agents.

They are made here, because an event loop may take sockets for them (uvloop does): an agent cannot open those by name,
as `cat /dev/stdin` and `echo done > /dev/stderr` do.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack

FLOOD = 1 << 20
"""The most bytes of output that may wait to be read."""


class _Read(asyncio.StreamReaderProtocol):
    """A pipe is closed at its end. A socket could still be written to, so that uvloop would keep it."""

    def eof_received(self) -> bool:
        _ = super().eof_received()
        return False


async def output(theirs: ExitStack) -> tuple[asyncio.StreamReader, int]:
    """(what reads it, the end that an agent writes to). `theirs` closes that end here."""
    reading, writing = os.pipe()
    theirs.callback(os.close, writing)
    reader, loop = asyncio.StreamReader(limit=FLOOD), asyncio.get_running_loop()
    _ = await loop.connect_read_pipe(lambda: _Read(reader), os.fdopen(reading, "rb", 0))
    return reader, writing


async def given(theirs: ExitStack, data: bytes) -> int:
    """The end of a pipe that an agent reads `data` from; `theirs` closes that end here. The loop writes as the agent
    reads; one that does not read is no error.
    """
    reading, writing = os.pipe()
    theirs.callback(os.close, reading)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(writing, "wb", 0))
    # Before there is an agent: the pipe of one that has ended is closed, and must not be written to.
    transport.write(data)
    transport.close()
    return reading
