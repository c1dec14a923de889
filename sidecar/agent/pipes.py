"""Pipes between a runner and its agents.

They are made here, because an event loop may use sockets instead (uvloop does), and an agent cannot open a socket by
name, as `cat /dev/stdin` and `echo done > /dev/stderr` do.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack

FLOOD = 1 << 20
"""The most bytes of output that may wait to be read."""


class _PipeProtocol(asyncio.StreamReaderProtocol):
    """Closes a pipe at its end. uvloop would keep it open, as a socket to which one could still write."""

    def eof_received(self) -> bool:
        _ = super().eof_received()
        return False


class OutputPipe(asyncio.StreamReader):
    """The end of a pipe from which an agent's output is read."""

    def set_transport(self, transport: asyncio.BaseTransport) -> None:
        super().set_transport(transport)
        self._pipe = transport

    def close(self) -> None:
        """Close the pipe before its end: a process that got away may hold its other end for ever."""
        self._pipe.close()


async def output_pipe(theirs: ExitStack) -> tuple[OutputPipe, int]:
    """A pipe for an agent's output: (its reader, the end that the agent writes to). `theirs` closes that end here."""
    reading, writing = os.pipe()
    theirs.callback(os.close, writing)
    reader, loop = OutputPipe(limit=FLOOD), asyncio.get_running_loop()
    _ = await loop.connect_read_pipe(lambda: _PipeProtocol(reader), os.fdopen(reading, "rb", 0))
    return reader, writing


async def input_pipe(theirs: ExitStack, data: bytes) -> int:
    """The end of a pipe from which an agent reads `data`; `theirs` closes that end here. The loop writes as the agent
    reads; an agent that does not read is no error.
    """
    reading, writing = os.pipe()
    theirs.callback(os.close, reading)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(writing, "wb", 0))
    # Written before the agent starts, because the pipe of an agent that has ended is closed and must not be written to.
    transport.write(data)
    transport.close()
    return reading
