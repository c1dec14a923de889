"""One agent on this machine: a command below a warden (`sidecar.agent.supervisor`), its output, and how it ended.

The warden has the other end of a socket pair. Closing ours, on purpose or by dying, ends the agent and all that it has
started. Output is read all the time and never makes an agent wait.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.sidecar.agent import pipes, supervisor
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
            messages = await self._follow()
        finally:
            self.close()
            _ = await self._gone()
            _ = await asyncio.wait(readers, timeout=DRAIN_S)
            for reader in readers:
                _ = reader.cancel()
        return _ending(messages)

    async def _follow(self) -> dict[str, Any]:
        """All that the warden says until it is gone."""
        loop, said = asyncio.get_running_loop(), b""
        with suppress(OSError, ValueError):  # of uvloop, where it is closed already
            while data := await loop.sock_recv(self._control, 4096):
                said += data
        messages: dict[str, Any] = {}
        for line in said.splitlines():
            messages |= json.loads(line)
        return messages

    async def _read(self, name: Stream, pipe: asyncio.StreamReader) -> None:
        while data := await pipe.read(READ):
            self._sink(name, data)
        self._sink(name, b"")


async def start(command: Command, grace_s: float, sink: Sink) -> Process:
    """Start a command; raises OSError or ValueError when it cannot even be tried."""
    with ExitStack() as theirs:
        ours, control = socket.socketpair()
        theirs.callback(control.close)
        told = {"control": control.fileno(), "grace_s": grace_s, "after": command.after}
        try:
            (out, stdout), (err, stderr) = await pipes.output(theirs), await pipes.output(theirs)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", supervisor.__file__, json.dumps(told), *command.argv),
                stdin=asyncio.subprocess.DEVNULL if command.stdin is None else await pipes.given(theirs, command.stdin),
                stdout=stdout,
                stderr=stderr,
                env=dict(command.env),  # uvloop takes no other mapping
                cwd=command.cwd,
                pass_fds=(control.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is for the runner alone
            )
        except BaseException:
            ours.close()
            raise
    ours.setblocking(False)
    return Process(process.pid, {"stdout": out, "stderr": err}, process.wait, ours, sink)


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
