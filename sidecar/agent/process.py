"""One agent on this machine: a command below a warden (`sidecar.agent.supervisor`), its output, and how it ended.

The warden has the other end of a socket pair. Closing ours, on purpose or by dying, ends the agent and all that it has
started. Output is read all the time and never makes an agent wait.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.sidecar.agent import warden
from penstock.sidecar.agent.output import Stream

Sink = Callable[[Stream, bytes], None]
READ = 1 << 16
DRAIN_S = 5.0
"""How long output is waited for when the tree is gone: a process that cannot be killed may still hold the pipe."""


@dataclass(frozen=True, slots=True)
class Command:
    """What is started."""

    argv: tuple[str, ...]
    """Command and arguments."""
    env: Mapping[str, str]
    """All of its variables."""
    stdin: bytes | None = None
    """What it reads; None is nothing."""
    cwd: Path | None = None
    """Where it starts; None is the runner's own directory."""
    after: tuple[str, ...] = ()
    """A command that cleans up after it, however it ended."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an agent ended."""

    exit_code: int | None = None
    """What it exited with; None when a signal ended it or it was not started."""
    signal: str | None = None
    """Name of the signal that ended it."""
    duration_ns: int = 0
    """How long it ran."""
    error: str | None = None
    """Why it could not be started or followed."""


class Agent(Protocol):
    """Something that runs an attempt."""

    @property
    def pid(self) -> int | None:
        """Root of its processes on this machine."""
        ...

    async def wait(self) -> Ending:
        """How it ended, once nothing of it is left."""
        ...

    def terminate(self) -> None:
        """TERM, and KILL after the grace. May be asked for more than once."""
        ...

    def kill(self) -> None:
        """KILL at once."""
        ...


class Process:
    """A running agent; made by `start` and by `sidecar.agent.fork_client`."""

    def __init__(
        self,
        pid: int,
        pipes: Mapping[Stream, asyncio.StreamReader],
        gone: Callable[[], Awaitable[object]],
        control: socket.socket,
        sink: Sink,
    ) -> None:
        """`pid`: the warden's; `gone` comes back when nothing of it is left."""
        self._pid, self._pipes, self._gone, self._control, self._sink = pid, pipes, gone, control, sink

    @property
    def pid(self) -> int | None:
        """The warden."""
        return self._pid

    def terminate(self) -> None:
        """TERM, and KILL after the grace."""
        self._order(b"T")

    def kill(self) -> None:
        """KILL at once."""
        self._order(b"K")

    def _order(self, order: bytes) -> None:
        with suppress(OSError):
            _ = self._control.send(order)

    def close(self) -> None:
        """Ends it now, if it has not ended."""
        self._control.close()

    async def wait(self) -> Ending:
        """How it ended, once nothing of it is left and its output is read. This also holds when it is cancelled."""
        readers = [asyncio.ensure_future(self._read(name, pipe)) for name, pipe in self._pipes.items()]
        try:
            messages = await warden.follow(self._control)
        finally:
            self.close()
            _ = await self._gone()
            _ = await asyncio.wait(readers, timeout=DRAIN_S)
            for reader in readers:
                _ = reader.cancel()
        return _ending(messages)

    async def _read(self, name: Stream, pipe: asyncio.StreamReader) -> None:
        while data := await pipe.read(READ):
            self._sink(name, data)
        self._sink(name, b"")


async def start(command: Command, grace_s: float, sink: Sink) -> Process:
    """Start a command; raises OSError or ValueError when it cannot even be tried."""
    told = {"grace_s": grace_s, "after": command.after}
    stdin = asyncio.subprocess.DEVNULL if command.stdin is None else command.stdin
    made = await warden.start(command.argv, told, stdin, command.env, command.cwd)
    return Process(
        made.process.pid, {"stdout": made.stdout, "stderr": made.stderr}, made.process.wait, made.control, sink
    )


def _ending(messages: dict[str, Any]) -> Ending:
    if error := messages.get("error"):
        return Ending(error=error)
    if "status" not in messages:
        return Ending(error="the process that watched it was killed")
    code = os.waitstatus_to_exitcode(messages["status"])
    return Ending(
        exit_code=code if code >= 0 else None,
        signal=_signal_name(-code) if code < 0 else None,
        duration_ns=messages["ended_ns"] - messages["started_ns"],
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
