"""One agent on this machine: a command below a warden (`sidecar.run.agent.supervisor`), its output, and how it ended.

The warden has the other end of a socket pair. When ours closes, on purpose or because the runner dies, the agent and
all that it has started end. Output is read all the time and never makes an agent wait.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.sidecar.run.agent import warden
from penstock.sidecar.run.agent.output import OutputPipe, Stream

Sink = Callable[[Stream, bytes], None]
READ = 1 << 16
DRAIN_S = 5.0
"""The time for which output is still read after all processes are gone: one that cannot be killed may hold the pipe; s.
"""


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """A command to start for an attempt, with its environment and its stdin."""

    argv: tuple[str, ...]
    """Command and arguments."""
    env: Mapping[str, str]
    """All variables of the command."""
    stdin: bytes | None = None
    """The bytes on its stdin; None is no stdin."""
    after: tuple[str, ...] = ()
    """A command that cleans up at the end, however that comes."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """The end of an agent."""

    exit_code: int | None = None
    """Its exit code; None when a signal ended it or it was not started."""
    signal: str | None = None
    """Name of the signal that ended it; None without one."""
    duration_ns: int = 0
    """Its run time; ns."""
    error: str | None = None
    """The reason why it could not be started or followed; None when it could."""


class AgentHandle(Protocol):
    """A running agent: one attempt, wherever it runs."""

    @property
    def pid(self) -> int | None:
        """Pid of the root of its processes on this machine; None when it has none here."""
        ...

    async def wait(self) -> ExitStatus:
        """Wait until no process of it is left; return its end."""
        ...

    def terminate(self) -> None:
        """Send TERM, and KILL after the grace. May be called more than once."""
        ...

    def kill(self) -> None:
        """Send KILL at once, without a grace."""
        ...


class AgentProcess:
    """A running agent; made by `start` and by `sidecar.run.agent.function_clients`."""

    def __init__(
        self,
        pid: int,
        pipes: Mapping[Stream, OutputPipe],
        gone: Callable[[], Awaitable[object]],
        control: socket.socket,
        sink: Sink,
    ) -> None:
        """`pid`: the warden's. `gone` returns when no process of the agent is left."""
        self._pid, self._pipes, self._gone, self._control, self._sink = pid, pipes, gone, control, sink

    @property
    def pid(self) -> int | None:
        """The pid of the warden, the root of the agent's processes."""
        return self._pid

    def terminate(self) -> None:
        self._order(b"T")

    def kill(self) -> None:
        self._order(b"K")

    def _order(self, order: bytes) -> None:
        with suppress(OSError):
            _ = self._control.send(order)

    def close(self) -> None:
        """End the agent now, if it has not ended."""
        self._control.close()

    async def wait(self) -> ExitStatus:
        """Wait until no process of the agent is left and its output is read, even when cancelled; return its end."""
        readers = [asyncio.ensure_future(self._read(name, pipe)) for name, pipe in self._pipes.items()]
        try:
            messages = await warden.read_messages(self._control)
        finally:
            self.close()
            _ = await self._gone()
            _ = await asyncio.wait(readers, timeout=DRAIN_S)
            for reader in readers:
                _ = reader.cancel()
            for pipe in self._pipes.values():
                pipe.close()
        return _exit_status(messages)

    async def _read(self, name: Stream, pipe: asyncio.StreamReader) -> None:
        while data := await pipe.read(READ):
            self._sink(name, data)
        self._sink(name, b"")


async def start(command: LaunchCommand, grace_s: float, sink: Sink) -> AgentProcess:
    """Start a command below a warden. Raises OSError or ValueError when it cannot be started."""
    told = {"grace_s": grace_s, "after": command.after}
    stdin = asyncio.subprocess.DEVNULL if command.stdin is None else command.stdin
    made = await warden.start(command.argv, told, stdin, command.env)
    return AgentProcess(
        made.process.pid, {"stdout": made.stdout, "stderr": made.stderr}, made.process.wait, made.control, sink
    )


def _exit_status(messages: dict[str, Any]) -> ExitStatus:
    if error := messages.get("error"):
        return ExitStatus(error=error)
    if "status" not in messages:
        return ExitStatus(error="the process that watched it was killed")
    code = os.waitstatus_to_exitcode(messages["status"])
    return ExitStatus(
        exit_code=code if code >= 0 else None,
        signal=_signal_name(-code) if code < 0 else None,
        duration_ns=messages["ended_ns"] - messages["started_ns"],
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
