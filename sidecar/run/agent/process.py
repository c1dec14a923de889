"""One agent on this machine: a command below a warden (`sidecar.run.agent.supervisor`), its output, and how it ended.

The warden has the other end of a socket pair. When ours closes, on purpose or because the runner dies, the agent and
all that it has started end. Output is read all the time and never makes an agent wait.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, cast

from penstock.sidecar.run.agent import supervisor

Stream = Literal["stdout", "stderr"]
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
    """A running agent; made by `start` and by `sidecar.run.engines.local`."""

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
            messages = await read_messages(self._control)
        finally:
            self.close()
            try:
                _ = await self._gone()
                _ = await asyncio.wait(readers, timeout=DRAIN_S)
            finally:
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
    made = await start_warden(command.argv, told, stdin, command.env)
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


# Wardens, of agents and of the servers that the gateway hosts.


class WardenProcess(NamedTuple):
    """A warden that was started: its process, its control socket, and the outputs of its command."""

    process: asyncio.subprocess.Process
    """The warden."""
    control: socket.socket
    """The socket for orders; when it closes, on purpose or because this process dies, the command and all that it has
    started end.
    """
    stdout: OutputPipe
    stderr: OutputPipe


async def start_warden(
    command: Sequence[str],
    told: Mapping[str, Any],
    stdin: bytes | int,
    env: Mapping[str, str],
    cwd: Path | None = None,
) -> WardenProcess:
    """Start a command below a warden. Raises OSError or ValueError when it cannot be started. `told`: more settings for
    the warden, besides its socket. `stdin`: bytes for the command, or a constant of `asyncio.subprocess`.
    """
    with ExitStack() as theirs, ExitStack() as unstarted:
        ours, control = socket.socketpair()
        theirs.callback(control.close)
        unstarted.callback(ours.close)
        (out, stdout), (err, stderr) = [await output_pipe(theirs, unstarted) for _ in range(2)]
        words = json.dumps({"control": control.fileno(), **told})
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", supervisor.__file__, words, *command),
            stdin=await input_pipe(theirs, stdin) if isinstance(stdin, bytes) else stdin,
            stdout=stdout,
            stderr=stderr,
            env=dict(env),  # uvloop takes no other mapping
            cwd=cwd,
            pass_fds=(control.fileno(),),
            start_new_session=True,  # Ctrl-C in a terminal is for the starting process alone
        )
        _ = unstarted.pop_all()
    ours.setblocking(False)
    return WardenProcess(process, ours, out, err)


async def read_messages(control: socket.socket) -> dict[str, Any]:
    """Read the warden's messages until it is gone; return them merged into one object."""
    loop, said = asyncio.get_running_loop(), b""
    with suppress(OSError, ValueError):  # ValueError: from uvloop, when the socket is closed already
        while data := await loop.sock_recv(control, 4096):
            said += data
    messages: dict[str, Any] = {}
    for line in said.splitlines():
        messages |= json.loads(line)
    return messages


# Pipes between a runner and its agents.
#
# They are made here, because an event loop may use sockets instead (uvloop does), and an agent cannot open a socket
# by name, as `cat /dev/stdin` and `echo done > /dev/stderr` do.

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


async def output_pipe(theirs: ExitStack, unstarted: ExitStack) -> tuple[OutputPipe, int]:
    """A pipe for an agent's output: (its reader, the end that the agent writes to). `theirs` closes that end here,
    `unstarted` closes the reader.
    """
    reading, writing = os.pipe()
    theirs.callback(os.close, writing)
    reader, loop = OutputPipe(limit=FLOOD), asyncio.get_running_loop()
    _ = await loop.connect_read_pipe(lambda: _PipeProtocol(reader), os.fdopen(reading, "rb", 0))
    unstarted.callback(reader.close)
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


# The output of an agent: cuts bytes into lines, and finds the last JSON line and the last line on stderr. No I/O.
#
# The last line of stdout that is JSON is the agent's output. An object with a number `reward`, or with an object of
# numbers `rewards`, is also a reward.

LONGEST_LINE = 1 << 20
"""The most bytes of a line; a longer one is cut into pieces of this size, and a piece is not JSON."""
DEEPEST = 100
"""The most levels of nesting of an output: the gateway reads no deeper bodies."""
LAST_WORDS = 300
LAST_LINES = 5


class LineDecoder:
    """Cuts a stream of bytes into lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """Add bytes; return the lines that are complete now, without their ends."""
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        pieces = [line[at : at + LONGEST_LINE] for line in lines for at in range(0, len(line) or 1, LONGEST_LINE)]
        while len(rest) >= LONGEST_LINE:
            pieces.append(rest[:LONGEST_LINE])
            rest = rest[LONGEST_LINE:]
        self._rest = bytearray(rest)
        return list(map(_text, pieces))

    def close(self) -> list[str]:
        """The last line, if it had no end."""
        rest, self._rest = self._rest, bytearray()
        return [_text(rest)] if rest else []


def _text(line: bytes | bytearray) -> str:
    return line.decode(errors="replace").removesuffix("\r")


class AgentOutput:
    """Both streams of one agent: passes its lines on and keeps those that explain its end."""

    def __init__(self, line: Callable[[Stream, str], None]) -> None:
        self._line = line
        self._lines: dict[Stream, LineDecoder] = {"stdout": LineDecoder(), "stderr": LineDecoder()}
        self.result: Any = None
        """The value of the last JSON line of stdout; None until there is one."""
        self.last_words = ""
        """The last line of stderr that is not empty."""
        self._ends: dict[Stream, deque[str]] = {"stdout": deque(maxlen=LAST_LINES), "stderr": deque(maxlen=LAST_LINES)}

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of stderr; those of stdout if there are none, because some engines do not tell the streams
        apart.
        """
        return tuple(self._ends["stderr"] or self._ends["stdout"])

    def feed(self, stream: Stream, data: bytes) -> None:
        """Add bytes that the agent wrote; empty at the end of the stream."""
        lines = self._lines[stream]
        for line in lines.feed(data) if data else lines.close():
            self._note(stream, line)
            self._line(stream, line)

    def _note(self, stream: Stream, line: str) -> None:
        if line.strip():
            self._ends[stream].append(line.rstrip()[:LAST_WORDS])
        if stream == "stderr":
            self.last_words = line.strip()[:LAST_WORDS] or self.last_words
        elif (found := parse_json_line(line)) is not None:
            self.result = found


def parse_json_line(line: str) -> Any:
    """The value of a line of JSON; None when it is not JSON."""
    text = line.strip()
    if not text or text[0] not in '{["-0123456789tf':
        return None
    try:
        return _whole(json.loads(text, parse_constant=_refuse), text)
    except (ValueError, RecursionError):
        return None


def _whole(value: Any, text: str) -> Any:
    """The value in a form that can be written again; raises `ValueError` if it is nested too deep for the gateway."""
    if text.count("[") + text.count("{") > DEEPEST and _depth(value) > DEEPEST:
        raise ValueError("it is nested too deep")
    if "\\u" not in text:
        return value
    # A lone surrogate, as in a text that was cut, cannot be encoded: it becomes a question mark.
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _depth(value: Any) -> int:
    depth, layer = 0, [value]
    while layer := [inner for one in layer for inner in _inside(one)]:
        depth += 1
    return depth


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast(dict[str, Any], value).values()
    return cast(list[Any], value) if isinstance(value, list) else ()


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
