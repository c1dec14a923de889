"""Workers of one gateway (`penstock serve --workers N`), and connections that a certain one of them serves."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from fakes.process import Gateway, children, command
from fakes.raw import Wire, connect, get

_NAME = re.compile(rb"\0worker (\d+) of \d+\0")


def workers(parent: int) -> dict[int, int]:
    """Process ids of those that it has started and that have not ended, by their numbers."""
    found: dict[int, int] = {}
    for pid in children(parent):
        if (name := _NAME.search(command(pid))) is not None:
            found[int(name[1])] = pid
    return found


@asynccontextmanager
async def served_by(gateway: Gateway, pid: int, tries: int = 60) -> AsyncGenerator[Wire]:
    """A connection that this worker serves. Which one does is up to the system, so some more are made, and closed."""
    async with AsyncExitStack() as stack:
        for _ in range(tries):
            wire = await stack.enter_async_context(connect(gateway.url))
            wire.send(get("/healthz", host="127.0.0.1"))
            assert (await wire.message()).startswith(b"HTTP/1.1 200")
            if _holds(pid, gateway.port, wire.socket.getsockname()[1]):
                yield wire
                return
    raise AssertionError(f"none of {tries} connections came to process {pid}")


def _holds(pid: int, port: int, client: int) -> bool:
    """Whether a process has the other end of a connection from this port."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if (int(fields[1].rpartition(":")[2], 16), int(fields[2].rpartition(":")[2], 16)) == (port, client):
            return f"socket:[{fields[9]}]" in held(pid)
    return False


def held(pid: int) -> set[str]:
    """What a process holds; nothing where it has ended."""
    try:
        return {_target(pid, name) for name in os.listdir(f"/proc/{pid}/fd")}
    except FileNotFoundError:
        return set()


def _target(pid: int, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{name}")
    except OSError:
        return ""
